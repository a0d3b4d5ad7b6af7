"""Adam for CPUs, with the state that Transformer Engine's has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw


class CpuFusedAdam(torch.optim.Optimizer):
    """Replaces Transformer Engine's FusedAdam by torch ops: `step` is an int in the parameter group
    and the state is {exp_avg, exp_avg_sq}, so optimizer checkpoints are the same as on GPUs."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        **_: Any,
    ) -> None:
        self.adam_w_mode = adam_w_mode
        defaults = dict(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=True
        )
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None, **_: Any) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient by AdamW (arXiv 1711.05101), or with
        adam_w_mode=False by Adam (arXiv 1412.6980). `closure` is not called."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            group["step"] = group.get("step", 0) + 1
            for p in params:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            # on the parameters' device: the fused kernel reads them there
            steps = torch.full((len(params),), group["step"] - 1.0, device=params[0].device)
            (adamw if self.adam_w_mode else adam)(
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                list(steps.unbind()),
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                fused=True,
            )
