"""Checks allocation_mode against the keys that it decides and the processes there are."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from megarl.config.allocation import AllocationMode
from megarl.config.errors import ConfigError
from megarl.config.recipes import BaseConfig, GRPOConfig, main_role
from megarl.config.transports import built_in_transport


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
