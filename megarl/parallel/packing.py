"""Decides where each row of a batch is worked on: by which data-parallel index, and in which of its
micro-batches; and packs and unpacks sequences, each by itself (tries: trie.py). Pure.

Mini-batches come first, over all samples; within each, units go to indices by work. A unit (a pair,
a rollout with its branches) is never split by mini-batch or index.

B rows (sequences) of the batch, b of a micro-batch, S positions (right-padded), T packed tokens, N
questions to the output layer.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
UNEVEN = 1.1  # what a data-parallel index may have of the mean work, so that bunches stay whole


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


def _spread_within(items: Sequence[Item], room: int, count: int) -> list[list[int]] | None:
    """Puts items, by their numbers, into `count` bins of `room` tokens by LPT over their work. An
    item above `room` gets an empty bin. Returns None where an item fits no bin."""
    bins: list[list[int]] = [[] for _ in range(count)]
    load, left = [0] * count, [room] * count
    for i, item in sorted(enumerate(items), key=lambda each: -each[1].work):
        fits = [k for k in range(count) if item.size <= left[k] or not bins[k]]
        if not fits:
            return None
        k = min(fits, key=lambda k: (load[k], len(bins[k]), k))
        bins[k].append(i)
        load[k] += item.work
        left[k] -= item.size
    return bins


def first_fit(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Puts items into bins, longest first, into the first with room; above the budget, alone."""
    out: list[list[int]] = []
    left: list[int] = []
    for i, size in sorted(enumerate(sizes), key=lambda each: -each[1]):
        k = next((k for k in range(len(out)) if size <= left[k]), len(out))
        if k == len(out):
            out.append([])
            left.append(budget)
        out[k].append(i)
        left[k] -= size
    return out


# ---- which data-parallel index works on which row -----------------------------------------------


def units_of(ids: Tensor) -> list[list[int]]:
    """Returns the rows of every unit, in the order of their first rows. `ids` [B]: rows' units."""
    units: dict[int, list[int]] = {}
    for row, unit in enumerate(ids.tolist()):
        units.setdefault(unit, []).append(row)
    return list(units.values())


def split_minibatches(unit_ids: Tensor, n: int, *, seed: int) -> list[list[int]]:
    """Splits rows 0..B-1 into n parts, shuffled by `seed`: their numbers of units differ by at most
    one.

    One part keeps the order of the batch. Within a part rows stay ascending, so that neighbours of
    equal prompt stay neighbours. Raises ValueError for more parts than units.
    """
    units = units_of(unit_ids)
    if n > len(units):
        what = "sequences" if len(units) == len(unit_ids) else "units"
        raise ValueError(
            f"ppo_n_minibatches={n} exceeds the {len(units)} {what} of the batch: lower it, or "
            "raise train_dataset.batch_size or gconfig.n_samples"
        )
    if n == 1:
        return [list(range(len(unit_ids)))]
    # torch uses the low 32 bits of a seed only
    order = torch.randperm(len(units), generator=torch.Generator().manual_seed(seed % 2**32))
    return [sorted(r for u in part.tolist() for r in units[u]) for part in order.tensor_split(n)]


def place_rows(
    lengths: Sequence[int],
    unit_ids: Tensor,
    minibatches: Sequence[Sequence[int]] | None,
    *,
    dp: int,
    cost: Cost = TOKENS,
    slot: int = 1,
    together: Tensor | None = None,
) -> Tensor:
    """Returns the data-parallel index of every row, [B] int64.

    Within each mini-batch (None: one of all rows; rows of none make another) no index has more work
    than the mean plus one unit. `slot`: lengths count as multiples of it, as they are packed.
    together [B]: rows of equal numbers go to one index as far as the work stays within UNEVEN.
    """
    out = torch.zeros(len(lengths), dtype=torch.long)
    parts = [list(part) for part in minibatches or ()]
    placed = {row for part in parts for row in part}
    parts.append([row for row in range(len(lengths)) if row not in placed])
    for part in parts:
        units = [[part[i] for i in unit] for unit in units_of(unit_ids[part])]
        costs = [sum(cost(padded_length(lengths[r], slot)) for r in unit) for unit in units]
        if together is None:
            ranks = spread(costs, dp)
        else:
            ranks = _bunched(costs, units_of(together[[unit[0] for unit in units]]), dp)
        for index, items in enumerate(ranks):
            rows = [row for i in items for row in units[i]]
            out[rows] = index
    return out


