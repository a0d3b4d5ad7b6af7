"""Stands in for SGLang's compiled kernels, which need AMX or a GPU.

SGLang has a plain torch path beside each kernel that serving text on a CPU comes by, but imports
the kernels' names all the same: they are there, and raise where they are called. One has no other
path and is written out here, and those of gated delta networks are in `mamba`. Its LoRA layers want
pinned memory, which torch only has with a GPU, and so does its store of routes, which asks CUDA's
runtime for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import mamba

__version__ = "0.0.0+stub"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    *_: Any,
) -> None:
    """req_to_token[r, start:end] takes the next of `out_cache_loc`, request by request."""
    done = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        slots = out_cache_loc[done : done + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        done += end - start


def _unpinned(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(create)
    def call(*args: Any, pin_memory: bool = False, **kw: Any) -> torch.Tensor:
        return create(*args, **kw)

    return call


class _Cudart:
    """Takes ordinary memory for pinned."""

    @staticmethod
    def cudaHostRegister(*_: int) -> int:
        return 0


if not torch.cuda.is_available():
    torch.cuda.cudart = _Cudart
    torch.Tensor.pin_memory = lambda self, *_: self
    for _name in ("tensor", "empty", "zeros"):
        setattr(torch, _name, _unpinned(getattr(torch, _name)))


for _name in dir(mamba):
    if _name.endswith("_cpu"):
        setattr(torch.ops.sgl_kernel, _name, getattr(mamba, _name))


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kw: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is not built for this machine")

    return missing
