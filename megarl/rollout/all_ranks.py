"""Makes one rollout client of all ranks: rank 0, the driver, talks to the servers, and the others
get its results and errors. All have the same data, of which rank 0 reads."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch.utils.data import DistributedSampler

from megarl.config.rollout import RolloutConfig, WeightSyncConfig
from megarl.parallel.ranks import Ranks
from megarl.parallel.worlds import init_distributed
from megarl.utils.env import collective_timeout

_FIX = (
    "give every rank the whole data set (no split_dataset_by_node, no DistributedSampler) and "
    "batches of train_dataset.batch_size rows: rank 0 reads it for all, and the trainer splits "
    "each batch by itself; samples that each rank has of its own are joined by Batch.from_local"
)


class SharedArrival:
    """Shows every rank the Arrival of an update that the driver waits for: `result` is
    collective. arrival: the driver's; other ranks have one that is done."""

    def __init__(self, ranks: Ranks, arrival: Future[None], then: Callable[[], None]) -> None:
        self._ranks, self._arrival, self._then = ranks, arrival, then

    def done(self) -> bool:
        """Returns whether `result` would not wait, as far as this rank knows: on other ranks than
        the driver it is always True."""
        return self._arrival.done()

    def result(self, timeout: float | None = None) -> None:
        """Waits until the servers have the weights, at most `timeout` s, and raises the driver's
        error on every rank. Collective."""
        self._ranks.from_zero(self._arrival.result, timeout)
        self._then()


def ranks_of_client(
    config: RolloutConfig, sync: WeightSyncConfig, *, start_timeout: float = 0.0
) -> Ranks:
    """Returns the ranks of torchrun's world. They meet for each call within collective_timeout;
    then what the driver does alone is bounded by its own timeouts, and by collective_timeout where
    that is longer. Starts torch.distributed where torchrun began several processes and nothing has
    yet.

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
    keys = " + ".join(k for k, t in bounds.items() if t)
    return Ranks(work_timeout=(sum(bounds.values()), keys))


def check_same_data(dataloader: Any, ranks: Ranks) -> None:
    """Raises ValueError on every rank where a rank's dataloader shows other data than rank 0's: a
    different length or a different first row. Collective."""
    sampler = getattr(dataloader, "sampler", None)
    split = isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1
    if any(ranks.gather(split, "prepare_batch")):
        raise ValueError(f"prepare_batch: the dataloader's sampler splits its data by rank; {_FIX}")
    rows = getattr(dataloader, "dataset", dataloader)
    length = f"{len(dataloader)} batches" if hasattr(dataloader, "__len__") else "batches"
    first = _text(rows, 0) if hasattr(rows, "__getitem__") and hasattr(rows, "__len__") else ""
    _check_same("prepare_batch", f"{length} from {first}", ranks)


def check_same_rows(rows: Sequence[dict[str, Any]], ranks: Ranks) -> None:
    """Raises ValueError on every rank where a rank's rows for `rollout_batch` are not rank 0's, of
    which the batch is. Collective."""
    if ranks.size > 1:
        texts = "\n".join(_text(rows, i) for i in range(len(rows or ())))
        digest = hashlib.blake2b(texts.encode(), digest_size=8).hexdigest()
        _check_same("rollout_batch", f"{len(rows or ())} rows of digest {digest}", ranks)


def _check_same(call: str, data: str, ranks: Ranks) -> None:
    """Raises ValueError on every rank where `data`, what a rank brings to a `call` of the user's,
    differs from rank 0's. Collective."""
    first, *others = ranks.gather(data, call)
    for rank, other in enumerate(others, 1):
        if other != first:
            raise ValueError(
                f"{call}: the ranks' data differ. Rank {rank} has {other:.100}, rank 0 has "
                f"{first:.100}: {_FIX}"
            )


def _text(rows: Any, index: int) -> str:
    """Writes a row, but for objects that are no data. What keeps it from being read is the user's
    code: where that fails on one rank alone, it is a difference."""
    try:
        return json.dumps(rows[index], sort_keys=True, default=_plain)
    except Exception as e:
        return f"a row that cannot be read ({type(e).__name__}: {e})"


def _plain(value: Any) -> object:
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__
