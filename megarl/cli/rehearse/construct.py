"""Constructs ranks of a layout that is larger than this machine, one after the other.

torch's fake process group stands in for the other ranks and fake tensors for memory, so that every
shape is the cluster's own. A rank's parameters must be those that the piece table gives its place.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.config.engine import TrainEngineConfig


@dataclass(frozen=True, kw_only=True)
class Constructed:
    """Says what was constructed of one engine: `ranks` of `of`, with at most `parameters`
    parameters on one."""

    engine: str
    ranks: int
    of: int
    parameters: int
    seconds: float


def sample_ranks(world_size: int, stages: int, limit: int) -> list[int]:
    """Returns ranks to construct: one of every pipeline stage, with its place among the stage's
    ranks going round, then the last of all; where there are more than `limit`, as many of them,
    spread evenly. Pipeline stages are blocks of neighbouring ranks."""
    block = world_size // stages
    ranks = sorted({*(s * block + s % block for s in range(stages)), world_size - 1})
    if len(ranks) <= limit:
        return ranks
    return sorted({ranks[i * (len(ranks) - 1) // max(1, limit - 1)] for i in range(limit)})


def construct(
    name: str, engine: TrainEngineConfig, world_size: int, ranks: Sequence[int]
) -> Constructed | str:
    """Constructs the model of an engine on each of `ranks`; returns what was made, or why it could
    not be. engine.path: a directory with the model's config.json. Call it in a process of its own:
    it makes that process's process groups."""
    from megarl.engine.shapes import construct_rank

    warnings.filterwarnings("ignore")  # of fake groups, which keep no time
    begun, most = time.monotonic(), 0
    for rank in ranks:
        try:
            most = max(most, construct_rank(engine, world_size, rank))
        except Exception as e:
            where = f"{name} on rank {rank} of {world_size}"
            return f"{where}: {type(e).__name__}: {str(e) or 'no reason given'}"
    seconds = time.monotonic() - begun
    return Constructed(
        engine=name, ranks=len(ranks), of=world_size, parameters=most, seconds=seconds
    )
