"""Brings a pass its tokens: a batch is placed for the step, borrowed, or made of a dict.

B samples of the batch, b rows that a rank holds.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megarl.api.batch import Batch, Home, Padded
from megarl.engine.micro_batch import alignment
from megarl.engine.setup import EngineState
from megarl.models.flops import sequence_cost
from megarl.parallel import exchange
from megarl.parallel.placement import engine_home, place_rows, units_of


def as_batch(given: Batch | Padded, names: Iterable[str] | None = None) -> Batch:
    """Returns a Batch as it is, or makes one of a plain dict that is the same on every rank.
    `names`: the fields of the dict that are needed, None for all."""
    if isinstance(given, Batch):
        return given
    wanted = set(given if names is None else names) | {"input_ids", "attention_mask"}
    padded = {k: v for k, v in given.items() if k in wanted}
    return Batch.from_padded(padded, comm=exchange.world_comm())


def group_ids(batch: Batch, *, whole_groups: bool) -> Tensor | None:
    """Returns ids [B] of rows that stay together on a rank, with `whole_groups` in a micro-batch
    too; None if each is by itself. Raises ValueError where `whole_groups` has no field to go by."""
    if "unit_ids" in batch or ("rollout_ids" in batch and not whole_groups):
        return batch.unit_ids
    if not whole_groups:
        return None
    if "group_ids" not in batch:
        raise ValueError(
            "whole_groups=True needs batch['group_ids'] [B]: which rows belong together"
        )
    ids: Tensor = batch["group_ids"]
    return ids


def home_of(state: EngineState, batch: Batch, *, whole_groups: bool = False) -> Home:
    """Returns the batch's own home if this engine can work on it there, else the home that this
    engine would give it; where prefixes are shared, rows of a group stay together in it as far as
    the work stays even. Raises ValueError for a batch of other ranks than the engine's."""
    _check_ranks(batch)
    of_rank = tuple(c.dp for c in state.layout.all_coords)
    units = group_ids(batch, whole_groups=whole_groups)
    if batch.placed and batch.home.of_rank == of_rank and _whole(units, batch.home.of_row):
        return batch.home
    of_row = place_rows(
        batch.lengths.tolist(),
        torch.arange(len(batch)) if units is None else units,
        batch.minibatches,
        dp=state.layout.dp,
        cost=sequence_cost(state.model),
        slot=alignment(state.layout).slot,
        together=batch.get("group_ids") if state.config.mb_spec.share_prefixes else None,
    )
    return engine_home(state.layout, of_row)


def _check_ranks(batch: Batch) -> None:
    """Raises ValueError unless the batch is of the ranks of the world in scope."""
    theirs, ours = batch.comm, exchange.world_comm()
    if theirs is ours or not isinstance(theirs, exchange.WorldComm | None):
        return
    named = [f"ranks {list(c.ranks)}" if c else "one rank alone" for c in (theirs, ours)]
    raise ValueError(
        f"this batch is of {named[0]}, the engine of {named[1]}: make the batch on the engine's "
        "ranks, inside `with world.scope():`"
    )


def _whole(units: Tensor | None, of_row: Tensor) -> bool:
    """Returns whether every unit stands at one data-parallel index."""
    if units is None:
        return True
    index = of_row.tolist()
    return all(len({index[r] for r in unit}) == 1 for unit in units_of(units))


def place(state: EngineState, batch: Batch, *, whole_groups: bool = False) -> None:
    """Moves the batch to where this engine works on it, if none has placed it yet. Collective."""
    if not batch.placed:
        exchange.place(batch, home_of(state, batch, whole_groups=whole_groups))


def settle(state: EngineState, batch: Batch, *, whole_groups: bool = False) -> Batch:
    """Returns the batch where this engine works on it. A batch that has not been placed in this
    step is placed for good; of one placed for another layout, a copy is made of what is not at
    hand. Collective."""
    place(state, batch, whole_groups=whole_groups)
    return exchange.placed(batch, home_of(state, batch, whole_groups=whole_groups))
