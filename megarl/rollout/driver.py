"""Joins the rollout clients of all ranks to one: rank 0 drives, the others share its results."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist
from torch.utils.data import DistributedSampler

from megarl.config.rollout import RolloutConfig, WeightSyncConfig
from megarl.parallel import exchange  # noqa: F401  a Batch of several ranks travels by it
from megarl.parallel.groups import collective_timeout, init_distributed
from megarl.parallel.rank_zero import RankZero

T = TypeVar("T")

_SAME = (
    "give every rank the whole data set (no split_dataset_by_node, no DistributedSampler) and "
    "batches of train_dataset.batch_size rows"
)
_FIX = f"{_SAME}: rank 0 reads it for all, and the trainer splits each batch by itself"


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
    """Finds the driver among the ranks of torchrun's world. Ranks meet for each call within
    collective_timeout; then what the driver does alone is bounded by its own timeouts, and by
    collective_timeout where that is longer. Starts
    torch.distributed where torchrun began several processes and nothing has yet.

    start_timeout: seconds in which the driver starts servers.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        init_distributed()
    bounds = {
        "rollout.setup_timeout": start_timeout + config.setup_timeout,
        "rollout.episode_timeout": config.episode_timeout,
        "rollout.request_timeout": config.request_timeout,
        "weight_sync.timeout": sync.timeout,
    }
    if collective_timeout() > sum(bounds.values()):
        bounds = {"collective_timeout": collective_timeout()}
    return RankZero(
        sum(bounds.values()),
        keys=" + ".join(k for k, t in bounds.items() if t),
        meeting=("collective_timeout", collective_timeout()),
    )


def check_same_data(dataloader: object, zero: RankZero) -> None:
    """Raises ValueError on every rank where a rank's dataloader shows other data than rank 0's: a
    different length or a different first row. Collective.
    """
    sampler = getattr(dataloader, "sampler", None)
    split = isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1
    if zero.highest(int(split), "prepare_batch"):
        raise ValueError(f"prepare_batch: the dataloader's sampler splits its data by rank; {_FIX}")
    if zero.size == 1:
        return
    mine = _looks(dataloader)
    theirs = _if_they_differ("prepare_batch", mine, zero)
    if theirs is not None:
        raise ValueError(
            f"prepare_batch: the ranks' dataloaders are not of the same data. Rank {zero.rank} has "
            f"{_words(mine)}, rank 0 has {_words(theirs)}: {_FIX}"
        )


def check_same_rows(rows: Sequence[dict[str, Any]], zero: RankZero) -> None:
    """Raises ValueError on every rank where a rank's rows for `rollout_batch` are not rank 0's, of
    which the batch is. Collective."""
    if zero.size == 1:
        return
    mine = _digest(rows)
    theirs = _if_they_differ("rollout_batch", mine, zero)
    if theirs is not None:
        raise ValueError(
            f"rollout_batch: the ranks brought different rows. Rank {zero.rank} has {mine[0]}, "
            f"rank 0 has {theirs[0]}, and the batch is made of rank 0's alone: {_SAME}; or, where "
            "each rank has samples of its own, join them with Batch.from_local"
        )


def _if_they_differ(call: str, mine: T, zero: RankZero) -> T | None:
    """Returns what rank 0 has, where any rank has something else; else None. Collective. call: of
    the user's, for errors."""

    def shown() -> T:
        return mine

    shown.__qualname__ = call
    theirs = zero(shown)
    return theirs if zero.highest(int(mine != theirs), call) else None


def _digest(rows: Sequence[dict[str, Any]]) -> tuple[int, str]:
    """Returns how many rows there are, and a digest of what is in them; of None, none."""
    text = "\n".join(map(_text, rows or ()))
    return len(rows or ()), hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _text(row: object) -> str:
    """Writes a row, but for objects that are no data. What keeps it from being read is the user's
    code: where that fails on one rank alone, it is a difference."""
    try:
        return json.dumps(row, sort_keys=True, default=_plain)
    except Exception as e:
        return f"a row that cannot be read ({type(e).__name__}: {e})"


def _plain(value: Any) -> object:
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__


def _looks(dataloader: Any) -> tuple[int | None, str | None]:
    """Returns the number of batches and the first row, each None where it cannot be had."""
    rows = getattr(dataloader, "dataset", dataloader)
    first = None
    if hasattr(rows, "__getitem__") and hasattr(rows, "__len__"):
        try:
            first = _text(rows[0] if len(rows) else None)
        except Exception as e:  # as in _text
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
