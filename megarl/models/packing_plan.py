"""Batches many packed sequences into a few padded SDPA calls. Pure but for index tensors.

A Python loop over the sequences of a micro-batch costs more than their attention when they are
short and many, and padding all to the longest costs quadratically when they are not alike. So
sequences are grouped by length class: inside a group the longest is at most GROWTH times the
shortest (or all are at most SHORT), which bounds the padding, and the number of groups grows with
the logarithm of the longest sequence.

With context parallelism cp, a rank holds chunks r and 2*cp-1-r of every sequence cut in 2*cp chunks
(zigzag, so that causal work is balanced); each of the two is an item of its own, whose queries see
the keys of all chunks up to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SHORT = 32
GROWTH = 1.25


@dataclass(frozen=True)
class Item:
    """Queries [q_start, q_start + q_len) of this rank's tokens; they see keys
    [k_start, k_start + k_len) of the gathered sequence, the last q_len of which are themselves."""

    q_start: int
    q_len: int
    k_start: int
    k_len: int


@dataclass(frozen=True)
class Group:
    """n items padded to Lq queries and Lk keys. q_index [n, Lq] and k_index [n, Lk] gather tokens
    (padding repeats an item's last token); `real` [n * Lq] lists the rows that are not padding and
    `rows` [sum of q_len] the tokens they belong to. `mask` [n, 1, Lq, Lk] is None where plain causal
    attention is right: padding comes after every real query, so causality hides it."""

    q_index: Tensor
    k_index: Tensor
    real: Tensor
    rows: Tensor
    mask: Tensor | None


def items(lengths: Sequence[int], cp: int, rank: int) -> Iterator[Item]:
    """Items of context-parallel rank `rank` for packed sequences of (padded, global) `lengths`."""
    q = k = 0
    for n in lengths:
        if cp == 1:
            if n:
                yield Item(q, n, k, n)
            q += n
        else:
            assert n % (2 * cp) == 0, f"a sequence of {n} tokens must be padded to {2 * cp} x k"
            c = n // (2 * cp)
            for chunk in (rank, 2 * cp - 1 - rank):
                if c:
                    yield Item(q, c, k, (chunk + 1) * c)
                q += c
        k += n


def length_class(n: int) -> int:
    return 0 if n <= SHORT else math.ceil(math.log(n / SHORT) / math.log(GROWTH) - 1e-9)


def plan_groups(
    lengths: Sequence[int], cp: int, rank: int, device: torch.device
) -> tuple[Group, ...]:
    """Groups that together hold every query of this rank once."""
    # items of one class share the ratio k_len / q_len: the chunk number is part of the class
    classes: dict[tuple[int, int], list[Item]] = {}
    for item in items(lengths, cp, rank):
        key = (length_class(item.q_len), item.k_len // item.q_len)
        classes.setdefault(key, []).append(item)
    return tuple(_group(members, cp > 1, device) for members in classes.values())


def _group(members: Sequence[Item], masked: bool, device: torch.device) -> Group:
    q_start, q_len, k_start, k_len = (
        torch.tensor([getattr(i, f) for i in members], device=device)[:, None]
        for f in ("q_start", "q_len", "k_start", "k_len")
    )
    i = torch.arange(max(m.q_len for m in members), device=device)[None]
    j = torch.arange(max(m.k_len for m in members), device=device)[None]
    q_index = q_start + torch.minimum(i, q_len - 1)
    k_index = k_start + torch.minimum(j, k_len - 1)
    real = (i < q_len).flatten().nonzero().squeeze(1)
    mask = None
    if masked:
        mask = (j[:, None, :] <= (i + k_len - q_len)[:, :, None])[:, None]
    return Group(q_index, k_index, real, q_index.flatten()[real], mask)
