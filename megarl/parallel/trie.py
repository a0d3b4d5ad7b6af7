"""Finds the prefixes that sequences share, plans micro-batches by them, and packs each token
once. Pure.

A trie has one node for every distinct prefix: two tokens are one node where they and all tokens
before them are equal, with what stands beside them (the experts that a router is told to choose).
Its nodes stand packed, depth-first: a segment is a run of nodes without a
fork, its children follow it, and a subtree is one range of tokens. Of several children the one with
the most tokens below it comes first, which leaves attention the fewest and largest blocks.

b sequences, S positions (right-padded), T packed tokens (nodes and filling).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megarl.parallel.packing import (
    TOKENS,
    UNALIGNED,
    Alignment,
    Cost,
    Item,
    Needs,
    Packed,
    Segment,
    Trie,
    token_budget,
)

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class Sorted(NamedTuple):
    """Holds sequences in lexicographic order: `order` [b] has their rows, `common` [b] how many
    first tokens each shares with the one before it (0 of the first)."""

    order: Ints
    common: Ints


def token_bytes(input_ids: Tensor, beside: Tensor | None = None) -> Bytes:
    """Returns what has to be equal for two tokens to be one, as bytes that sort as the ids do: ids
    from 0 to 2^32 - 1, [...], and integers `beside` them, [...,n,m], make [...,w]."""
    parts = [input_ids.numpy().astype(">u4")[..., None].view(np.uint8)]
    if beside is not None:
        parts.append(beside.flatten(input_ids.ndim).contiguous().numpy().view(np.uint8))
    return np.concatenate(parts, axis=-1)


def sort_rows(rows: Sequence[Bytes]) -> Sorted:
    """Returns the order of sequences, each the bytes of its tokens [n,w]; equal ones keep theirs.
    Neighbours in it share the longest prefixes."""
    keys = [row.tobytes() for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    return Sorted(np.array(order, dtype=np.int64), common_prefixes([rows[i] for i in order]))


def common_prefixes(rows: Sequence[Bytes]) -> Ints:
    """Returns how many first tokens each of rows [n,w] shares with the one before it, 0 of the
    first; [len(rows)]."""
    common = [0] * len(rows)
    for i, (a, b) in enumerate(pairwise(rows), 1):
        n = min(len(a), len(b))
        differs = np.flatnonzero((a[:n] != b[:n]).any(1))
        common[i] = int(differs[0]) if len(differs) else n
    return np.array(common, dtype=np.int64)


def build_trie(
    input_ids: Tensor,
    lengths: Sequence[int],
    *,
    beside: Tensor | None = None,
    multiple_of: int = 1,
) -> Trie:
    """Returns the trie of right-padded rows [b,S] on the host, filled up to a multiple of
    `multiple_of` tokens; of no tokens at all it is one such filling. Tokens with other integers
    `beside` them, [b,S,n,m], are not one."""
    tokens = token_bytes(input_ids, beside)
    lens = np.asarray(lengths, dtype=np.int64)
    order, common = sort_rows([row[:n] for row, n in zip(tokens, lens.tolist(), strict=True)])
    n, width = lens[order], input_ids.shape[1]
    first = np.cumsum(n - common) - (n - common)  # where each row's own tokens begin
    t = np.arange(width)[None]
    # a position belongs to the last row up to here that does not share it with the row before
    rows = np.arange(len(n))[:, None]
    owner = np.maximum.accumulate(np.where(common[:, None] <= t, rows, 0), axis=0)
    place = (first - common)[owner] + t if len(n) else np.zeros((0, width), dtype=np.int64)
    segments = _segments(place, n, common, first)
    real = t < n[:, None]
    moved, segments = _heaviest_first(segments)
    place = moved[np.where(real, place, 0)] if len(moved) else place * 0
    back = np.empty_like(place)
    back[order] = np.where(real, place, 0)
    return _packed(input_ids, lens, back, segments, multiple_of)


def _segments(place: Ints, n: Ints, common: Ints, first: Ints) -> list[Segment]:
    """Returns the segments of rows in lexicographic order. place [b,S]: their tokens, n [b]: their
    lengths. A segment ends where its row ends, or another row forks off."""
    own = np.flatnonzero(n > common)  # the others repeat the row before them
    forks = own[common[own] > 0]
    parent = dict(zip(first[forks].tolist(), place[forks, common[forks] - 1].tolist()))
    total = int((n - common).sum())
    cuts = sorted({*first[own].tolist(), *(p + 1 for p in parent.values()), total})
    of_end = {end: i for i, end in enumerate(cuts[1:])}
    begins = set(first[own].tolist())
    out = []
    for i, (start, end) in enumerate(pairwise(cuts)):
        above = i - 1 if start not in begins else None
        if start in parent:
            above = of_end[parent[start] + 1]
        out.append(Segment(start, end, above))
    return out


def _heaviest_first(segments: list[Segment]) -> tuple[Ints, list[Segment]]:
    """Returns the segments with the heaviest child of each first, and where each token went [T]."""
    weight = [s.end - s.start for s in segments]
    children: list[list[int]] = [[] for _ in segments]
    roots: list[int] = []
    for i in reversed(range(len(segments))):
        above = segments[i].parent
        (roots if above is None else children[above]).append(i)
        if above is not None:
            weight[above] += weight[i]
    moved = np.empty(sum(s.end - s.start for s in segments), dtype=np.int64)
    out: list[Segment] = []
    stack: list[tuple[int, int | None]] = [(i, None) for i in _lightest_first(roots, weight)]
    at = 0
    while stack:
        i, above = stack.pop()
        start, end, _ = segments[i]
        moved[start:end] = np.arange(at, at + end - start)
        stack += [(child, len(out)) for child in _lightest_first(children[i], weight)]
        out.append(Segment(at, at + end - start, above))
        at += end - start
    return moved, out


def _lightest_first(items: list[int], weight: list[int]) -> list[int]:
    return sorted(items, key=lambda i: (weight[i], -i))


def _packed(
    input_ids: Tensor, lens: Ints, place: Ints, segments: list[Segment], multiple_of: int
) -> Trie:
    tokens = segments[-1].end if segments else 0
    filling = -max(tokens, 1) % multiple_of + (tokens == 0)
    if filling:
        segments = [*segments, Segment(tokens, tokens + filling, None)]
    where = torch.from_numpy(place)
    real = torch.arange(place.shape[1]) < torch.from_numpy(lens)[:, None]
    ids = torch.zeros(tokens + filling, dtype=torch.long)
    depth, parent = torch.zeros_like(ids), torch.arange(len(ids))
    depth[tokens:] = torch.arange(filling)
    ids[where[real]] = input_ids.long()[real]
    t = torch.arange(place.shape[1]).expand(place.shape)
    depth[where[real]] = t[real]
    later = real[:, 1:]
    parent[where[:, 1:][later]] = where[:, :-1][later]
    parent[tokens + 1 :] -= 1
    return Trie(ids, depth, parent, tuple(segments), where, tokens)


# ---- packing ------------------------------------------------------------------------------------


def pack_trie(
    input_ids: Tensor,
    lengths: Sequence[int],
    *,
    align: Alignment = UNALIGNED,
    given: Tensor | None = None,
    beside: Tensor | None = None,
) -> Packed:
    """Packs right-padded rows [b,S] on the host as their trie, filled up to a multiple of
    `align.row` tokens.

    The output layer is asked once for every node, about the node's token at the token before it.
    With `given` [b,S,n], ids that rows may have each for itself, it is asked for every token of
    every row. `beside`: see build_trie.
    """
    trie = build_trie(input_ids, lengths, beside=beside, multiple_of=align.row)
    lens = torch.as_tensor(list(lengths), dtype=torch.long)[:, None]
    t = torch.arange(input_ids.shape[1])[None]
    real = t < lens
    valid = real & (t >= 1)
    token = torch.full_like(trie.input_ids, -1)
    token[trie.place[real]] = torch.arange(input_ids.numel()).view(input_ids.shape)[real]
    packed = Packed(
        input_ids=trie.input_ids,
        labels=trie.input_ids,
        position_ids=trie.depth,
        token=token,
        cu_seqlens=torch.tensor([0, len(trie.input_ids)], dtype=torch.int32),
        index=trie.place,
        valid=valid,
        slots=[len(trie.input_ids)],
        at=trie.parent,
        trie=trie,
    )
    return packed if given is None else _asked_by_row(packed, trie, input_ids.long(), given)


def _asked_by_row(packed: Packed, trie: Trie, input_ids: Tensor, given: Tensor) -> Packed:
    """Returns the packed trie with a question for every token of every row [b,S], about its own
    given ids [b,S,n]."""
    at, labels = trie.parent[trie.place[packed.valid]], input_ids[packed.valid]
    index = torch.zeros_like(trie.place)
    index[packed.valid] = torch.arange(len(at))
    given = given[packed.valid]
    if not len(at):  # the output layer wants a question
        at, labels = at.new_zeros(1), at.new_zeros(1)
        given = given.new_full((1, given.shape[1]), -1)
    return replace(packed, at=at, labels=labels, index=index, given=given)


# ---- which row goes into which micro-batch ------------------------------------------------------


def plan_tries(
    rows: Sequence[Bytes],
    *,
    max_tokens: int,
    align: Alignment = UNALIGNED,
    cost: Cost = TOKENS,
    units: Sequence[Sequence[int]] | None = None,
) -> Needs:
    """Finds which of `rows` (token_bytes [n,w] of each) share a micro-batch of at most `max_tokens`
    tokens.

    Units (a partition of the rows; None takes every row by itself) are sorted, so that what shares
    prefixes stands together, and cut where least is shared, until every part's trie fits. A token
    counts once in a part's size and work. Raises ValueError for `max_tokens` below 1.
    """
    budget = token_budget(max_tokens, align)
    place = np.empty(len(rows), dtype=np.int64)
    place[sort_rows(rows).order] = np.arange(len(rows))
    each = [sorted(u, key=place.__getitem__) for u in units or [[i] for i in range(len(rows))]]
    each.sort(key=lambda unit: int(place[unit[0]]))
    order = [row for unit in each for row in unit]
    common = common_prefixes([rows[i] for i in order]).tolist()
    lengths = [len(rows[i]) for i in order]
    starts = np.cumsum([0, *map(len, each)]).tolist()
    parts = _cut(lengths, common, starts, budget)
    items = [
        Item(
            order[a:b],
            max(1, _size(lengths, common, a, b)),
            sum(cost(n) for n in lengths[a:b]) - sum(cost(c) for c in common[a + 1 : b]),
        )
        for a, b in parts
    ]
    return Needs(items, budget)


def _size(lengths: Sequence[int], common: Sequence[int], a: int, b: int) -> int:
    """Returns the tokens of the trie of rows [a, b), each counted but for what it shares with the
    one before."""
    return sum(lengths[a:b]) - sum(common[a + 1 : b])


def _cut(
    lengths: Sequence[int], common: Sequence[int], starts: Sequence[int], budget: int
) -> list[tuple[int, int]]:
    """Returns ranges of rows whose tries fit `budget`, or that are one unit. `starts`: where units
    begin, and the number of rows. What does not fit is cut where the least is shared, there next to
    the end of the first of equal parts that fit."""
    own = np.asarray(lengths) - np.asarray(common)
    until = np.concatenate([[0], np.cumsum(own)])  # tokens of rows before i, less what is shared
    out, stack = [], [(0, len(starts) - 1)]
    while stack:
        i, j = stack.pop()
        if i == j:
            continue
        a, b = starts[i], starts[j]
        size = int(until[b] - until[a]) + common[a]
        if size <= budget or j - i == 1:
            out.append((a, b))
            continue
        where = np.asarray(starts[i + 1 : j])
        shared = np.asarray(common)[where]
        weakest = where[shared == shared.min()]
        lost = int(shared.min())  # stands in every part
        parts = max(2, -(-(size - lost) // max(1, budget - lost)))
        goal = until[a] - common[a] + lost + (size - lost) / parts
        cut = i + 1 + int(np.searchsorted(where, weakest[np.abs(until[weakest] - goal).argmin()]))
        stack += [(cut, j), (i, cut)]
    return out
