"""Reduces a chunk of logits, and turns it into its gradient in place, in one read each (Triton).

The torch twin is megarl/parallel/vocab_parallel.py, which has the formulas and merges the shards.
Logits stay in the model's dtype, undivided by the temperature; arithmetic is in fp32. A maximum and
the sums relative to it grow together, block by block of a row (https://arxiv.org/abs/1805.02867).

What is outside of given ids is summed without them, in the same read: their logits are -inf while
the kernel reads the row, and come in at its end as one block more.

c rows (tokens), v columns (this shard's real vocabulary), n ids per row. `rows` of ids are local
columns, -1 where another shard has them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl.kernels.given_tokens import GivenGrad

# For an H100. One program per row: 4,096 of them are eight waves on 132 multiprocessors. 8 warps
# with 16 numbers a thread, two loads of 16 bytes in bf16. A program has 8 KiB in flight; bandwidth
# times latency (3.35 TB/s, 0.7 us) asks for 18 KiB per multiprocessor. Four programs of read_kernel
# fit at up to 64 registers: 32 KiB. Three of gradient_kernel fit at up to 80, of which Triton 3.6
# and 3.7 take 67 to 80 (3.9: at most 64): 24 KiB.
# A number takes 10 to 14 instructions, of which 17 are issued in the time that it takes to read it.
BLOCK, WARPS = 4096, 8
_NO_ID = tl.constexpr(2**31 - 1)
_NOTHING = tl.constexpr(-1e4)  # 2 to the power of it is 0, and 0 times it is a number
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _add(m, s, u, best, x, ids, scale, ENTROPY: tl.constexpr, GREEDY: tl.constexpr):
    """Adds logits x at ids to a row's maximum m, to its sums s of 2^d and u of 2^d d, where
    d = scale (x - m), and to the lowest id of the maximum."""
    largest = tl.max(x, 0)
    new = tl.maximum(m, largest)
    if GREEDY:
        first = tl.min(tl.where(x == largest, ids, _NO_ID), 0)
        tied = tl.where(largest == m, tl.minimum(best, first), best)
        best = tl.where(largest > m, first, tied)
    base = tl.where(new == -float("inf"), 0.0, new)  # -inf less itself is no number
    d = (x - base) * scale
    e = tl.exp2(d)
    shift = tl.maximum((m - base) * scale, _NOTHING)
    shrink = tl.exp2(shift)
    if ENTROPY:
        u = shrink * (u + s * shift) + tl.sum(e * tl.maximum(d, _NOTHING), 0)
    s = shrink * s + tl.sum(e, 0)
    return new, s, u, best


@triton.jit
def read_kernel(
    x_ptr, out_ptr, best_ptr, own_ptr, ids_ptr, stride, v, n, scale,
    ENTROPY: tl.constexpr, GREEDY: tl.constexpr, IDS: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes a row's scaled maximum, its sums, and the sum outside of n ids, whose own logits come
    apart; IDS: a power of two from n on, 0 without ids."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += tl.multiple_of(row * stride, ALIGN)
    m, s, u, best = -float("inf"), 0.0, 0.0, _NO_ID
    by = scale * _LOG2_E  # a power of two costs a product less per number
    whole = v // BLOCK * BLOCK  # without a mask, which would keep loads from being 16 bytes wide
    for start in range(0, whole, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at).to(tl.float32)
        m, s, u, best = _add(m, s, u, best, x, at, by, ENTROPY, GREEDY)
    at = whole + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < v, other=-float("inf")).to(tl.float32)
    m, s, u, best = _add(m, s, u, best, x, at, by, ENTROPY, GREEDY)
    if IDS > 0:
        outside, before = s, m
        k = tl.arange(0, IDS)
        x = tl.load(own_ptr + row * n + k, mask=k < n, other=-float("inf"))
        at = tl.load(ids_ptr + row * n + k, mask=k < n, other=0).to(tl.int32)
        m, s, u, best = _add(m, s, u, best, x, at, by, ENTROPY, GREEDY)
        base = tl.where(m == -float("inf"), 0.0, m)
        outside *= tl.exp2(tl.maximum((before - base) * by, _NOTHING))
        tl.store(out_ptr + 4 * row + 3, outside)
    tl.store(out_ptr + 4 * row, m * scale)
    tl.store(out_ptr + 4 * row + 1, s)
    if ENTROPY:
        tl.store(out_ptr + 4 * row + 2, u / _LOG2_E)
    if GREEDY:
        tl.store(best_ptr + row, best)


@triton.jit
def _slope(x, at, label, log_z, factor, g_label, entropy, g_entropy, scale, ENTROPY: tl.constexpr):
    """Returns the gradient of logits x at columns `at`; scale, log_z, entropy and 1 / g_entropy are
    for logarithms to the base of 2."""
    log_p = x * scale - log_z
    p = tl.exp2(log_p)
    if ENTROPY:
        factor += g_entropy * (tl.maximum(log_p, _NOTHING) + entropy)
    return tl.where(at == label, g_label, 0.0) - p * factor


@triton.jit
def gradient_kernel(
    x_ptr, label_ptr, log_z_ptr, factor_ptr, g_label_ptr, entropy_ptr, g_entropy_ptr, stride, v,
    scale, ENTROPY: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Overwrites a row of logits with its gradient."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += tl.multiple_of(row * stride, ALIGN)
    label = tl.load(label_ptr + row).to(tl.int32)
    log_z, factor = tl.load(log_z_ptr + row) * _LOG2_E, tl.load(factor_ptr + row)
    g_label = tl.load(g_label_ptr + row)
    entropy, g_entropy = 0.0, 0.0
    if ENTROPY:
        entropy = tl.load(entropy_ptr + row) * _LOG2_E
        g_entropy = tl.load(g_entropy_ptr + row) / _LOG2_E
    by, whole = scale * _LOG2_E, v // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at).to(tl.float32)
        g = _slope(x, at, label, log_z, factor, g_label, entropy, g_entropy, by, ENTROPY)
        tl.store(x_ptr + at, g.to(x_ptr.dtype.element_ty))
    at = whole + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < v, other=0.0).to(tl.float32)
    g = _slope(x, at, label, log_z, factor, g_label, entropy, g_entropy, by, ENTROPY)
    tl.store(x_ptr + at, g.to(x_ptr.dtype.element_ty), mask=at < v)


class Numbers(NamedTuple):
    """Holds what was read of c rows: the largest logit over the temperature and its lowest column
    (where asked for), [c] each, and what `parts` takes: the sums relative to the largest
    [1 or 2, c], those outside of ids [c], and scaled logits [c,n] with whether they are here."""

    largest: Tensor
    winner: Tensor | None
    sums: Tensor
    outside: dict[str, Tensor]
    own: dict[str, tuple[Tensor, Tensor]]

    def parts(self, top: Tensor) -> dict[str, Tensor]:
        """Returns this shard's part of every sum over the shards, [.,c] each, relative to their
        largest logit top [c]."""
        total, *weighted = self.sums
        shift = torch.where(total == 0, 0.0, self.largest - top)  # no column: the largest is -inf
        by = shift.exp()
        sums = [total * by, *((u + total * shift) * by for u in weighted)]
        outside = {name: (x * by)[None] for name, x in self.outside.items()}
        off = top[:, None]
        own = {name: torch.where(at, x - off, 0.0).t() for name, (x, at) in self.own.items()}
        return {"sums": torch.stack(sums), **outside, **own}


def read(
    x: Tensor, rows: Mapping[str, Tensor], outside: Container[str], scale: float, *,
    entropy: bool, greedy: bool,
) -> Numbers:  # fmt: skip
    """Reads logits x [c,v] once, and returns their numbers, with the logits at `rows` [c,n]; of
    names that are `outside` the sum over all other columns instead, of distinct ids, in a read of
    its own from the second on. scale: 1 / temperature. x is as before when it returns."""
    c, v = x.shape
    own = {name: (_picked(x, at) * scale, at >= 0) for name, at in rows.items()}
    numbers = torch.empty(c, 4, device=x.device)
    winner = torch.empty(c, dtype=torch.int32, device=x.device) if greedy else None
    sums = {}
    for name in [name for name in rows if name in outside] or [""]:  # alike on every rank
        own.pop(name, None)
        at = rows.get(name, torch.empty(c, 0, dtype=torch.long, device=x.device))
        logits, n = torch.where(at < 0, -torch.inf, _picked(x, at)), at.shape[1]
        _put(x, at, -torch.inf, torch.inf, "amin")
        read_kernel[(c,)](
            x, numbers, winner, logits, at, x.stride(0), v, n, scale, ENTROPY=entropy,
            GREEDY=greedy, IDS=triton.next_power_of_2(n) if n else 0, **_how(x),
        )  # fmt: skip
        _put(x, at, logits, -torch.inf, "amax")
        sums[name] = numbers[:, 3].clone()
    sums.pop("", None)
    return Numbers(numbers[:, 0], winner, numbers[:, 1 : 2 + entropy].t(), sums, own)


def gradient_(
    x: Tensor, labels: Tensor, log_z: Tensor, entropy: Tensor, g_label: Tensor,
    g_entropy: Tensor | None, scale: float, given: tuple[Tensor, GivenGrad] | None = None,
) -> Tensor:  # fmt: skip
    """Overwrites logits x [c,v] with their gradient over `scale`, and returns it. labels [c]: their
    rows; g_label, g_entropy [c]: gradients of their logprobs and of the entropy; given: rows [c,n]
    of distinct ids, and what their gradients are."""
    factor, there = g_label, None
    if given is not None:
        rows, grads = given
        factor = g_label + grads.more
        log_p = _picked(x, rows) * scale - log_z[:, None]
        p, of_ids = log_p.exp(), factor[:, None]
        if g_entropy is not None:
            spread = torch.where(p > 0, log_p + entropy[:, None], 0.0)
            of_ids = of_ids + g_entropy[:, None] * spread
        labelled = (rows == labels[:, None]) & (rows >= 0)
        there = grads.given - p * of_ids + torch.where(labelled, g_label[:, None], 0.0)
        labels = labels.masked_fill(labelled.any(-1), -1)
        factor = factor - grads.less
        _put(x, rows, -torch.inf, torch.inf, "amin")
    gradient_kernel[(len(x),)](
        x, labels, log_z, factor, g_label, entropy, g_entropy, x.stride(0), x.shape[1], scale,
        ENTROPY=g_entropy is not None, **_how(x),
    )  # fmt: skip
    if there is not None:
        _put(x, rows, there, 0.0, "sum")  # to the 0 of a logit of -inf
    return x


def _picked(x: Tensor, rows: Tensor) -> Tensor:
    """Returns x [c,v] at rows [c,n] in fp32, and some number for what is not here."""
    if not x.shape[1]:
        return torch.zeros(rows.shape, device=x.device)
    return x.gather(-1, rows.clamp(min=0)).float()


def _put(x: Tensor, rows: Tensor, values: Tensor | float, nothing: float, how: str) -> None:
    """Puts values [c,n] into x [c,v] at rows [c,n] by scatter_reduce_'s `how`, for which what is
    not here counts for `nothing`."""
    if x.shape[1]:
        entries = torch.where(rows < 0, nothing, values).to(x.dtype)
        x.scatter_reduce_(-1, rows.clamp(min=0), entries, how)


def _how(x: Tensor) -> dict[str, Any]:
    """Returns how both kernels are compiled for x: rows of a multiple of 8 are read by 16 bytes."""
    return dict(ALIGN=8 if x.stride(0) % 8 == 0 else 1, BLOCK=BLOCK, num_warps=WARPS)
