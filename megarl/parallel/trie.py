"""Finds the prefixes that sequences share and lays out their tokens, each of them once. Pure.

A trie has one node for every distinct prefix: two tokens are one node where they and all tokens
before them are equal, with what stands beside them (the experts that a router is told to choose).
Its nodes stand packed, depth-first: a segment is a run of nodes without a
fork, its children follow it, and a subtree is one range of tokens. Of several children the one with
the most tokens below it comes first, which leaves attention the fewest and largest blocks.

b sequences, S positions (right-padded), T packed tokens (nodes and filling).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class Segment(NamedTuple):
    """Describes tokens [start, end), each the parent of the next; the first one's parent is the
    last token of segment `parent`, or None where a sequence begins."""

    start: int
    end: int
    parent: int | None


@dataclass(frozen=True)
class Trie:
    """Holds the distinct prefixes of b sequences as T packed tokens. `segments` stand depth-first:
    parents come before children, one segment right after another. Filling at the end is a segment
    of its own, which begins a sequence."""

    input_ids: Tensor  # [T] int64, 0 in filling
    depth: Tensor  # [T] int64: how many tokens come before it in its sequences, its position
    parent: Tensor  # [T] int64: the token before it, itself where a sequence begins
    segments: tuple[Segment, ...]
    place: Tensor  # [b,S] int64: the packed token of position t of a row, 0 in padding
    tokens: int  # T without the filling


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
