"""Plans which sequence goes into which micro-batch, and packs and unpacks the sequences. Pure.

B sequences of the batch, b of a micro-batch, S positions (right-padded), T packed tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from megarl.parallel.trie import Trie

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
