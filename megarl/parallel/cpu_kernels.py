"""Computes rotary embedding, SwiGLU and weight gradients on CPUs, in place of the kernels that
Transformer Engine, the compiler and apex give on GPUs. All are bound by memory, so their time is
how often they read and write: forward and backward are written out instead of left to autograd.

T tokens, n heads, d head dimension, F gated width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.parallel import cpu_products as products
from megarl.parallel.vocab_parallel import accumulate


class _Rotate(torch.autograd.Function):
    """t * cos + rotate_half(t) * sin, where rotate_half (x1, x2) = (-x2, x1). The sign is part of
    `signed_sin` = (-sin, sin), which leaves a cyclic shift by d/2. It is a rotation, so its
    gradient is rotated by the negative angle. https://arxiv.org/abs/2104.09864
    """

    @staticmethod
    def forward(ctx: Any, t: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(cos, signed_sin)
        return _rotate(t, cos, signed_sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, signed_sin = ctx.saved_tensors
        return _rotate(grad, cos, signed_sin, -1), None, None


def _rotate(t: Tensor, cos: Tensor, signed_sin: Tensor, sign: int) -> Tensor:
    shifted = t.roll(t.shape[-1] // 2, -1)
    return (t * cos).addcmul_(shifted, signed_sin, value=sign)


def _tables(freqs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns cos and (-sin, sin) of angles [..., d] whose two halves are equal."""
    sin = freqs.sin()
    low, high = sin.chunk(2, -1)
    return freqs.cos().to(dtype), torch.cat((-low, high), -1).to(dtype)


def rotary(t: Tensor, freqs: Tensor, interleaved: bool = False, **_: Any) -> Tensor:
    """Rotates t [s,b,n,d] by the angles freqs [s,1,1,d]. Raises AssertionError where pairs of
    neighbours, or a part of the head, are to be turned."""
    assert not interleaved and freqs.shape[-1] == t.shape[-1]
    rotated: Tensor = _Rotate.apply(t, *_tables(freqs, t.dtype))
    return rotated


def rotary_packed(
    t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int = 1, cp_rank: int = 0, **_: Any
) -> Tensor:
    """Rotates t [T,n,d] of this context-parallel rank by freqs [longest,1,1,d]; cu_seqlens is
    global.

    All layers of a micro-batch bring the same cu_seqlens: the tables of T tokens stay with it.
    Raises AssertionError where a part of the head is to be turned.
    """
    assert freqs.shape[-1] == t.shape[-1]
    known = getattr(cu_seqlens, "_rotary_tables", None)
    if known is None or known[0] is not freqs or known[1].dtype != t.dtype:
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        at = torch.cat([_positions(n, cp_size, cp_rank) for n in lengths])
        known = (freqs, *(table[at, 0] for table in _tables(freqs, t.dtype)))
        cu_seqlens._rotary_tables = known  # type: ignore[attr-defined]
    rotated: Tensor = _Rotate.apply(t, *known[1:])
    return rotated


def _positions(length: int, cp_size: int, cp_rank: int) -> Tensor:
    """Returns a rank's positions: all, or with context parallelism chunks r and 2*cp-1-r."""
    if cp_size == 1:
        return torch.arange(length)
    chunks = torch.arange(length).chunk(2 * cp_size)
    return torch.cat((chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]))


def swiglu(y: Tensor) -> Tensor:
    """Returns silu(gate) * up [T,F] for y [T,2F] = (gate, up). https://arxiv.org/abs/2002.05202"""
    gate, up = y.chunk(2, -1)
    return F.silu(gate).mul_(up)


def swiglu_back(g: Tensor, y: Tensor) -> Tensor:
    """Returns the gradient [T,2F] of swiglu's input y, for the gradient g [T,F] of its output."""
    gate, up = y.chunk(2, -1)
    out = torch.empty_like(y)
    d_gate, d_up = out.chunk(2, -1)
    torch.mul(g, F.silu(gate), out=d_up)
    torch.ops.aten.silu_backward.grad_input(g * up, gate, grad_input=d_gate)
    return out


def wgrad_accumulate(x: Tensor, g: Tensor, main_grad: Tensor) -> None:
    """Adds g [T,out] transposed times x [T,in] to main_grad [out,in]."""
    accumulate(main_grad, g, x)


def product(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Returns a times b as torch.matmul does; that of a [...,n,K] and a matrix b [K,N] without
    gradients by the faster library (megarl.parallel.cpu_products)."""
    if out is None and b.ndim == 2 and a.ndim > 1 and products.takes(a, b):
        return products.linear(a, b.t())
    return _matmul(a, b, out=out)


_matmul = torch.matmul  # as it is before the patch
