"""Lets ranks act together: what fails on one is an error on all of them, with its rank named.

Two ways through one set of rules: `together` for a rare act, over the group that there is; an
`Agreement` for many acts in a row, over a gloo group of its own whose timeouts follow the act.
"""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megarl.api.failures import Failure, attempt, merged, settle
from megarl.wire.process_group import join_group, set_group_timeout

T = TypeVar("T")

# how much longer than a rank may take the others wait for its word
SLACK = 30.0
# How long a rank that failed waits for them to hear of it. They may be stuck in a collective that
# waits for this very rank, and nothing but its end frees them.
FAIL_GRACE = 10.0
CONNECT_TIMEOUT = 120.0
# bytes of a rank's row in the table that goes around: the length of its value, and a small value
_ROW, _LENGTH = 1024, 4


def together(what: str, fn: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Returns `fn()`, called on every rank of `group` (None: of the world); if it fails on one, all
    raise the error that `merged` returns. Collective.

    Collectives inside `fn` come before anything that can fail on one rank alone.
    """
    result, error = attempt(fn)
    found: list[Failure | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, Failure.of(error) if error else None, group=group)
    failed = {rank: f for rank, f in enumerate(found) if f is not None}
    try:
        # dist.get_rank(group) would ask for the rank in the world in scope, which may be another
        settle(what, (group or c10d._get_default_group()).rank(), failed, error)
    finally:
        del error
    return cast(T, result)


def from_zero(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Returns rank 0's `value` on every rank of `group`. Collective."""
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


class Agreement:
    """Exchanges small messages among the ranks of `group` through host memory (gloo, whatever
    `group` is).

    `group` None is the default group; without torch.distributed this rank is the only one. `what`
    names the act in errors, and `<what>.timeout` bounds it.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, what: str = "weight sync") -> None:
        self.what, self._key = what, what.replace(" ", "_")
        self.rank, self.size, self._bound = 0, 1, f"{CONNECT_TIMEOUT:g} s"
        self._group: dist.ProcessGroup | None = None
        if not dist.is_initialized():
            return
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.size > 1:
            self._group = _host_group(group)

    def set_timeout(self, timeout: float) -> None:
        """Sets how many seconds (plus SLACK) a rank may take before the others give it up."""
        bound = timeout + SLACK
        self._limit(bound, f"{self._key}.timeout + {SLACK:g} s = {bound:g} s")

    def _limit(self, seconds: float, name: str) -> None:
        self._bound = name
        if self._group is not None:
            set_group_timeout(self._group, seconds)

    def together(self, fn: Callable[..., T], *args: Any) -> T:
        """Returns fn(*args), called on every rank; if it fails on one, all raise the error that
        `merged` returns. After a failure `set_timeout` comes before the next call. Collective.
        Raises RuntimeError where a rank is not heard of within the timeout."""
        result, error = attempt(fn, *args)
        mine = Failure.of(error) if error else None
        if mine is not None:
            self._limit(FAIL_GRACE, f"{FAIL_GRACE:g} s")
        try:
            error = merged(self.what, self._gather_failures(mine), error)
        except RuntimeError as e:
            if mine is None:
                raise
            said = f"{self.what} failed on rank {self.rank}: {mine.text}; {e}"
            raise RuntimeError(said) from error
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame, and buffers in those below
        return cast(T, result)

    def gather(self, value: T) -> list[T]:
        """Returns every rank's picklable `value`, by rank. Collective. Raises RuntimeError where a
        rank is not heard of within the timeout.

        Small values go to rank 0 and from there to all at once: gloo's all_gather passes them from
        rank to rank, and all_gather_object does so twice.
        """
        if self._group is None:
            return [value]
        raw = pickle.dumps(value)
        row = torch.zeros(_ROW, dtype=torch.uint8)
        row[:_LENGTH].view(torch.int32)[0] = len(raw)
        small = torch.frombuffer(bytearray(raw[: _ROW - _LENGTH]), dtype=torch.uint8)
        row[_LENGTH : _LENGTH + len(small)] = small
        values: list[Any] = [None] * self.size
        with self._in_touch():
            table = self._table(row)
            lengths = table[:, :_LENGTH].contiguous().view(torch.int32).flatten().tolist()
            if max(lengths) > len(row) - _LENGTH:
                dist.all_gather_object(values, value, group=self._group)
                return values
        return [
            pickle.loads(r[_LENGTH : _LENGTH + n].numpy().tobytes()) for r, n in zip(table, lengths)
        ]

    def gather_from(self, ranks: Collection[int], value: T) -> list[T]:
        """Returns the `value` of these ranks alone, which may be large: `gather` takes as much room
        for each rank as for the one that has most. Collective. Raises RuntimeError as `gather`
        does."""
        if self._group is None:
            return [value]
        values = [[value if self.rank == rank else None] for rank in ranks]
        with self._in_touch():
            for rank, box in zip(ranks, values, strict=True):
                dist.broadcast_object_list(box, group=self._group, group_src=rank)
        return [cast(T, box[0]) for box in values]

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum of every rank's `values`, a tensor in host memory of one shape and dtype
        everywhere. Collective. Raises RuntimeError as `gather` does."""
        total = values.clone()
        if self._group is not None:
            with self._in_touch():
                dist.all_reduce(total, group=self._group)
        return total

    @contextmanager
    def _in_touch(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as e:
            raise RuntimeError(
                f"{self.what}: rank {self.rank} lost touch with the other ranks; one of them "
                f"ended, or did not get this far within {self._bound}. Cause: {e}"
            ) from e

    def _table(self, row: torch.Tensor) -> torch.Tensor:
        """Returns the rows of all ranks, [ranks, numbers in a row]."""
        table = row.new_empty(self.size, len(row))
        rows = list(table.unbind(0)) if self.rank == 0 else None
        dist.gather(row, rows, group=self._group, group_dst=0)
        dist.broadcast(table, group=self._group, group_src=0)
        return table

    def _gather_failures(self, failure: Failure | None) -> dict[int, Failure]:
        """Returns the failures by rank. Almost always there are none, which takes a byte to rank 0
        and one from there: a sync asks after every bucket."""
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
        """Leaves the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def _host_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Makes a gloo group of the ranks of `group`. Collective over those alone, which
    dist.new_group() can be too, but then it reuses names, and under a used name lie a dead group's
    addresses.
    """
    name = from_zero(f"megarl_agreement_{uuid.uuid4().hex[:8]}", group)
    return join_group(
        c10d._get_default_store(),
        rank=dist.get_rank(group),
        world_size=dist.get_world_size(group),
        group_name=name,
        backend="gloo",
        timeout=CONNECT_TIMEOUT,
    )
