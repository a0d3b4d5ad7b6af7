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

from megarl.parallel.packing import zigzag_index

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
    """n items padded to Lq queries and Lk keys; padding repeats an item's last token.

    q_index [n * Lq], k_index [n * Lk]: the tokens they are gathered from. `mask` [n, 1, Lq, Lk] is
    None where plain causal attention is right: padding comes after every real query, so causality
    hides it.
    """

    n: int
    q_index: Tensor
    k_index: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class Plan:
    """`take` [T]: where token t's row lies in the groups' outputs, concatenated as [n * Lq] rows.
    `kv_order` [T * cp]: global token t among the keys gathered rank after rank; None without cp.
    """

    groups: tuple[Group, ...]
    take: Tensor
    kv_order: Tensor | None


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


def make_plan(lengths: Sequence[int], cp: int, rank: int, device: torch.device) -> Plan:
    """The plan of context-parallel rank `rank` for packed sequences of (padded, global) `lengths`;
    its groups together hold every query of the rank once."""
    # the chunk number (k_len / q_len) is part of the class: one group's keys are then alike too
    classes: dict[tuple[int, int], list[Item]] = {}
    for item in items(lengths, cp, rank):
        key = (length_class(item.q_len), item.k_len // item.q_len)
        classes.setdefault(key, []).append(item)
    take = torch.empty(sum(lengths) // cp, dtype=torch.long)
    groups, row = [], 0
    for members in classes.values():
        width = max(m.q_len for m in members)
        for m in members:
            take[m.q_start : m.q_start + m.q_len] = torch.arange(row, row + m.q_len)
            row += width
        groups.append(_group(members, cp > 1, device))
    kv_order = None
    if cp > 1:
        held = torch.cat([zigzag_index(lengths, cp, r) for r in range(cp)])
        kv_order = torch.argsort(held).to(device)
    return Plan(tuple(groups), take.to(device), kv_order)


def _group(members: Sequence[Item], masked: bool, device: torch.device) -> Group:
    q_start, q_len, k_start, k_len = (
        torch.tensor([getattr(i, f) for i in members])[:, None]
        for f in ("q_start", "q_len", "k_start", "k_len")
    )
    i = torch.arange(int(q_len.max()))[None]
    j = torch.arange(int(k_len.max()))[None]
    q_index = (q_start + torch.minimum(i, q_len - 1)).flatten()
    k_index = (k_start + torch.minimum(j, k_len - 1)).flatten()
    mask = None
    if masked:
        mask = (j[:, None, :] <= (i + k_len - q_len)[:, :, None])[:, None].to(device)
    return Group(len(members), q_index.to(device), k_index.to(device), mask)
