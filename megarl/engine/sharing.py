"""Plans the micro-batches of passes that compute shared prefixes once (mb_spec.share_prefixes).

What sequences share is known from their tokens, which only the ranks of their data-parallel index
hold: each index plans by itself, and they agree on the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from megarl.api.batch import Batch
from megarl.engine import intake
from megarl.engine.micro_batch import MicroBatch, alignment
from megarl.engine.routing import ROUTED
from megarl.engine.setup import EngineState
from megarl.models.flops import sequence_cost
from megarl.parallel import mcore
from megarl.parallel.placement import units_of
from megarl.parallel.trie import Bytes, token_bytes
from megarl.parallel.trie_packing import plan_tries

SHARED = "prefix_ratio"  # metric: tokens of the batch for each that a pass computes


def plan(
    state: EngineState, batch: Batch, *, whole_groups: bool, backward: bool
) -> list[list[int]]:
    """Returns the rows of this rank's micro-batches, as many as on every data-parallel index. The
    batch has been placed. Collective."""
    spec, layout = state.config.mb_spec, state.layout
    larger = None if backward else spec.forward_max_tokens_per_mb
    held = batch.rows
    groups = intake.group_ids(batch, whole_groups=True) if whole_groups else None
    needs = plan_tries(
        _rows(batch, beside(state, batch)),
        max_tokens=larger or spec.max_tokens_per_mb,
        align=alignment(layout),
        cost=sequence_cost(state.model),
        units=None if groups is None else units_of(groups[held]),
    )
    count = torch.tensor(needs.count, device=mcore.device())
    if layout.world_size > 1:
        dist.all_reduce(count, dist.ReduceOp.MAX)
    multiple = layout.pp if layout.vpp > 1 else 1
    rows = held.tolist()
    filled = needs.micro_batches(-(-int(count) // multiple) * multiple)
    return [sorted(rows[i] for i in mb) for mb in filled]


def beside(state: EngineState, batch: Batch) -> str | None:
    """Returns the field that tokens must have equal to be one beside their ids: the routes that a
    pass over the batch replays."""
    replays = state.config.mb_spec.share_prefixes and state.config.replays
    return ROUTED if replays and ROUTED in batch else None


def _rows(batch: Batch, beside: str | None) -> list[Bytes]:
    """Returns token_bytes [n,w] of each row that this rank holds."""
    ids = batch["input_ids"]
    whole = token_bytes(ids.values, None if beside is None else batch[beside].values)
    ends = ids.lengths.cumsum(0)
    return [whole[e - n : e] for n, e in zip(ids.lengths.tolist(), ends.tolist(), strict=True)]


def measured(micro_batches: Iterable[MicroBatch]) -> Iterator[dict[str, tuple[float, float]]]:
    """Yields the sums of SHARED of each micro-batch: tokens of its sequences, and of its trie."""
    for mb in micro_batches:
        if mb.packed.trie is not None and mb.rows:
            yield {SHARED: (float(mb.source.lengths[mb.rows].sum()), float(mb.packed.trie.tokens))}
