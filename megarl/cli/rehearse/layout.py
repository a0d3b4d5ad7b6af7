"""Shrinks parallel layouts to a few ranks, so that every dimension that was there stays. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megarl.config.parallel import ParallelConfig

DEGREES = ("tp", "pp", "vpp", "cp", "ep", "etp")
_LEAST_FIRST = ("etp", "cp", "ep", "tp", "pp")  # what a rehearsal can do without, first
_ENOUGH = 2  # ranks that show what a dimension does


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    """Holds the layouts of a rehearsal, by engine. `left_out` are degrees that the ranks do not
    suffice for: they are 1 here."""

    parallel: dict[str, ParallelConfig]
    world_size: int
    layers: int
    left_out: tuple[str, ...] = ()


def shrink_layouts(engines: Mapping[str, ParallelConfig], *, ranks: int, mixed: bool) -> Shrunk:
    """Returns layouts that fit at most `ranks` ranks, and how many layers a model then needs.

    Data parallelism goes first; if that is not enough every other degree becomes 2 where it was
    more; if that is not enough, degrees are left out. With ranks to spare dp is 2 again. mixed: the
    model has layers of several kinds, so that a pipeline chunk gets two.
    """
    found, left_out = dict(engines), []
    if _world(found.values()) > ranks:
        found = {n: _at_most(p, DEGREES, _ENOUGH) for n, p in found.items()}
    for degree in _LEAST_FIRST:
        if _world(found.values()) <= ranks:
            break
        if any(getattr(p, degree) > 1 for p in found.values()):
            found = {n: _at_most(p, (degree,), 1) for n, p in found.items()}
            left_out.append(degree)
    world = _world(found.values())
    chunks = math.lcm(*(p.pp * p.vpp for p in found.values()))
    uneven = any(p.pipeline_split is not None for p in engines.values())
    layers = chunks * (2 if mixed or uneven or chunks == 1 else 1)
    return Shrunk(
        parallel={n: _settled(p, engines[n], layers) for n, p in found.items()},
        world_size=2 * world if 2 * world <= ranks else world,
        layers=layers,
        left_out=tuple(left_out),
    )


def small_split(split: Sequence[int], chunks: int, layers: int) -> list[int] | None:
    """Returns `layers` layers in `chunks` chunks, uneven as `split` is: the chunk that stands for
    its largest gets one layer more, that for its smallest one less. None for a single chunk."""
    if chunks == 1:
        return None
    picked = [*split[: chunks - 1], split[-1]]
    most, least = picked.index(max(picked)), len(picked) - 1 - picked[::-1].index(min(picked))
    most = 0 if most == least else most
    small = [layers // chunks] * chunks
    if len(set(split)) > 1:
        small[most] += 1
        small[least] -= 1
    return small


def _world(layouts: Iterable[ParallelConfig]) -> int:
    return math.lcm(*(n for p in layouts for n in (p.dense_ranks, p.expert_ranks)))


def _at_most(p: ParallelConfig, degrees: Iterable[str], most: int) -> ParallelConfig:
    return replace(p, **{d: min(getattr(p, d), most) for d in degrees})


def _settled(p: ParallelConfig, before: ParallelConfig, layers: int) -> ParallelConfig:
    """Returns the layout with everything else that goes with its degrees."""
    vpp = p.vpp if p.pp > 1 else 1
    split = before.pipeline_split
    return replace(
        p,
        vpp=vpp,
        sequence_parallel=p.sequence_parallel and p.tp > 1,
        pipeline_split=small_split(split, p.pp * vpp, layers) if split else None,
        cp_comm_type="auto",  # p2p is Transformer Engine's, which a CPU lacks
    )
