"""Checks degrees of parallelism against the world size: no other module knows what fits."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.errors import raise_if_any
from megarl.config.parallel import ParallelConfig


def dense_ranks(p: ParallelConfig) -> int:
    """Returns the ranks that hold one copy of the dense weights, times cp: dp divides the rest."""
    return p.tp * p.pp * p.cp


def expert_ranks(p: ParallelConfig) -> int:
    """Returns the ranks that hold one copy of the experts."""
    return p.etp * p.ep * p.pp


def check_parallel(parallel: ParallelConfig, world_size: int) -> None:
    """Raises ConfigError that names the degrees that do not fit `world_size`."""
    raise_if_any(parallel_problems(parallel, world_size))


def parallel_problems(
    p: ParallelConfig, world_size: int | None, key: str = "parallel"
) -> Iterator[str]:
    """Yields degrees that do not go together or do not divide `world_size` (None: not known); `key`
    is the section's name."""
    small = [n for n in ("tp", "pp", "vpp", "cp", "ep", "etp") if getattr(p, n) < 1]
    for name in small:
        yield f"{key}.{name}={getattr(p, name)}: degrees start at 1"
    if small:
        return
    for what, degrees, ranks in (
        ("tp*pp*cp", f"{p.tp}*{p.pp}*{p.cp}", dense_ranks(p)),
        ("etp*ep*pp", f"{p.etp}*{p.ep}*{p.pp}", expert_ranks(p)),
    ):
        if world_size is not None and world_size % ranks:
            yield (
                f"{key}: {what} = {degrees} = {ranks} does not divide the world size "
                f"{world_size}; start a multiple of {ranks} processes (--nproc, trainer.workers) "
                "or lower a degree"
            )
    if p.vpp > 1 and p.pp < 2:
        yield f"{key}.vpp={p.vpp}: needs {key}.pp > 1 (it is {p.pp})"
    if p.sequence_parallel and p.tp < 2:
        yield f"{key}.sequence_parallel=true: needs {key}.tp > 1 (it is {p.tp})"
    if p.pipeline_split is not None and p.pp == 1:
        yield (
            f"{key}.pipeline_split={p.pipeline_split}: needs {key}.pp > 1 (it is 1, and one stage "
            "has all layers); leave it null"
        )
    elif p.pipeline_split is not None and len(p.pipeline_split) != p.pp * p.vpp:
        yield (
            f"{key}.pipeline_split={p.pipeline_split}: {len(p.pipeline_split)} numbers for "
            f"{key}.pp*vpp = {p.pp}*{p.vpp} chunks; give one per chunk, in the order of the layers"
        )
    if p.pipeline_split is not None and any(n < 1 for n in p.pipeline_split):
        yield f"{key}.pipeline_split={p.pipeline_split}: every chunk needs at least one layer"
    if p.cp_comm_type != "auto" and p.cp == 1:
        yield f"{key}.cp_comm_type={p.cp_comm_type}: needs {key}.cp > 1; leave it at auto"
