"""Decides which data-parallel index works on which row of a step's batch. Pure.

Mini-batches come first, over all samples; within each, units go to indices by work. A unit (a pair,
a rollout with its branches) is never split by mini-batch or index. B rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.api.batch import Home
from megarl.parallel.layout import Layout
from megarl.parallel.packing import TOKENS, Cost, padded_length, spread

UNEVEN = 1.1  # what a data-parallel index may have of the mean work, so that bunches stay whole


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


def engine_home(layout: Layout, of_row: Tensor) -> Home:
    """Returns the home in which every rank holds the rows of its data-parallel index. `of_row` [B]:
    the index of every row."""
    return Home(tuple(c.dp for c in layout.all_coords), of_row)
