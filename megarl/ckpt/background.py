"""Files that a thread of this process writes while training goes on.

What shall be written is copied to host memory first (`to_host`); that copy is all a step waits for.
The threads of all ranks then write together, over process groups of their own on gloo, and the next
call of the main threads that asks (`Background.is_done`, `wait`) hears what became of it. Jobs run
one after the other, in the order they came in, which is the same on every rank.

megarl/ckpt/dist.py says why it is a thread and not megatron-core's forked process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.parallel import mcore
from megarl.parallel.agreement import together
from megarl.parallel.groups import collective_timeout

_group: tuple[dist.ProcessGroup | None, dist.ProcessGroup] | None = None
_newest: threading.Thread | None = None


def writers_group() -> dist.ProcessGroup:
    """All ranks over gloo, for the writing threads alone. Collective when first asked for."""
    global _group
    if _group is None or _group[0] is not dist.group.WORLD:
        bound = timedelta(seconds=collective_timeout())
        _group = dist.group.WORLD, dist.new_group(backend="gloo", timeout=bound)
    return _group[1]


def to_host(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies in host memory, pinned where the device is a GPU; there when it returns."""
    copies = []
    for t in tensors:
        t = t.detach()
        host = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=t.is_cuda)
        copies.append(host.copy_(t, non_blocking=True))
    if mcore.on_cuda():
        torch.cuda.current_stream().synchronize()
    return copies


class Background:
    """A job that a thread does; every rank starts the same jobs in the same order.

    The thread does not keep the process alive: after an error elsewhere nobody waits for it, and
    what it has written is what a killed process leaves behind.
    """

    def __init__(self, what: str, job: Callable[[], None]) -> None:
        global _newest
        self.what = what
        self._error: Exception | None = None
        before = _newest

        def run() -> None:
            try:
                if before is not None:
                    _join(before)
                job()
            except Exception as e:  # for the main thread to raise
                self._error = e

        self._thread = _newest = threading.Thread(target=run, name=f"megarl {what}", daemon=True)
        self._thread.start()

    def is_done(self) -> bool:
        """Whether it has ended, well or not, on every rank. Collective; does not wait for it."""
        running = torch.tensor([int(self._thread.is_alive())], device=mcore.device())
        dist.all_reduce(running)
        return not running.item()

    def wait(self) -> None:
        """Until it has ended on every rank. Collective: an error on one rank is one on all."""
        together(self.what, self._result)

    def _result(self) -> None:
        _join(self._thread)
        if self._error is not None:
            raise self._error


def _join(thread: threading.Thread) -> None:
    """TimeoutError where it still writes. Before the other ranks give up waiting for our word."""
    patience = 0.9 * collective_timeout()
    thread.join(patience)
    if thread.is_alive():
        raise TimeoutError(
            f"{thread.name} has not ended within {patience:g} s (0.9 of collective_timeout): see "
            "whether the storage answers, or raise collective_timeout"
        )
