"""Lets rank 0 alone do something, and gives every rank its result or its error.

Every rank runs the same script, but only rank 0 talks to the world outside: generation servers,
files of the run, the console. The other ranks wait for it, and get its error instead of a timeout
of their own. So it is with the rollout client, whose driver is rank 0.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from megarl.api.failures import OtherRankFailed
from megarl.config.rollout import RolloutConfig, WeightSyncConfig
from megarl.parallel.roll_call import RollCall
from megarl.parallel.worlds import PerWorld
from megarl.utils.files import DiskFull
from megarl.utils.stopping import StopRequested

T = TypeVar("T")


def on_rank_zero(fn: Callable[..., T], *args: Any, **kw: Any) -> T:
    """Returns `fn(*args, **kw)` of rank 0 on every rank, or raises its error; see RankZero.

    Collective over the ranks of torchrun (in a world's scope over its ranks), and a plain call
    where there is one process. Starts torch.distributed where nothing has yet.
    """
    from megarl.parallel.groups import init_distributed  # imports megatron

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        init_distributed()
    return _of_world.get()(fn, *args, **kw)


# errors that keep their type on every rank; each is made of its message
_KEPT: dict[str, type[Exception]] = {"DiskFull": DiskFull, "StopRequested": StopRequested}


class RankZero:
    """Calls a function on rank 0 and hands its result, or its error, to every rank.

    Making one and calling it are collective. Results travel pickled through host memory (gloo), so
    they are small picklable objects; tensors of a batch travel by `Batch` instead.
    """

    def __init__(
        self,
        timeout: float,
        *,
        keys: str = "collective_timeout",
        meeting: tuple[str, float] | None = None,
    ) -> None:
        """Makes a process group of its own where there are several ranks.

        timeout: seconds that ranks wait for each other; keys: the configuration keys it comes from,
        for the error; meeting: before rank 0 begins, all ranks meet, in so many seconds as the key
        of this name says: one that does not make the call, or makes another, is named.
        """
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self._bound, self._meeting = f"{keys} = {timeout:g} s", meeting
        self._leading = self._closed = False  # rank 0 is in a call; `close` was called
        self._group: dist.ProcessGroup | None = None
        if self.size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
            self._roll = RollCall(self._group, self.rank)

    @property
    def is_zero(self) -> bool:
        """Returns whether this rank is rank 0."""
        return self.rank == 0

    def __call__(self, fn: Callable[..., T], *args: Any, **kw: Any) -> T:
        """Returns `fn(*args, **kw)` of rank 0 on every rank. Collective.

        Where it raises, rank 0 raises its error and the others a RuntimeError with its text
        (DiskFull and StopRequested stay what they are). A call from within `fn` runs on rank 0
        alone, since no other rank is there to join it. Raises RuntimeError for a rank that does not
        come within the timeout.
        """
        if self._alone():
            return fn(*args, **kw)
        name = _name_of(fn)
        with self._roll.call(name):
            self._meet(name)
            if self.is_zero:
                return self._lead(name, fn, *args, **kw)
            return self._follow(name)

    def _alone(self) -> bool:
        """Returns whether no other rank takes part. Raises RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError("this RankZero is closed: what belongs to it was destroyed")
        return self._group is None or self._leading

    def close(self) -> None:
        """Leaves the group; waits for no other rank. May be called twice."""
        group, self._group, self._closed = self._group, None, True
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def highest(self, value: int, name: str = "highest") -> int:
        """Returns the largest `value` of all ranks. Collective. name: of the call, for errors."""
        if self._alone():
            return value
        box = torch.tensor([value])
        with self._roll.call(name):
            self._meet(name)
            with self._roll.wait(name, range(self.size)):
                dist.all_reduce(box, dist.ReduceOp.MAX, self._group)
        return int(box.item())

    def _lead(self, name: str, fn: Callable[..., T], *args: Any, **kw: Any) -> T:
        self._leading = True
        try:
            result = fn(*args, **kw)
            packed = pickle.dumps(result)  # here, for what cannot be is an error of every rank
        except BaseException as e:
            kind = type(e).__name__ if type(e) in _KEPT.values() else "error"
            text = str(e) if kind in _KEPT else f"{type(e).__name__}: {e}"
            with contextlib.suppress(RuntimeError):  # a rank that is gone need not hear of it
                self._tell(name, kind, text)
            raise
        finally:
            self._leading = False
        try:
            self._tell(name, "ok", packed)
        except RuntimeError as e:
            raise OtherRankFailed(
                f"rank 0 finished {name}, but another rank ended meanwhile, or hangs, for "
                f"{self._bound}: its log has the first error. Cause: {e}"
            ) from e
        return result

    def _tell(self, name: str, status: str, value: Any) -> None:
        with self._roll.wait(name, range(self.size)):
            dist.broadcast_object_list([(status, value)], 0, self._group)

    def _meet(self, name: str) -> None:
        """Waits for all ranks, where they meet. Raises RuntimeError naming those that do not come,
        and what they do instead."""
        if self._meeting is None:
            return
        key, seconds = self._meeting
        try:
            with self._roll.wait(name, range(self.size)):
                dist.monitored_barrier(self._group, timedelta(seconds=seconds), wait_all_ranks=True)
                names = self._names_if_they_differ(name)
        except RuntimeError as e:
            missing = self._roll.absent(range(self.size)) or "another rank, which ended"
            raise OtherRankFailed(
                f"rank {self.rank} waited in {name} for {missing}: every rank makes this call, and "
                f"within {key} = {seconds:g} s of the others. Cause: {e}"
            ) from e
        if names:
            calls = ", ".join(f"rank {rank} in {n}" for rank, n in enumerate(names))
            raise RuntimeError(f"the ranks are in different calls: {calls}; every rank makes each")

    def _names_if_they_differ(self, name: str) -> list[str]:
        """Returns the call that each rank is in; [] where all are in the same. A method's class may
        be another on rank 0."""
        digest = zlib.crc32(name.rpartition(".")[2].encode())
        ends = torch.tensor([digest, -digest])
        dist.all_reduce(ends, dist.ReduceOp.MAX, self._group)
        if int(ends.sum()) == 0:
            return []
        names = [""] * self.size
        dist.all_gather_object(names, name, self._group)
        return names

    def _follow(self, name: str) -> Any:
        box: list[Any] = [None]
        try:
            with self._roll.wait(name, [0]):  # not for its work, which takes its time
                dist.broadcast_object_list(box, 0, self._group)
        except RuntimeError as e:
            raise OtherRankFailed(
                f"rank {self.rank} waited for rank 0 to finish {name}, and rank 0 ended or took "
                f"longer than {self._bound}: its log has the first error. Cause: {e}"
            ) from e
        status, value = box[0]
        if status in _KEPT:
            raise _KEPT[status](value)
        if status == "error":
            raise OtherRankFailed(f"rank 0 failed in {name}: {value}")
        return pickle.loads(value)  # of our own rank 0, over the group


def _name_of(fn: Callable[..., Any]) -> str:
    """Returns how messages name a call, alike on every rank."""
    while isinstance(fn, partial):
        fn = fn.func
    name: str = getattr(fn, "__qualname__", type(fn).__qualname__)
    return name.removesuffix(".<locals>.<lambda>")


def _with_default_timeout() -> RankZero:
    from megarl.parallel.groups import collective_timeout  # imports megatron

    return RankZero(collective_timeout())


_of_world = PerWorld(_with_default_timeout)


# -- the rollout client of all ranks

_FIX = (
    "give every rank the whole data set (no split_dataset_by_node, no DistributedSampler) and "
    "batches of train_dataset.batch_size rows: rank 0 reads it for all, and the trainer splits "
    "each batch by itself; samples that each rank has of its own are joined by Batch.from_local"
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
    """Finds the driver among the ranks of torchrun's world. Ranks meet for each call within
    collective_timeout; then what the driver does alone is bounded by its own timeouts, and by
    collective_timeout where that is longer. Starts torch.distributed where torchrun began several
    processes and nothing has yet.

    start_timeout: seconds in which the driver starts servers.
    """
    from megarl.parallel.groups import collective_timeout, init_distributed  # imports megatron

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


def check_same_data(dataloader: Any, zero: RankZero) -> None:
    """Raises ValueError on every rank where a rank's dataloader shows other data than rank 0's: a
    different length or a different first row. Collective."""
    sampler = getattr(dataloader, "sampler", None)
    split = isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1
    if zero.highest(int(split), "prepare_batch"):
        raise ValueError(f"prepare_batch: the dataloader's sampler splits its data by rank; {_FIX}")
    rows = getattr(dataloader, "dataset", dataloader)
    length = f"{len(dataloader)} batches" if hasattr(dataloader, "__len__") else "batches"
    first = _text(rows, 0) if hasattr(rows, "__getitem__") and hasattr(rows, "__len__") else ""
    _check_same("prepare_batch", f"{length} from {first}", zero)


def check_same_rows(rows: Sequence[dict[str, Any]], zero: RankZero) -> None:
    """Raises ValueError on every rank where a rank's rows for `rollout_batch` are not rank 0's, of
    which the batch is. Collective."""
    if zero.size > 1:
        texts = "\n".join(_text(rows, i) for i in range(len(rows or ())))
        digest = hashlib.blake2b(texts.encode(), digest_size=8).hexdigest()
        _check_same("rollout_batch", f"{len(rows or ())} rows of digest {digest}", zero)


def _check_same(call: str, data: str, zero: RankZero) -> None:
    """Raises ValueError on every rank where `data`, what a rank brings to a `call` of the user's,
    differs from rank 0's. Collective."""

    def of_rank_zero() -> str:
        return data

    of_rank_zero.__qualname__ = call
    first = zero(of_rank_zero)
    if zero.highest(int(data != first), call):
        raise ValueError(
            f"{call}: the ranks' data differ. Rank {zero.rank} has {data:.100}, rank 0 has "
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
