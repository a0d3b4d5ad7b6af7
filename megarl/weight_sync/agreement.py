"""Ranks that share a fate: an error on one of them becomes one error on all of them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megarl.api.records import ServersLost
from megarl.wire.process_group import join_group, set_group_timeout

T = TypeVar("T")

# how much longer than a rank may take the others wait for its word
SLACK = 30.0
# How long a rank that failed waits for them to hear of it. They may be stuck in a collective that
# waits for this very rank, and nothing but its end frees them.
FAIL_GRACE = 10.0
CONNECT_TIMEOUT = 120.0


class Deadline:
    """`timeout` seconds from now. patience: how long a server may give no sign of life."""

    def __init__(self, timeout: float, *, patience: float = 30.0) -> None:
        self.timeout, self.patience = timeout, patience
        self._end = time.monotonic() + timeout

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end

    @property
    def left(self) -> float:
        """Seconds left, never less than a hair, so that it can serve as a timeout."""
        return max(0.001, self._end - time.monotonic())


@dataclass(frozen=True)
class _Failure:
    """An error as it travels: what it says, and the servers it is the loss of."""

    kind: str
    message: str
    servers: dict[str, str]

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        servers = error.servers if isinstance(error, ServersLost) else {}
        return cls(type(error).__name__, str(error), servers)

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


def _servers_lost(failures: Collection[_Failure]) -> ServersLost | None:
    """One for all, where there is one among them. The other errors may be its consequences."""
    lost = [f for f in failures if f.servers]
    servers = {server: why for f in lost for server, why in f.servers.items()}
    return ServersLost("; ".join(f.message for f in lost), servers) if lost else None


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

        Raises on every rank when it raised on any: ServersLost with the servers of all where that
        is one of the errors, for what follows from it is the same on every rank; else the rank's
        own error where it has one, else a RuntimeError with the others' messages. Then
        `set_timeout` comes before the next call.
        """
        try:
            result = fn(*args)
        except Exception as e:
            mine = _Failure.of(e)
            self._limit(FAIL_GRACE, f"{FAIL_GRACE:g} s")
            try:
                failed = self._gather_failures(mine)
            except RuntimeError as lost:
                said = f"weight sync failed on rank {self.rank}: {mine}; {lost}"
                raise RuntimeError(said) from e
            if servers_lost := _servers_lost(failed.values()):
                raise servers_lost from e
            raise
        failed = self._gather_failures(None)
        if servers_lost := _servers_lost(failed.values()):
            raise servers_lost
        if failed:
            said = "; ".join(f"rank {r}: {failure}" for r, failure in failed.items())
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

    def gather_from(self, ranks: Collection[int], value: T) -> list[T]:
        """Collective. The `value` of these ranks alone, which may be large: `gather` takes as much
        room for each rank as for the one that has most.
        """
        if self._group is None:
            return [value]
        values = [[value if self.rank == rank else None] for rank in ranks]
        with self._in_touch():
            for rank, box in zip(ranks, values, strict=True):
                dist.broadcast_object_list(box, group=self._group, group_src=rank)
        return [cast(T, box[0]) for box in values]

    @contextmanager
    def _in_touch(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as e:
            raise RuntimeError(
                f"weight sync: rank {self.rank} lost touch with the other ranks; one of them "
                f"ended, or did not get this far within {self._bound}. Cause: {e}"
            ) from e

    def _gather_failures(self, failure: _Failure | None) -> dict[int, _Failure]:
        """By rank. Almost always there are none, which takes a byte to rank 0 and one from there: a
        sync asks after every bucket, and gloo's all_gather passes its bytes from rank to rank.
        """
        if self._group is None:
            return {} if failure is None else {self.rank: failure}
        any_failed = torch.tensor([failure is not None], dtype=torch.uint8)
        first = self.rank == 0
        flags = [torch.empty_like(any_failed) for _ in range(self.size)] if first else None
        with self._in_touch():
            dist.gather(any_failed, flags, group=self._group, group_dst=0)
            if flags:
                any_failed = torch.stack(flags).amax(0)
            dist.broadcast(any_failed, group=self._group, group_src=0)
        if not any_failed:
            return {}
        return {r: f for r, f in enumerate(self.gather(failure)) if f is not None}

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