def _bunched(costs: Sequence[int], bunches: Sequence[Sequence[int]], dp: int) -> list[list[int]]:
    """Returns the units on each dp index. Bunches stay whole where no index then has more than
    UNEVEN times the mean work; else they stand in a line, which is cut into equal parts: all but
    dp - 1 of them stay whole."""
    ranks = spread([sum(costs[i] for i in bunch) for bunch in bunches], dp)
    whole = [[i for bunch in rank for i in bunches[bunch]] for rank in ranks]
    total = sum(costs)
    if max(sum(costs[i] for i in rank) for rank in whole) * dp <= UNEVEN * total:
        return whole
    cut: list[list[int]] = [[] for _ in range(dp)]
    before = 0
    for i in (i for bunch in bunches for i in bunch):  # goes where its middle lies
        cut[min((2 * before + costs[i]) * dp // (2 * total), dp - 1)].append(i)
        before += costs[i]
    return cut


# ---- which row goes into which micro-batch ------------------------------------------------------


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
    budget = token_budget(max_tokens, align)
    slots = [padded_length(n, align.slot) for n in seqlens]
    items = [
        Item(list(unit), sum(slots[i] for i in unit), sum(cost(slots[i]) for i in unit))
        for unit in groups or [[i] for i in range(len(seqlens))]
    ]
    if index is None:
        ranks = [sorted(rank) for rank in spread([item.work for item in items], dp)]
    else:
        ranks = [[i for i, x in enumerate(items) if index[x.rows[0]] == r] for r in range(dp)]
    needs = [Needs([items[i] for i in rank], budget) for rank in ranks]
    count = max(each.count for each in needs)
    count = -(-count // multiple_of) * multiple_of
    return [each.micro_batches(count) for each in needs]


def token_budget(max_tokens: int, align: Alignment) -> int:
    """Returns how many tokens fit a micro-batch whose row is filled up. Raises ValueError for
    `max_tokens` below 1."""
    if max_tokens < 1:
        raise ValueError(f"mb_spec.max_tokens_per_mb={max_tokens}: a micro-batch needs a token")
    return max_tokens // align.row * align.row


class Item(NamedTuple):
    """Describes rows that share a micro-batch: the tokens they take there (at most), and their
    work."""

    rows: list[int]
    size: int
    work: int


class Needs:
    """Says what a data-parallel rank's `items` need: at least `count` micro-batches of `budget`
    tokens. An item that is longer is alone in its micro-batch."""

    def __init__(self, items: Sequence[Item], budget: int) -> None:
        self.items, self.budget = items, budget
        self._fitted = first_fit([item.size for item in items], budget)
        self.count = max(1, len(self._fitted))

    def micro_batches(self, count: int) -> list[list[int]]:
        """Returns the rows of `count` micro-batches, balanced by work, from heavy to light; those
        of first fit, and empty ones, where balance does not find room. `count` is at least
        `self.count`."""
        bins = _spread_within(self.items, self.budget, count)
        if bins is None:
            bins = self._fitted + [[] for _ in range(count - len(self._fitted))]
        work = [sum(self.items[i].work for i in bin) for bin in bins]
        heavy_first = sorted(range(count), key=lambda k: (-work[k], sorted(bins[k])))
        return [sorted(r for i in bins[k] for r in self.items[i].rows) for k in heavy_first]


# ---- packing ------------------------------------------------------------------------------------


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


class Segment(NamedTuple):
    """Describes tokens [start, end), each the parent of the next; the first one's parent is the
    last token of segment `parent`, or None where a sequence begins."""

    start: int
    end: int
    parent: int | None


@dataclass(frozen=True)
class Trie:
    """Holds the distinct prefixes of b sequences as T packed tokens. `segments` stand depth-first:
    parents come before children, one segment right after another. Filling at the end is the last
    segment, a sequence by itself."""

    input_ids: Tensor  # [T] int64, 0 in filling
    depth: Tensor  # [T] int64: how many tokens come before it in its sequences, its position
    parent: Tensor  # [T] int64: the token before it, itself where a sequence begins
    segments: tuple[Segment, ...]
    place: Tensor  # [b,S] int64: the packed token of position t of a row, 0 in padding
    tokens: int  # T without the filling


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
    slots: Sequence[int]  # tokens of each slot of cu_seqlens, known on the host
    given: torch.Tensor | None = None  # [T/cp,n] or [N,n]: `given` of the next token, as labels
    at: torch.Tensor | None = None  # [N] int64: the token that each label comes after
    trie: Trie | None = None

    def moved(self, how: Callable[[Tensor], Tensor]) -> Packed:
        """Returns the same with its tensors, and of the trie's its depths, as `how` moves them."""
        moved: dict[str, Any] = {
            f.name: how(value)
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
        share = shares[cp_rank]
        ids, labels, positions, token = ids[share], labels[share], positions[share], token[share]
        beside = None if beside is None else beside[share]
        index = torch.argsort(torch.cat(shares))[index]
    return Packed(ids, labels, positions, token, cu.int(), index, valid, slots, beside)


def unpack(values: torch.Tensor, packed: Packed) -> torch.Tensor:
    """Returns per-token `values` [T,...] of all context-parallel ranks as padded [b,S,...]:
    position t has the value made at t-1 about x_t, t=0 and padding have 0. Differentiable."""
    out = values[packed.index]
    mask = packed.valid.reshape(*packed.valid.shape, *[1] * (values.ndim - 1))
    return torch.where(mask, out, torch.zeros((), dtype=out.dtype, device=out.device))
