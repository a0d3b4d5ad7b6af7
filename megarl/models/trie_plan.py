"""Plans attention over a packed trie as a few dense calls. Pure, except for index tensors.

The segments of a trie stand depth-first, so every subtree is one range of tokens, and so is every
chain, which is a segment with its first child, that one's first child, and so on. A query attends
to its own chain up to itself, and in each chain that its path left, to the tokens before it left.
That makes two kinds of blocks:

own    queries and keys [a, b) of one chain, causal; these hold every token once
seen   queries [a, b) and keys [c, d), all with all: what comes after the first child of a segment,
       with the chain up to the segment's end; or a later tile of a chain, with the tiles before it

The answers of one query over several blocks are joined by their log-sum-exps. Their number is that
of the turns its path takes into a child that is not the first, and one more: a trie whose heaviest
child comes first has few. torch's CPU kernel computes all pairs of a causal block of up to 512
keys, of which half are used: long chains are cut into tiles, which need no more pairs than they use
but in the tile itself.

T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megarl.models.attention_batching import SHORT
from megarl.parallel.trie import Segment

TILE = 192


@dataclass(frozen=True)
class Own:
    """Describes n own blocks of `length` tokens each, one right after another from `start`."""

    start: int
    length: int
    n: int

    @property
    def end(self) -> int:
        """Returns where the last of the blocks ends."""
        return self.start + self.n * self.length


@dataclass(frozen=True)
class Seen:
    """Describes queries [q_start, q_end) that attend to all keys [k_start, k_end)."""

    q_start: int
    q_end: int
    k_start: int
    k_end: int


@dataclass(frozen=True)
class Short:
    """Holds `n` short own blocks, padded to `length` tokens each by repeating the last.

    index [n * length]: the token of every row. rows [m]: the rows that are no padding, and tokens
    [m] their tokens.
    """

    n: int
    length: int
    index: Tensor
    rows: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class TriePlan:
    """Says by which blocks the queries of `tokens` tokens meet their keys: the own blocks, which
    are in `own` or in the padded batch `short`, and after them `seen`."""

    tokens: int
    own: tuple[Own, ...]
    short: Short | None
    seen: tuple[Seen, ...]


def subtree_ends(segments: Sequence[Segment]) -> list[int]:
    """Returns where the subtree of each segment ends. Raises AssertionError for segments that do
    not stand depth-first, one right after another."""
    ends: list[int] = []
    path: list[int] = []  # from a root to the segment before
    for i, s in enumerate(segments):
        at = segments[i - 1].end if i else 0
        assert s.start == at <= s.end, f"segment {i} begins at {s.start} instead of {at}"
        while path and path[-1] != s.parent:
            path.pop()
        assert path or s.parent is None, f"segment {i} does not stand below {s.parent}"
        path.append(i)
        ends.append(s.end)
        for above in path:
            ends[above] = s.end
    return ends


def visible_until(segments: Sequence[Segment]) -> Tensor:
    """Returns for each token the end of its segment's subtree, int64 [T]. Token q attends to token
    k if and only if k <= q < visible_until[k]."""
    ends = torch.tensor(subtree_ends(segments))
    return torch.repeat_interleave(ends, torch.tensor([s.end - s.start for s in segments]))


def make_trie_plan(
    segments: Sequence[Segment], device: torch.device, *, tile: int = TILE, short: int = SHORT
) -> TriePlan:
    """Makes the plan of a trie of `segments`. Chains longer than 1.5 * `tile` tokens are cut into
    tiles of about that length; own blocks of up to `short` tokens are computed together. Raises
    AssertionError for segments that do not stand depth-first."""
    chains, seen = _chains(segments)
    own: list[tuple[int, int]] = []
    for start, end in chains:
        cuts = _tiles(start, end, tile)
        own += pairwise(cuts)
        seen += [Seen(a, b, start, a) for a, b in pairwise(cuts[1:])]
    runs = _runs(sorted(own))
    few = [run for run in runs if run.length <= short]
    if len(few) < 2:
        few = []
    alone = tuple(run for run in runs if run.length > short or not few)
    tokens = segments[-1].end if segments else 0
    return TriePlan(tokens, alone, _short(few, device) if few else None, tuple(seen))


def _chains(segments: Sequence[Segment]) -> tuple[list[tuple[int, int]], list[Seen]]:
    """Returns the chains as ranges of tokens, and the blocks of what comes after first children."""
    ends = subtree_ends(segments)
    begins: list[int] = []  # of each segment, the begin of its chain
    chains: dict[int, int] = {}
    seen: list[Seen] = []
    for i, s in enumerate(segments):
        follows = s.parent is not None and s.parent == i - 1
        begins.append(begins[i - 1] if follows else s.start)
        chains[begins[i]] = s.end
        first = i + 1 if i + 1 < len(segments) and segments[i + 1].parent == i else None
        if first is not None and ends[first] < ends[i] and s.end > begins[i]:
            seen.append(Seen(ends[first], ends[i], begins[i], s.end))
    return [(a, b) for a, b in chains.items() if b > a], seen


def _tiles(start: int, end: int, tile: int) -> list[int]:
    """Returns the borders of nearly equal tiles of [start, end)."""
    n = max(1, round((end - start) / tile))
    return [start + (end - start) * i // n for i in range(n + 1)]


def _runs(blocks: Sequence[tuple[int, int]]) -> list[Own]:
    """Returns blocks, which are in order, with those of one length that are neighbours as one."""
    runs: list[Own] = []
    for a, b in blocks:
        last = runs[-1] if runs else None
        if last is not None and (last.end, last.length) == (a, b - a):
            runs[-1] = Own(last.start, last.length, last.n + 1)
        else:
            runs.append(Own(a, b - a, 1))
    return runs


def _short(runs: Sequence[Own], device: torch.device) -> Short:
    starts = [r.start + i * r.length for r in runs for i in range(r.n)]
    lengths = [r.length for r in runs for _ in range(r.n)]
    start, length = torch.tensor([starts, lengths])[..., None]
    longest = max(lengths)
    at = torch.arange(longest)
    index = (start + torch.minimum(at, length - 1)).flatten()
    rows = (at < length).flatten().nonzero()[:, 0]
    return Short(len(starts), longest, *(x.to(device) for x in (index, rows, index[rows])))
