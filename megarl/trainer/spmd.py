"""SPMD: every rank runs the same script; rank 0 alone talks to the outside world.

Rank 0 drives rollouts and evaluation. The others wait for its result and get its error, not a
timeout of their own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megarl.utils.disk import DiskFull

T = TypeVar("T")


class RankZero:
    """Calls a function on rank 0 and hands its result, or its failure, to every rank.

    Collective. Results travel pickled through host memory (gloo), so they may be any picklable
    object; `timeout` bounds in seconds how long the other ranks wait; `keys` are the configuration
    keys it comes from, for the error.
    """

    def __init__(self, timeout: float, *, keys: str = "collective_timeout") -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        size = dist.get_world_size() if dist.is_initialized() else 1
        self._bound = f"{keys} = {timeout:g} s"
        self._group = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)) if size > 1 else None
        )

    @property
    def is_zero(self) -> bool:
        return self.rank == 0

    def __call__(self, fn: Callable[..., T], *args: Any, **kw: Any) -> T:
        if self._group is None:
            return fn(*args, **kw)
        name = getattr(fn, "__qualname__", repr(fn))
        if self.is_zero:
            return self._lead(name, fn, *args, **kw)
        return self._follow(name)

    def highest(self, value: int) -> int:
        """The largest `value` of all ranks. Collective."""
        if self._group is None:
            return value
        box = torch.tensor([value])
        dist.all_reduce(box, dist.ReduceOp.MAX, self._group)
        return int(box.item())

    def _lead(self, name: str, fn: Callable[..., T], *args: Any, **kw: Any) -> T:
        try:
            result = fn(*args, **kw)
        except BaseException as e:
            with contextlib.suppress(RuntimeError):  # who is gone need not hear of it
                if isinstance(e, DiskFull):
                    self._tell("disk full", str(e))
                else:
                    self._tell("error", f"{type(e).__name__}: {e}")
            raise
        try:
            self._tell("ok", result)
        except RuntimeError as e:
            raise RuntimeError(
                f"rank 0 finished {name}, but another rank ended or hangs: its log has the first "
                f"error. Cause: {e}"
            ) from e
        return result

    def _tell(self, status: str, value: Any) -> None:
        dist.broadcast_object_list([(status, value)], 0, self._group)

    def _follow(self, name: str) -> Any:
        box: list[Any] = [None]
        try:
            dist.broadcast_object_list(box, 0, self._group)
        except RuntimeError as e:
            raise RuntimeError(
                f"rank {self.rank} waited for rank 0 to finish {name}, and rank 0 ended or took "
                f"longer than {self._bound}: its log has the first error. Cause: {e}"
            ) from e
        status, value = box[0]
        if status == "disk full":
            raise DiskFull(value)
        if status == "error":
            raise RuntimeError(f"rank 0 failed in {name}: {value}")
        return value


def world_size_from_env() -> int:
    """The number of processes torchrun started, 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))
