"""Writes files in a thread of this process while training goes on.

Data to write is copied to host memory first (`to_host`); a step waits for that copy alone. Then the
threads of all ranks write together, over gloo process groups of their own; the main threads learn
the outcome when they call `PendingSave.is_done` or `finish`. Saves run one after the other, in the
order they came in, which is the same on every rank.

megarl/ckpt/dist.py says why this is a thread and not megatron-core's forked process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.ckpt.files import removed_on_failure
from megarl.parallel import mcore
from megarl.parallel.ranks import Ranks, together
from megarl.parallel.worlds import PerWorld, inside, proved, thread_inside
from megarl.utils.env import collective_timeout
from megarl.utils.http import settle

T = TypeVar("T")
_newest: threading.Thread | None = None


def writers_group() -> dist.ProcessGroup:
    """Returns the group of the world's ranks over gloo, for the writing threads alone. The first
    call is collective."""
    return _groups.get()


def new_writers_group() -> dist.ProcessGroup:
    """Creates a group of the world's ranks over gloo. Collective."""
    wait = timedelta(seconds=collective_timeout())
    group: dist.ProcessGroup = proved(dist.new_group(backend="gloo", timeout=wait))
    return group


_groups = PerWorld(new_writers_group)


def to_host(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns copies in host memory, pinned where the device is a GPU. The copying has ended."""
    copies = []
    for t in tensors:
        t = t.detach()
        host = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=t.is_cuda)
        copies.append(host.copy_(t, non_blocking=True))
    if mcore.on_cuda():
        torch.cuda.current_stream().synchronize()
    return copies


class PendingSave(Generic[T]):
    """Writes in a thread; every rank of the world in scope starts the same saves in the same order.
    The save is in that world, whichever the main thread goes on to.

    what: its name in errors. write: what the thread does. complete: puts what is written in place,
    on the main thread, given what `write` returned. staging: the directory that a failure deletes.

    The thread does not keep the process alive: after an error elsewhere nobody waits for it, and
    what it has written is what a killed process leaves behind.
    """

    def __init__(
        self, what: str, staging: Path, write: Callable[[], T], complete: Callable[[T], None]
    ) -> None:
        global _newest
        self._what, self._staging, self._complete = what, staging, complete
        self._world = dist.group.WORLD
        self._outcome: Future[T] = Future()
        before = _newest

        def run() -> T:
            if before is not None:
                _join(before)
            with thread_inside(self._world):
                return write()

        work = partial(settle, self._outcome, run)
        self._thread = _newest = threading.Thread(target=work, name=f"megarl {what}", daemon=True)
        self._thread.start()

    def is_done(self) -> bool:
        """Tells whether the thread has ended, well or not, on every rank, so that `finish` need not
        wait. Collective; does not wait."""
        return not any(Ranks.of(self._world).gather(self._thread.is_alive()))

    def finish(self) -> None:
        """Waits until all ranks have written, and puts the directory in place. Collective: an error
        on one rank is raised on all."""
        with inside(self._world), removed_on_failure(self._staging):
            written = together(self._what, self._result)
            together(self._what, lambda: self._complete(written))

    def _result(self) -> T:
        _join(self._thread)
        return self._outcome.result()


def _join(thread: threading.Thread) -> None:
    """Waits for `thread`. Raises TimeoutError if it takes too long, before the collectives of the
    ranks that wait for this one time out."""
    patience = 0.9 * collective_timeout()
    thread.join(patience)
    if thread.is_alive():
        raise TimeoutError(
            f"{thread.name} has not ended within {patience:g} s (0.9 of collective_timeout): see "
            "whether the storage answers, or raise collective_timeout"
        )
