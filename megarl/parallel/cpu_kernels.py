"""Computes on CPUs what CUDA libraries compute on GPUs: matrix products, rotary embedding, SwiGLU,
Adam.

Products are by the faster of torch's two libraries. torch takes MKL for float32, which leaves half
of a core's width unused where it is not Intel's: oneDNN, which torch brings too, uses all of it on
an AMD core with AVX-512, and takes plain tensors. MEGARL_ONEDNN=0 or 1 in the environment overrules
the choice. No function of them knows gradients.

Rotary embedding and SwiGLU are bound by memory, so their time is how often they read and write:
forward and backward are written out instead of left to autograd.

T tokens, n heads, d head dimension, F gated width.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

# addmm of bf16 factors to an fp32 sum: https://github.com/pytorch/pytorch/pull/167931
_ADDS_TO_FP32 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)
_FEW_ROWS = 4  # from here on oneDNN pays
# of torch, and of oneDNN below it, with the least of each: either keeps what the other forgets
_CAPACITIES = {"LRU_CACHE_CAPACITY": 1, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": 0}


@cache
def by_onednn() -> bool:
    """Returns whether float32 products go through oneDNN. It depends on the machine alone, so that
    equal machines give equal bits. Raises ValueError for a MEGARL_ONEDNN other than 0 or 1."""
    given = os.environ.get("MEGARL_ONEDNN", "")
    if given not in ("", "0", "1"):
        raise ValueError(
            f"MEGARL_ONEDNN={given}: use 0 (never), 1 (where it can) or leave it unset"
        )
    has = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return has and (given == "1" or (given == "" and wide and not _is_intel()))


def remember_shapes(count: int) -> None:
    """Has oneDNN keep the code that it made for the `count` shapes of factors met last, from this
    process's first product on; what the environment says comes first. A shape takes some 0.6 MB,
    and 1.5 ms to make. By itself torch keeps 1,024, and their small blocks, which live long between
    large tensors, keep these from growing together again: where every micro-batch has a length of
    its own, memory grows for hundreds of steps (https://github.com/pytorch/pytorch/issues/27971).
    Raises ValueError for a capacity in the environment that torch would crash on.
    """
    for name, least in _CAPACITIES.items():
        given = os.environ.setdefault(name, str(count))
        if not given.isdecimal() or int(given) < least:
            raise ValueError(f"{name}={given}: use a number of at least {least}, or leave it unset")


def _is_intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return True  # unknown: torch's own choice


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns x [...,n,K] times the transpose of weight [N,K], plus bias [N]. Without gradients."""
    if takes(x, weight) and x.numel() >= _FEW_ROWS * x.shape[-1] > 0:
        factors = _plain(x), _plain(weight)
        found: Tensor = torch.ops.mkldnn._linear_pointwise(*factors, bias, "none", [], "")
        return found
    return F.linear(x, weight, bias)


def _plain(t: Tensor) -> Tensor:
    """Returns t, or a copy where it is neither whole rows nor a transposed matrix of such: oneDNN
    refuses numbers that repeat in memory, as in an expanded gradient."""
    if t.is_contiguous() or (t.ndim == 2 and t.t().is_contiguous()):
        return t
    return t.contiguous()


def transposed_product(g: Tensor, x: Tensor) -> Tensor:
    """Returns the transpose of g [n,N] times x [n,K]: [N,K], a weight's gradient."""
    if not takes(g, x):
        return g.t() @ x
    if g.shape[1] > x.shape[1]:  # oneDNN is faster with the longer side as the weight
        return linear(x.t(), g.t()).t()
    return linear(g.t(), x.t())


def takes(x: Tensor, weight: Tensor) -> bool:
    """Returns whether oneDNN computes the product of these factors: float32 on a CPU."""
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and not torch.is_grad_enabled()
        and by_onednn()
    )


def accumulate(h: Tensor, g: Tensor, total: Tensor) -> None:
    """Adds g [c,v] transposed times h [c,H] to total [v,H]: a weight's gradient. The product has
    the dtype of its factors, the sum that of `total`; on GPUs one kernel adds it in fp32."""
    if total.dtype == h.dtype and not takes(g, h):
        total.addmm_(g.t(), h)
    elif h.is_cuda and h.dtype == torch.bfloat16 and _ADDS_TO_FP32:
        torch.ops.aten.addmm.dtype_out(total, g.t(), h, total.dtype, out=total)
    else:
        total += transposed_product(g, h)


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
    tables = vars(cu_seqlens).setdefault("_rotary_tables", {})
    known = tables.get(id(freqs))  # whose freqs are alive: no other's have this id
    if known is None or known[1].dtype != t.dtype:
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        at = torch.cat([_positions(n, cp_size, cp_rank) for n in lengths])
        known = (freqs, *(table[at, 0] for table in _tables(freqs, t.dtype)))
        tables[id(freqs)] = known
        if len(tables) > 2:  # layers may differ in their angles; recomputed layers bring new ones
            del tables[next(iter(tables))]
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


def product(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Returns a times b as torch.matmul does; that of a [...,n,K] and a matrix b [K,N] without
    gradients by the faster library."""
    if out is None and b.ndim == 2 and a.ndim > 1 and takes(a, b):
        return linear(a, b.t())
    return _matmul(a, b, out=out)


_matmul = torch.matmul  # as it is before the patch


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
