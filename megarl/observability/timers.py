"""Measures the seconds spent in the named phases of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from megarl.observability.timeline import timeline


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


@contextmanager
def shown(name: str) -> Iterator[None]:
    """Has what is done inside be a phase of the timeline, a range of a profiler's trace where one
    records, and one that Nsight Systems shows where a GPU is in use."""
    profiled, on_gpu = torch.autograd._profiler_enabled(), torch.cuda.is_initialized()
    with (
        torch.profiler.record_function(name) if profiled else nullcontext(),
        torch.cuda.nvtx.range(name) if on_gpu else nullcontext(),
        timeline.phase(name),
    ):
        yield


class Timers:
    """Adds up the seconds of named phases, until they are exported:

        with timers.phase("rollout"):
            ...
        stats |= timers.export()  # {"timing/rollout_s": 1.25}

    Phases may nest and repeat; each adds up on its own. `sync` waits for the GPU at both ends, so
    that a phase is charged for the kernels it launched; `clock` is for tests. In a profiler's trace
    phases are ranges, and the run's timeline has them. `around(name)` is entered before a phase
    begins, and left when it has ended.
    """

    def __init__(
        self, *, sync: bool = True, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._sync, self._clock = sync, clock
        self._seconds: dict[str, float] = {}
        self.around: Callable[[str], AbstractContextManager[Any]] = nullcontext

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the seconds inside to `name`, also when the body raises."""
        with self.around(name), self._timed(name):
            yield

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        if self._sync:
            _synchronize()
        start = self._clock()
        try:
            with shown(name):
                yield
                if self._sync:
                    _synchronize()
        finally:
            self.add(name, self._clock() - start)

    def add(self, name: str, seconds: float) -> None:
        """Adds seconds that were measured elsewhere to a phase."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each phase since the last export."""
        return dict(self._seconds)

    def export(self, prefix: str = "timing/") -> dict[str, float]:
        """Returns {prefix + phase + "_s": seconds} and starts again from nothing."""
        out = {f"{prefix}{name}_s": s for name, s in self._seconds.items()}
        self._seconds.clear()
        return out
