"""Ranks that share a fate: an error on one of them becomes one error on all of them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megarl.weight_sync.process_group import join_group, set_group_timeout

T = TypeVar("T")

# how much longer than a rank may take the others wait for its word
SLACK = 30.0
# How long a rank that failed waits for them to hear of it. They may be stuck in a collective that
# waits for this very rank, and nothing but its end frees them.
FAIL_GRACE = 10.0
CONNECT_TIMEOUT = 120.0


class Deadline:
    """`timeout` seconds from now."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._end = time.monotonic() + timeout

    @property
    def left(self) -> float:
        """Seconds left, never less than a hair, so that it can serve as a timeout."""
        return max(0.001, self._end - time.monotonic())


class Agreement:
    """Small messages among the ranks of `group` through host memory (gloo, whatever `group` is).

    `group` None is the default group; without torch.distributed this rank is the only one.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank, self.size, self._bound = 0, 1, f"{CONNECT_TIMEOUT:g} s"
        self._group: dist.ProcessGroup | None = None
        if not dist.is_initialized():
            return
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.size > 1:
            self._group = _host_group(group)

    def set_timeout(self, timeout: float) -> None:
        """How many seconds a rank may take before the others give it up (plus SLACK)."""
        bound = timeout + SLACK
        self._limit(bound, f"weight_sync.timeout + {SLACK:g} s = {bound:g} s")

    def _limit(self, seconds: float, name: str) -> None:
        self._bound = name
        if self._group is not None:
            set_group_timeout(self._group, seconds)

    def together(self, fn: Callable[..., T], *args: Any) -> T:
        """Collective: fn(*args) on every rank, and then this rank's result.

        Raises on every rank when it raised on any: the rank's own error where it has one, else a
        RuntimeError with the others' messages. Then `set_timeout` comes before the next call.
        """
        try:
            result = fn(*args)
        except Exception as e:
            said = f"{type(e).__name__}: {e}"
            self._limit(FAIL_GRACE, f"{FAIL_GRACE:g} s")
            try:
                self._gather_errors(said)
            except RuntimeError as lost:
                raise RuntimeError(f"weight sync failed on rank {self.rank}: {said}; {lost}") from e
            raise
        errors = self._gather_errors(None)
        if errors:
            said = "; ".join(f"rank {r}: {m}" for r, m in errors.items())
            raise RuntimeError(f"weight sync failed on {said}")
        return result

    def gather(self, value: T) -> list[T]:
        """Collective. Every rank's picklable `value`, by rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        with self._in_touch():
            dist.all_gather_object(values, value, group=self._group)
        return values

    @contextmanager
    def _in_touch(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as e:
            raise RuntimeError(
                f"weight sync: rank {self.rank} lost touch with the other ranks; one of them "
                f"ended, or did not get this far within {self._bound}. Cause: {e}"
            ) from e

    def _gather_errors(self, message: str | None) -> dict[int, str]:
        """By rank. Almost always there are none, which a byte of each rank says in one round."""
        if self._group is None:
            return {} if message is None else {self.rank: message}
        mine = torch.tensor([message is not None], dtype=torch.uint8)
        flags = [torch.empty_like(mine) for _ in range(self.size)]
        with self._in_touch():
            dist.all_gather(flags, mine, group=self._group)
        if not any(flags):
            return {}
        return {r: m for r, m in enumerate(self.gather(message)) if m is not None}

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def _host_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A gloo group of the ranks of `group`. Collective over those alone, which dist.new_group()
    can be too, but then it reuses names, and under a used name lie a dead group's addresses.
    """
    name = [f"megarl_agreement_{uuid.uuid4().hex[:8]}"]
    dist.broadcast_object_list(name, group=group, group_src=0)
    return join_group(
        c10d._get_default_store(), rank=dist.get_rank(group),
        world_size=dist.get_world_size(group), group_name=name[0], backend="gloo",
        timeout=CONNECT_TIMEOUT,
    )  # fmt: skip
