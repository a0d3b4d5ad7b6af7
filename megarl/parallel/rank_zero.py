"""Lets rank 0 alone do something, and gives every rank its result or its error.

Every rank runs the same script, but only rank 0 talks to the world outside: generation servers,
files of the run, the console. The other ranks wait for it, and get its error instead of a timeout
of their own.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megarl.parallel.worlds import PerWorld
from megarl.utils.disk import DiskFull
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
        self, timeout: float, *, keys: str = "collective_timeout", meets: bool = False
    ) -> None:
        """Makes a process group of its own where there are several ranks.

        timeout: seconds that ranks wait for each other; keys: the configuration keys it comes from,
        for the error; meets: ranks meet in a monitored barrier first, so that one that does not
        make the call is named.
        """
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self._bound, self._meets = f"{keys} = {timeout:g} s", meets
        self._leading = self._closed = False  # rank 0 is in a call; `close` was called
        self._timeout = timedelta(seconds=timeout)
        self._group = (
            dist.new_group(backend="gloo", timeout=self._timeout) if self.size > 1 else None
        )

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
        name = getattr(fn, "__qualname__", repr(fn)).removesuffix(".<locals>.<lambda>")
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

    def highest(self, value: int) -> int:
        """Returns the largest `value` of all ranks. Collective."""
        if self._alone():
            return value
        box = torch.tensor([value])
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
                self._tell(kind, text)
            raise
        finally:
            self._leading = False
        try:
            self._tell("ok", packed)
        except RuntimeError as e:
            raise RuntimeError(
                f"rank 0 finished {name}, but another rank ended, hangs or did not call it within "
                f"{self._bound}: every rank has to make this call, and the other's log has the "
                f"first error. Cause: {e}"
            ) from e
        return result

    def _tell(self, status: str, value: Any) -> None:
        self._meet()
        dist.broadcast_object_list([(status, value)], 0, self._group)

    def _meet(self) -> None:
        """Waits for all ranks; unlike a broadcast, the error of rank 0 names those that lack."""
        if self._meets:
            # without a timeout of its own it takes torch's default, not the group's
            dist.monitored_barrier(self._group, self._timeout, wait_all_ranks=True)

    def _follow(self, name: str) -> Any:
        box: list[Any] = [None]
        try:
            self._meet()
            dist.broadcast_object_list(box, 0, self._group)
        except RuntimeError as e:
            raise RuntimeError(
                f"rank {self.rank} waited for rank 0 to finish {name}, and rank 0 ended or took "
                f"longer than {self._bound}: its log has the first error. Cause: {e}"
            ) from e
        status, value = box[0]
        if status in _KEPT:
            raise _KEPT[status](value)
        if status == "error":
            raise RuntimeError(f"rank 0 failed in {name}: {value}")
        return pickle.loads(value)  # of our own rank 0, over the group


def _with_default_timeout() -> RankZero:
    from megarl.parallel.groups import collective_timeout  # imports megatron

    return RankZero(collective_timeout())


_of_world = PerWorld(_with_default_timeout)
