"""Checks degrees of parallelism, allocation_mode and nodes against the processes that there are."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from megarl.config.allocation import AllocationMode
from megarl.config.errors import ConfigError, raise_if_any
from megarl.config.parallel import ParallelConfig
from megarl.config.recipes import BaseConfig, GRPOConfig, main_role
from megarl.config.rules import PARALLEL, rule_problems
from megarl.config.transports import built_in_transport


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
    yield from rule_problems(PARALLEL, p, f"{key}.")
    if p.pipeline_split is not None and p.pp > 1 and len(p.pipeline_split) != p.pp * p.vpp:
        yield (
            f"{key}.pipeline_split={p.pipeline_split}: {len(p.pipeline_split)} numbers for "
            f"{key}.pp*vpp = {p.pp}*{p.vpp} chunks; give one per chunk, in the order of the layers"
        )
    if p.pipeline_split is not None and any(n < 1 for n in p.pipeline_split):
        yield f"{key}.pipeline_split={p.pipeline_split}: every chunk needs at least one layer"


def allocation_problems(cfg: BaseConfig, world_size: int | None) -> Iterator[str]:
    """Yields where the configuration says otherwise than its allocation_mode, or `world_size` is
    another one (None: not known)."""
    if not cfg.allocation_mode:
        return
    try:
        allocation = AllocationMode.from_str(cfg.allocation_mode)
    except ConfigError as e:
        yield from e.problems
        return
    said, wanted = f"allocation_mode={cfg.allocation_mode}", allocation.trainers.gpus
    if allocation.servers is not None and not isinstance(cfg, GRPOConfig):
        yield f"{said}: recipe={cfg.recipe} has no servers; leave the trainers' part alone"
        return
    for key, value in allocation.keys(main_role(type(cfg))).items():
        if (found := attrgetter(key)(cfg)) != value:
            yield f"{said} means {key}={value}, and {key}={found} is set: correct one of them"
    if world_size is not None and world_size != wanted:
        yield (
            f"{said}: its trainers are {wanted} processes, and {world_size} would be started; "
            "correct it, or start as many"
        )
    if isinstance(cfg, GRPOConfig) and allocation.servers is not None:
        yield from _colocation_problems(cfg, said, colocated=allocation.colocated)


def cluster_problems(cfg: BaseConfig) -> Iterator[str]:
    """Yields what `cluster` asks for that cannot be."""
    slurm = cfg.cluster.slurm
    if cfg.cluster.reward_pool is not None and not isinstance(cfg, GRPOConfig):
        yield f"cluster.reward_pool: recipe={cfg.recipe} computes no rewards; leave it null"
    if slurm.minutes is not None and slurm.save_before >= 60 * slurm.minutes:
        yield (
            f"cluster.slurm.save_before={slurm.save_before}: must be shorter than the time limit, "
            f"cluster.slurm.minutes={slurm.minutes}"
        )


def _colocation_problems(cfg: GRPOConfig, said: str, *, colocated: bool) -> Iterator[str]:
    transport = built_in_transport(cfg.weight_sync.type)
    if transport is not None and transport.requirements.shares_devices and not colocated:
        yield (
            f"weight_sync.type={cfg.weight_sync.type}: needs servers on the trainers' GPUs; write "
            f"| instead of + in {said}"
        )
