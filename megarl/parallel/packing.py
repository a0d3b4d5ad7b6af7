"""Plans which sequence goes into which micro-batch, and packs and unpacks the sequences: each by
itself, or as a trie of those that share prefixes. Pure.

B sequences of the batch, b of a micro-batch, S positions (right-padded), T packed tokens, N
questions to the output layer.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from megarl.parallel.trie import Bytes, Trie, build_trie, common_prefixes, sort_rows

MicroBatchPlan = list[list[list[int]]]  # [dp rank][micro-batch] -> rows of the batch


@dataclass(frozen=True)
class Cost:
    """The work of a sequence of n tokens: linear * n + quadratic * n^2 (matrices, causal attention)
    and, for attention through a sliding window, `windowed` times twice the pairs of tokens less
    than `window` apart, which are n + n^2 in a sequence no longer than that."""

    linear: int = 1
    quadratic: int = 0
    windowed: int = 0
    window: int = 0

    def __call__(self, n: int) -> int:
        seen = min(n, self.window)
        sliding = self.windowed * seen * (2 * n - seen + 1)
        return (self.linear + self.quadratic * n) * n + sliding


@dataclass(frozen=True)
class Alignment:
    """Says that every slot of a packed row is a multiple of `slot` tokens, and the row one of `row`
    tokens, which is itself a multiple of `slot`."""

    slot: int = 1
    row: int = 1


TOKENS, UNALIGNED = Cost(), Alignment()


def padded_length(length: int, align: int) -> int:
    """Returns the tokens that a sequence takes in a packed row; an empty one takes a unit."""
    return -(-max(1, length) // align) * align


def slot_lengths(lengths: Sequence[int], align: Alignment) -> list[int]:
    """Returns the tokens of each sequence's slot in a packed row; the last slot fills up the row.
    Without sequences there is one dummy slot, because every pipeline stage and every peer expects a
    forward pass."""
    slots = [padded_length(n, align.slot) for n in lengths or [0]]
    slots[-1] += -sum(slots) % align.row
    return slots


def spread(costs: Sequence[int], bins: int) -> list[list[int]]:
    """Puts items into bins: costliest first, each into the lightest bin (LPT); ties by position, so
    always the same.

    No bin costs more than 4/3 - 1/(3*bins) times the best possible, nor than the mean plus one
    item (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969).
    """
    out: list[list[int]] = [[] for _ in range(bins)]
    lightest = [(0, 0, k) for k in range(bins)]  # (load, items, bin), a heap
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, count, k = lightest[0]
        out[k].append(i)
        heapq.heapreplace(lightest, (load + costs[i], count + 1, k))
    return out


def _spread_within(
    items: Sequence[int], costs: Sequence[int], sizes: Sequence[int], room: int, count: int
) -> list[list[int]] | None:
    """Puts items into `count` bins of `room` tokens by LPT over their cost; a sequence that is too
    long has a bin of its own. Returns None where a sequence finds no bin."""
    bins: list[list[int]] = [[] for _ in range(count)]
    load, left = [0] * count, [room] * count
    for i in sorted(items, key=lambda i: (-costs[i], i)):
        fits = [k for k in range(len(bins)) if sizes[i] <= left[k] or not bins[k]]
        if not fits:
            return None
        k = min(fits, key=lambda k: (load[k], len(bins[k]), k))
        bins[k].append(i)
        load[k] += costs[i]
        left[k] -= sizes[i]
    return bins


def first_fit(items: Sequence[int], sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Puts items into bins, longest first, into the first with room; above the budget, alone."""
    out: list[list[int]] = []
    load: list[int] = []
    for i in sorted(items, key=lambda i: (-sizes[i], i)):
        for k in range(len(out)):
            if load[k] + sizes[i] <= budget:
                out[k].append(i)
                load[k] += sizes[i]
                break
        else:
            out.append([i])
            load.append(sizes[i])
    return out


