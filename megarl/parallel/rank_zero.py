"""Lets rank 0 alone do something, and gives every rank its result or its error.

Every rank runs the same script, but only rank 0 talks to the world outside: generation servers,
files of the run, the console. The other ranks wait for it, and get its error instead of a timeout
of their own.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import zlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megarl.api.failures import OtherRankFailed
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
