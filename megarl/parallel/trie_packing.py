"""Plans micro-batches whose sequences share prefixes, and packs one as a trie. Pure.

b sequences, S positions (right-padded), T packed tokens, N questions to the output layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from megarl.parallel.packing import TOKENS, UNALIGNED, Alignment, Cost, Packed, fill, first_fit
from megarl.parallel.trie import Bytes, Trie, build_trie, common_prefixes, sort_rows


def pack_trie(
    input_ids: torch.Tensor,
    lengths: Sequence[int],
    *,
    align: Alignment = UNALIGNED,
    given: torch.Tensor | None = None,
    beside: torch.Tensor | None = None,
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
        max_slot=int(trie.depth.max()) + 1,
        at=trie.parent,
        trie=trie,
    )
    return packed if given is None else _asked_by_row(packed, trie, input_ids.long(), given)


def _asked_by_row(
    packed: Packed, trie: Trie, input_ids: torch.Tensor, given: torch.Tensor
) -> Packed:
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


class Item(NamedTuple):
    """Describes units that stand side by side in sorted order and share a micro-batch: their rows,
    the tokens of their trie (at most), and its work."""

    rows: list[int]
    size: int
    work: int


@dataclass(frozen=True)
class Needs:
    """Says what a data-parallel rank's rows need: `items`, none too long for a micro-batch unless
    it is a single unit, and at least `count` micro-batches."""

    items: list[Item]
    fitted: list[list[int]]
    budget: int

    @property
    def count(self) -> int:
        """Returns the least number of micro-batches that was found."""
        return max(1, len(self.fitted))

    def micro_batches(self, count: int) -> list[list[int]]:
        """Returns the rows of `count` micro-batches, from heavy to light; `count` is at least
        `self.count`."""
        sizes, work = [i.size for i in self.items], [i.work for i in self.items]
        filled = fill(range(len(self.items)), work, sizes, self.budget, count, self.fitted)
        return [sorted(r for i in mb for r in self.items[i].rows) for mb in filled]


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
    if max_tokens < 1:
        raise ValueError(f"mb_spec.max_tokens_per_mb={max_tokens}: a micro-batch needs a token")
    budget = max_tokens // align.row * align.row
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
    return Needs(items, first_fit(range(len(items)), [i.size for i in items], budget), budget)


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