def plan_micro_batches(
    seqlens: Sequence[int],
    *,
    dp: int,
    max_tokens: int,
    align: Alignment = UNALIGNED,
    multiple_of: int = 1,
    cost: Cost = TOKENS,
    groups: Sequence[Sequence[int]] | None = None,
    index: Sequence[int] | None = None,
) -> MicroBatchPlan:
    """Puts every sequence once into micro-batches of at most `max_tokens` padded tokens, over dp
    ranks.

    All ranks get the same number of micro-batches, a multiple of `multiple_of`; some are empty when
    there are too few sequences. Work by `cost` is balanced over ranks and over a rank's
    micro-batches, and these run from heavy to light so that the ranks stay in step. A sequence
    longer than the budget is alone in its micro-batch. The same input gives the same plan on every
    rank. The rows of each of `groups` (a partition; None takes every row by itself) share a
    micro-batch, and then groups take the place of sequences in all of the above. Raises ValueError
    for `max_tokens` below 1.

    index: the dp rank of every sequence, where they have been placed already (a group has one).
    """
    if max_tokens < 1:
        raise ValueError(f"mb_spec.max_tokens_per_mb={max_tokens}: a micro-batch needs a token")
    budget = max_tokens // align.row * align.row  # filling up the row stays within
    units = groups if groups is not None else [[i] for i in range(len(seqlens))]
    slots = [padded_length(n, align.slot) for n in seqlens]
    sizes = [sum(slots[i] for i in unit) for unit in units]
    costs = [sum(cost(slots[i]) for i in unit) for unit in units]
    ranks = spread(costs, dp) if index is None else _placed(units, index, dp)
    fitted = [first_fit(items, sizes, budget) for items in ranks]
    count = max(1, *(len(f) for f in fitted))
    count = -(-count // multiple_of) * multiple_of
    plan: MicroBatchPlan = []
    for items, fallback in zip(ranks, fitted, strict=True):
        mbs = fill(items, costs, sizes, budget, count, fallback)
        plan.append([sorted(i for unit in mb for i in units[unit]) for mb in mbs])
    return plan


def fill(
    items: Sequence[int],
    costs: Sequence[int],
    sizes: Sequence[int],
    room: int,
    count: int,
    fallback: list[list[int]],
) -> list[list[int]]:
    """Puts items into `count` bins of `room` tokens, balanced by cost, from heavy to light; into
    those of `fallback`, at most `count`, where that does not succeed."""
    bins = _spread_within(items, costs, sizes, room, count)
    if bins is None:
        bins = fallback + [[] for _ in range(count - len(fallback))]
    return sorted(bins, key=lambda bin: (-sum(costs[i] for i in bin), sorted(bin)))


def _placed(units: Sequence[Sequence[int]], index: Sequence[int], dp: int) -> list[list[int]]:
    """Returns the numbers of the units on each dp rank; `index` has the rank of every sequence."""
    ranks: list[list[int]] = [[] for _ in range(dp)]
    for number, unit in enumerate(units):
        ranks[index[unit[0]]].append(number)
    return ranks


def zigzag_index(lengths: Sequence[int], cp: int, rank: int) -> torch.Tensor:
    """Returns the positions, in the packed global order, of the tokens that context-parallel rank
    holds: chunks r and 2*cp-1-r of every sequence cut into 2*cp, so that causal work is balanced.
    int64 [T/cp], where 2*cp divides every length."""
    out, base = [], 0
    for n in lengths:
        c = n // (2 * cp)
        for chunk in (rank, 2 * cp - 1 - rank):
            out.append(torch.arange(base + chunk * c, base + (chunk + 1) * c))
        base += n
    return torch.cat(out)


@dataclass(frozen=True)
class Packed:
    """Holds b sequences one after another in T tokens, T/cp of them on this context-parallel rank.

    `index` and `valid` speak of all T, gathered rank after rank. With a `trie` tokens that
    sequences share stand once, and the output layer answers N questions, each read off the token
    `at` and about a label; `index` is where the answer for (row, t) stands among them.
    """

    input_ids: torch.Tensor  # [T/cp] int64
    labels: torch.Tensor  # [T/cp] or [N] int64: the next token of the sequence, 0 if there is none
    position_ids: torch.Tensor  # [T/cp] int64, from 0 in every sequence
    token: torch.Tensor  # [T/cp] int64: row * S + t of the token, -1 in filling
    cu_seqlens: torch.Tensor  # [b+1] int32, of the slots (padded, not shared out)
    index: torch.Tensor  # [b,S] int64: where the output for (row, position t) stands, for t >= 1
    valid: torch.Tensor  # [b,S] bool: t >= 1 and real
    max_slot: int
    given: torch.Tensor | None = None  # [T/cp,n] or [N,n]: `given` of the next token, as labels
    at: torch.Tensor | None = None  # [N] int64: the token that each label comes after
    trie: Trie | None = None

    def to(self, device: torch.device) -> Packed:
        """Returns the same with its tensors, and of the trie's its depths, on `device`; copies may
        still be under way."""
        moved: dict[str, Any] = {
            f.name: value.to(device, non_blocking=True)
            for f in fields(self)
            if torch.is_tensor(value := getattr(self, f.name))
        }
        if self.trie is not None:
            moved["trie"] = replace(self.trie, depth=moved["position_ids"])
        return replace(self, **moved)


def pack(
    input_ids: torch.Tensor,
    lengths: Sequence[int],
    *,
    align: Alignment = UNALIGNED,
    cp: int = 1,
    cp_rank: int = 0,
    given: torch.Tensor | None = None,
) -> Packed:
    """Packs right-padded [b,S] rows into slots, filled up with zeros, and takes the rank's share.
    given [b,S,n]: ids that go beside the labels, filled up with -1.

    The filling belongs to its sequence: under causal attention nothing real sees it, and attention
    kernels need no notion of gaps between sequences.
    """
    b, width = input_ids.shape
    device = input_ids.device
    slots = slot_lengths(lengths, align)
    cu = torch.tensor([0, *slots], device=device).cumsum(0)
    total = sum(slots)
    ids = torch.zeros(total, dtype=torch.long, device=device)
    labels, token = torch.zeros_like(ids), torch.full_like(ids, -1)
    positions = torch.arange(total, device=device) - torch.repeat_interleave(
        cu[:-1], torch.tensor(slots, device=device)
    )
    lens = torch.as_tensor(list(lengths), dtype=torch.long, device=device)[:, None]  # [b,1]
    t = torch.arange(width, device=device)[None]  # [1,S]
    real = t < lens
    place = (cu[:-1][:b, None] + t).clamp(max=total - 1)  # of token (row, t)
    ids[place[real]] = input_ids[real]
    token[place[real]] = torch.arange(b * width, device=device).view(b, width)[real]
    valid = real & (t >= 1)
    index = (place - 1).clamp(min=0)  # what is said about x_t is read off position t-1
    labels[index[valid]] = input_ids[valid]
    beside = None
    if given is not None:
        beside = torch.full((total, given.shape[-1]), -1, dtype=given.dtype, device=device)
        beside[index[valid]] = given[valid]
    if cp > 1:
        shares = [zigzag_index(slots, cp, r).to(device) for r in range(cp)]
        mine = shares[cp_rank]
        ids, labels, positions, token = ids[mine], labels[mine], positions[mine], token[mine]
        beside = None if beside is None else beside[mine]
        index = torch.argsort(torch.cat(shares))[index]
    return Packed(ids, labels, positions, token, cu.int(), index, valid, max(slots), beside)


def unpack(values: torch.Tensor, packed: Packed) -> torch.Tensor:
    """Returns per-token `values` [T,...] of all context-parallel ranks as padded [b,S,...]:
    position t has the value made at t-1 about x_t, t=0 and padding have 0. Differentiable."""
    out = values[packed.index]
    mask = packed.valid.reshape(*packed.valid.shape, *[1] * (values.ndim - 1))
    return torch.where(mask, out, torch.zeros((), dtype=out.dtype, device=out.device))


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
