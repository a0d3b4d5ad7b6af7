"""Joins the rollout clients of all ranks to one: rank 0 drives, the others share its results."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch.utils.data import DistributedSampler

from megarl.config.rollout import RolloutConfig
from megarl.config.weight_sync import WeightSyncConfig
from megarl.parallel import exchange  # noqa: F401  a Batch of several ranks travels by it
from megarl.parallel.groups import collective_timeout, init_distributed
from megarl.parallel.rank_zero import RankZero

_FIX = (
    "give every rank the whole data set (no split_dataset_by_node, no DistributedSampler) and "
    "batches of train_dataset.batch_size rows: rank 0 reads it for all, and the trainer splits "
    "each batch by itself"
)


class SharedArrival:
    """Shows every rank the Arrival of an update that the driver waits for: `result` is
    collective. arrival: the driver's; other ranks have one that is done."""

    def __init__(self, zero: RankZero, arrival: Future[None], then: Callable[[], None]) -> None:
        self._zero, self._arrival, self._then = zero, arrival, then

    def done(self) -> bool:
        """Returns whether `result` would not wait, as far as this rank knows: on other ranks than
        the driver it is always True."""
        return self._arrival.done()

    def result(self, timeout: float | None = None) -> None:
        """Waits until the servers have the weights, at most `timeout` s, and raises the driver's
        error on every rank. Collective."""
        self._zero(self._arrival.result, timeout)
        self._then()


def driver_of_world(
    config: RolloutConfig, sync: WeightSyncConfig, *, start_timeout: float = 0.0
) -> RankZero:
    """Finds the driver among the ranks of torchrun's world, and bounds what it does alone: by its
    own timeouts, and by collective_timeout where that is longer. Starts torch.distributed where
    torchrun began several processes and nothing has yet.

    start_timeout: seconds in which the driver starts servers.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        init_distributed()
    bounds = {
        "server.start_timeout": start_timeout,
        "rollout.setup_timeout": config.setup_timeout,
        "rollout.episode_timeout": config.episode_timeout,
        "rollout.request_timeout": config.request_timeout,
        "weight_sync.timeout": sync.timeout,
    }
    if collective_timeout() > sum(bounds.values()):
        bounds = {"collective_timeout": collective_timeout()}
    return RankZero(
        sum(bounds.values()), keys=" + ".join(k for k, t in bounds.items() if t), meets=True
    )


def check_same_data(dataloader: object, zero: RankZero) -> None:
    """Raises ValueError on every rank where a rank's dataloader shows other data than rank 0's: a
    different length or a different first row. Collective.
    """
    sampler = getattr(dataloader, "sampler", None)
    split = isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1
    if zero.highest(int(split)):
        raise ValueError(f"prepare_batch: the dataloader's sampler splits its data by rank; {_FIX}")
    if zero.size == 1:
        return
    mine = _looks(dataloader)
    theirs = zero(_looks, dataloader)
    if zero.highest(int(mine != theirs)):
        raise ValueError(
            f"prepare_batch: the ranks' dataloaders are not of the same data. Rank {zero.rank} has "
            f"{_words(mine)}, rank 0 has {_words(theirs)}: {_FIX}"
        )


def _looks(dataloader: Any) -> tuple[int | None, str | None]:
    """Returns the number of batches and the first row, each None where it cannot be had."""
    rows = getattr(dataloader, "dataset", dataloader)
    first = None
    if hasattr(rows, "__getitem__") and hasattr(rows, "__len__"):
        try:
            row = rows[0] if len(rows) else None
            first = json.dumps(row, sort_keys=True, default=lambda o: type(o).__name__)
        except Exception as e:  # the user's code; where it fails on one rank, that is a difference
            first = f"a row that cannot be read ({type(e).__name__}: {e})"
    return _length(dataloader), first


def _length(dataloader: Any) -> int | None:
    try:
        return len(dataloader)
    except TypeError:
        return None


def _words(looks: tuple[int | None, str | None]) -> str:
    length, first = looks
    return f"{length if length is not None else 'an unknown number of'} batches from {first!s:.80}"
