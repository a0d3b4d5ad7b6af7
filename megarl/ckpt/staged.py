"""Makes directories that all ranks write into, and removes them where any rank fails."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megarl.parallel.agreement import from_zero, together
from megarl.utils.files import stage


@contextmanager
def staged(
    target: Path, check: Callable[[Path], None], group: dist.ProcessGroup | None = None
) -> Iterator[Path]:
    """Gives every rank the new directory beside `target` that rank 0 makes after `check(target)`; a
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
    """Lets rank 0 delete what a failed block leaves behind."""
    try:
        yield
    except BaseException:
        if dist.get_rank(group) == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise


@contextmanager
def failures_named(what: str) -> Iterator[None]:
    """Turns torch's CheckpointException, which is no Exception and comes on every rank, into a
    RuntimeError that says whose failure it is."""
    try:
        yield
    except CheckpointException as e:
        rank, (cause, _) = min(e.failures.items())
        text = f"{what} failed on rank {rank}: {type(cause).__name__}: {cause}"
        raise RuntimeError(text) from cause
