"""Batches many packed sequences into a few padded SDPA calls. Pure, except for index tensors.

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
from megarl.parallel.worlds import pinned

SHORT = 32
GROWTH = 1.25


@dataclass(frozen=True)
class Item:
    """Describes queries [q_start, q_start + q_len) of this rank's tokens; they see keys [k_start,
    k_start + k_len) of the gathered sequence, the last q_len of which are themselves."""

    q_start: int
    q_len: int
    k_start: int
    k_len: int


@dataclass(frozen=True)
class Group:
    """Holds n items padded to q_len queries and k_len keys; padding repeats an item's last token.

    `mask` [n, 1, q_len, k_len] is None where plain causal attention is right: no sequence is longer
    than a sliding window, and causality hides the padding, which comes after every real query.
    """

    n: int
    q_len: int
    k_len: int
    mask: Tensor | None


@dataclass(frozen=True)
class AttentionPlan:
    """Says how a rank's tokens become the rows of the groups, and how the groups' outputs become
    tokens again. Each group has n * q_len rows of queries and n * k_len of keys, one group after
    another.

    q_index, k_index: the tokens that the rows are gathered from. `take` [tokens]: the row of each
    of this rank's tokens. All three are None where row i is token i, as for sequences of one
    length. `kv_order` [tokens * cp]: global token t among the keys gathered rank after rank; None
    without cp.
    """

    tokens: int
    groups: tuple[Group, ...]
    q_index: Tensor | None
    k_index: Tensor | None
    take: Tensor | None
    kv_order: Tensor | None


def items(lengths: Sequence[int], cp: int, rank: int) -> Iterator[Item]:
    """Yields the items of context-parallel rank `rank` for packed sequences of (padded, global)
    `lengths`. Raises AssertionError for a length that 2*cp does not divide."""
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
    """Returns the class of n tokens: 0 up to SHORT, then one more for each factor of GROWTH."""
    return 0 if n <= SHORT else math.ceil(math.log(n / SHORT) / math.log(GROWTH) - 1e-9)


def make_plan(
    lengths: Sequence[int], cp: int, rank: int, device: torch.device, window: int | None = None
) -> AttentionPlan:
    """Makes the plan of context-parallel rank `rank` for packed sequences of (padded, global)
    `lengths`; its groups together hold every query of the rank once. `window`: a token attends to
    itself and the `window` - 1 tokens before it; None: to all before it."""
    # the chunk number (k_len / q_len) is part of the class: one group's keys are then alike too
    classes: dict[tuple[int, int], list[Item]] = {}
    for item in items(lengths, cp, rank):
        key = (length_class(item.q_len), item.k_len // item.q_len)
        classes.setdefault(key, []).append(item)
    tokens = sum(lengths) // cp
    take = torch.empty(tokens, dtype=torch.long)
    groups, q_rows, k_rows, row = [], [], [], 0
    for members in classes.values():
        group, q_index, k_index = _group(members, cp > 1, window, device)
        for m in members:
            take[m.q_start : m.q_start + m.q_len] = torch.arange(row, row + m.q_len)
            row += group.q_len
        groups.append(group)
        q_rows.append(q_index)
        k_rows.append(k_index)
    if cp == 1 and row == tokens and torch.equal(take, torch.arange(tokens)):
        return AttentionPlan(tokens, tuple(groups), None, None, None, None)
    q_index, k_index, take = (
        pinned(x).to(device, non_blocking=True)
        for x in (torch.cat(q_rows), torch.cat(k_rows), take)
    )
    kv_order = None
    if cp > 1:
        held = torch.cat([zigzag_index(lengths, cp, r) for r in range(cp)])
        kv_order = pinned(torch.argsort(held)).to(device, non_blocking=True)
    return AttentionPlan(tokens, tuple(groups), q_index, k_index, take, kv_order)


def _group(
    members: Sequence[Item], masked: bool, window: int | None, device: torch.device
) -> tuple[Group, Tensor, Tensor]:
    """Returns the group of `members` and, on the host, the tokens of its query and key rows."""
    q_start, q_len, k_start, k_len = (
        torch.tensor([getattr(i, f) for i in members])[:, None]
        for f in ("q_start", "q_len", "k_start", "k_len")
    )
    i = torch.arange(int(q_len.max()))[None]
    j = torch.arange(int(k_len.max()))[None]
    mask = None
    if masked or (window is not None and j.numel() > window):
        own = (i + k_len - q_len)[:, :, None]  # the key of the query's own token
        mask = j[:, None, :] <= own
        if window is not None:
            mask &= j[:, None, :] > own - window
        mask = pinned(mask[:, None]).to(device, non_blocking=True)
    return (
        Group(len(members), i.numel(), j.numel(), mask),
        (q_start + torch.minimum(i, q_len - 1)).flatten(),
        (k_start + torch.minimum(j, k_len - 1)).flatten(),
    )
