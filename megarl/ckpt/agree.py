"""Ranks that act together: what fails on one is an error on all of them, with its rank named."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megarl.utils.disk import DiskFull
from megarl.utils.staging import stage

T = TypeVar("T")


def together(what: str, fn: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """`fn()` on every rank of `group` (None: of the world); if it fails on one, all raise.
    Collective.

    A rank raises its own error if it has one, else a RuntimeError (DiskFull where that is it) that
    names the first rank that failed. Collectives inside `fn` come before anything that can fail on
    one rank alone.
    """
    error: Exception | None = None
    try:
        result = fn()
    except Exception as e:  # whatever it is, the other ranks must hear of it
        error = e
    said: list[tuple[str, bool] | None] = [None] * dist.get_world_size(group)
    mine = (f"{type(error).__name__}: {error}", isinstance(error, DiskFull)) if error else None
    dist.all_gather_object(said, mine, group=group)
    if error is not None:
        error.add_note(f"({what}, rank {dist.get_rank(group)})")
        raise error
    for rank, failure in enumerate(said):
        if failure is not None:
            message, disk_full = failure
            text = f"{what} failed on rank {rank}: {message}"
            raise DiskFull(text) if disk_full else RuntimeError(text)
    return result


def from_zero(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Rank 0's `value`, on every rank of `group`. Collective."""
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


@contextmanager
def staged(
    target: Path, check: Callable[[Path], None], group: dist.ProcessGroup | None = None
) -> Iterator[Path]:
    """On every rank, the new directory beside `target` that rank 0 makes after `check(target)`; a
    block that fails takes it along. Collective."""

    def make() -> Path | None:
        if dist.get_rank(group) != 0:
            return None
        check(target)
        return stage(target)

    staging: Path = from_zero(together(f"saving {target}", make, group), group)
    with removed_on_failure(staging, group):
        yield staging


@contextmanager
def removed_on_failure(staging: Path, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Rank 0 deletes what a failed block leaves behind."""
    try:
        yield
    except BaseException:
        if dist.get_rank(group) == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise


@contextmanager
def failures_named(what: str) -> Iterator[None]:
    """torch raises a CheckpointException, which is no Exception, on every rank: say whose it is."""
    try:
        yield
    except CheckpointException as e:
        rank, (cause, _) = min(e.failures.items())
        text = f"{what} failed on rank {rank}: {type(cause).__name__}: {cause}"
        raise RuntimeError(text) from cause
