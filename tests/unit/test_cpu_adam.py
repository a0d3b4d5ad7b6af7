"""The Adam of machines without Transformer Engine and apex, which GPUs run too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.parallel.cpu_kernels import CpuFusedAdam


class FusedArguments(TorchDispatchMode):
    """Keeps the devices of all tensors that a fused kernel is given."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_fused_adam" in str(op):
            lists = (a for a in args if isinstance(a, list | tuple))
            self.devices += [t.device.type for tensors in lists for t in tensors]
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_the_fused_kernel_gets_every_tensor_on_the_parameters_device(adam_w_mode: bool) -> None:
    # a kernel on a GPU would read the step counts from host memory
    params = [torch.nn.Parameter(torch.ones(3, device="meta")) for _ in range(2)]
    for p in params:
        p.grad = torch.ones(3, device="meta")
    with FusedArguments() as seen:
        CpuFusedAdam(params, adam_w_mode=adam_w_mode).step()
    assert seen.devices == ["meta"] * 10  # of each: parameter, gradient, two moments, step


@pytest.mark.parametrize(("adam_w_mode", "torch_class"), [(True, "AdamW"), (False, "Adam")])
def test_steps_are_torchs(adam_w_mode: bool, torch_class: str) -> None:
    ours = [torch.nn.Parameter(torch.linspace(-1, 1, n)) for n in (3, 5)]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    made = CpuFusedAdam(ours, lr=0.1, weight_decay=0.01, adam_w_mode=adam_w_mode)
    reference = getattr(torch.optim, torch_class)(theirs, lr=0.1, weight_decay=0.01, fused=True)
    for step in range(3):
        for group in (ours, theirs):
            for p in group:
                p.grad = torch.cos(p.detach() * (step + 1))
        made.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
