"""Keeps activations that wait for the backward pass in host memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

MIN_BYTES = 64 << 10  # smaller ones stay: their copies cost more than their memory

_Packed = Tensor | tuple[torch.device, Tensor]


def offload_activations(on: bool) -> AbstractContextManager[None]:
    """Returns a context in which tensors that autograd saves go to (pinned) host memory, and come
    back when the backward pass asks for them; values stay the same to the bit.

    Parameters, whose gradients megatron-core accumulates beside them, and small tensors stay where
    they are. With full recomputation the inputs of the recomputed layers are what goes.
    """
    return saved_tensors_hooks(_pack, _unpack) if on else nullcontext()


def _pack(tensor: Tensor) -> _Packed:
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, torch.nn.Parameter):
        return tensor
    if not tensor.is_floating_point() or tensor.nbytes < MIN_BYTES:
        return tensor.detach()
    pinned = tensor.device.type == "cuda"
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    # in the stream that made it: its memory is not given to others before the copy is over
    host.copy_(tensor.detach(), non_blocking=pinned)
    return tensor.device, host


def _unpack(packed: _Packed) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    device, host = packed
    return host.to(device, non_blocking=host.is_pinned())
