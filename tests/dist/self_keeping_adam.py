"""An optimizer that keeps main weights itself, as Transformer Engine's does."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.adamw import adamw

from megarl.parallel.cpu_kernels import CpuFusedAdam


class SelfKeepingAdam(CpuFusedAdam):
    """Stands in for Transformer Engine's FusedAdam under megatron-core's precision-aware optimizer:
    it reads `decoupled_grad` and keeps main weights and moments itself, in their own dtypes.
    """

    def __init__(
        self, params: Any, *, master_weights: bool, use_decoupled_grad: bool,
        store_param_remainders: bool, master_weight_dtype: torch.dtype,
        exp_avg_dtype: torch.dtype, exp_avg_sq_dtype: torch.dtype, **kw: Any,
    ) -> None:  # fmt: skip
        assert master_weights and use_decoupled_grad and not store_param_remainders
        self.dtypes = {
            "master_param": master_weight_dtype,
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
        }
        super().__init__(params, **kw)

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        assert not store_param_remainders
        for name, dtype in self.dtypes.items():
            start = param.detach() if name == "master_param" else torch.zeros_like(param)
            self.state[param][name] = start.to(dtype, copy=True)

    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        return self.state[param][state_name].float()

    def set_scaled_state(
        self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor
    ) -> None:
        assert unscaled_state.dtype == torch.float32
        self.state[param][state_name] = unscaled_state.to(self.dtypes[state_name])

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if not self.state[p]:
                    self.initialize_state(p, False)
                state = {name: self.get_unscaled_state(p, name) for name in self.dtypes}
                adamw(
                    [state["master_param"]], [p.decoupled_grad], [state["exp_avg"]],
                    [state["exp_avg_sq"]], [], [torch.tensor(group["step"] - 1.0)], amsgrad=False,
                    beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
                    weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
                    fused=True,
                )  # fmt: skip
                p.copy_(state["master_param"])
                for name, value in state.items():
                    self.set_scaled_state(p, name, value)
