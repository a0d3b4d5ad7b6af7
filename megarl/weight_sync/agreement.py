"""Ranks that share a fate: an error on one of them becomes one error on all of them."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# how much longer than the slowest rank's own bound the others wait for its word
SLACK = 30.0
# the group's own bound; every wait below brings a tighter one
_NEVER = timedelta(days=7)


class Deadline:
    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._end = time.monotonic() + timeout

    @property
    def left(self) -> float:
        """Seconds left, never below a hair, so that it can serve as a timeout."""
        return max(0.001, self._end - time.monotonic())


class Agreement:
    """Small messages among the ranks of `group` through host memory (gloo, whatever `group` is).

    `group` None is the default group; without torch.distributed the only rank is this one.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank, self.size = 0, 1
        self._group: dist.ProcessGroup | None = None
        if not dist.is_initialized():
            return
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.size > 1:
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            self._group = dist.new_group(
                ranks, backend="gloo", timeout=_NEVER, use_local_synchronization=True
            )

    def check(self, error: BaseException | None, deadline: Deadline) -> None:
        """Collective. Raises on every rank when any rank brings an error: the rank's own where it
        has one, else a RuntimeError with the others' messages.
        """
        if self._group is not None:
            failed = torch.tensor([error is not None], dtype=torch.int32)
            self._all_reduce_max(failed, deadline, error)
            if failed.item():
                message = None if error is None else f"{type(error).__name__}: {error}"
                said: list[str | None] = self.gather(message)
                if error is None:
                    ranks = "; ".join(f"rank {r}: {m}" for r, m in enumerate(said) if m)
                    raise RuntimeError(f"weight sync failed on {ranks}")
        if error is not None:
            raise error

    def gather(self, value: Any) -> list[Any]:
        """Collective. Every rank's picklable `value`, by rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _all_reduce_max(
        self, flag: torch.Tensor, deadline: Deadline, error: BaseException | None
    ) -> None:
        wait = deadline.left + SLACK
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        try:
            work.wait(timedelta(seconds=wait))
        except RuntimeError as e:
            raise RuntimeError(
                f"weight sync: rank {self.rank} heard nothing from the other ranks for "
                f"{wait:.0f} s, or one of them died"
            ) from (error or e)
