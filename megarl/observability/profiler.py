"""Traces some steps: torch's profiler over a window that the configuration names.

<run>/profile/steps_3-4.rank0.json.gz is a Chrome trace (chrome://tracing, ui.perfetto.dev) with the
phases of the step (stats_tracker) as ranges beside the operators and, on a GPU, their kernels;
step_3.train.rank0.json.gz has one phase alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megarl.config.run import ProfilerConfig
from megarl.observability.logging import get_logger

log = get_logger(__name__)


class Profiler:
    """Traces the steps that the configuration names, on the ranks that it names. Each rank has its
    own: `with profiler.step(n): ...` goes around every step, `phase` around the phases of it (see
    stats_tracker.watch), and `close()` comes at the end."""

    def __init__(self, config: ProfilerConfig, *, run_dir: Path, rank: int) -> None:
        self._config, self._rank = config, rank
        self._folder = run_dir / "profile"
        self._wanted = config.start_step is not None and rank in config.ranks
        self._running: Any = None
        self._first = self._last = 0
        self._step: int | None = None  # that is traced now

    @contextmanager
    def step(self, n: int) -> Iterator[None]:
        """Traces step n if it is wanted; a run begun beyond start_step traces its first steps."""
        start = self._config.start_step
        if self._wanted and start is not None and n >= start:
            self._wanted, self._first = False, n  # once
        if self._first and n < self._first + self._config.steps:
            self._step = n
            if self._running is None and not self._config.phases:
                self._start()
        yield
        self._step = None
        if self._running is not None:
            self._last = n
            if n - self._first + 1 >= self._config.steps:
                self.close()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Traces a phase by itself where the configuration names it, in the steps that are
        wanted."""
        if self._step is None or name not in self._config.phases or self._running is not None:
            yield
            return
        self._start()
        yield
        self._write(f"step_{self._step}.{name.replace('/', '_')}")

    def _start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        options: dict[str, Any] = {"activities": activities, "record_shapes": True}
        options |= self._config.options
        self._running = torch.profiler.profile(**options)
        self._running.start()

    def close(self) -> None:
        """Writes the trace if it has a whole step, also where the run's end cut it short."""
        if self._running is not None and self._last >= self._first and not self._config.phases:
            self._write(f"steps_{self._first}-{self._last}")
        elif self._running is not None:
            self._running.stop()  # not one whole step, or phase
            self._running = None

    def _write(self, what: str) -> None:
        running, self._running = self._running, None
        running.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{what}.rank{self._rank}.json.gz"
        running.export_chrome_trace(str(path))
        log.info("trace of %s: %s", what, path)
