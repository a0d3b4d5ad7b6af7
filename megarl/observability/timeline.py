"""Records when things began and ended, and traces some steps by torch's profiler.

<run>/timeline/rank_3.jsonl has one line per span of a process: {"track", "name", "start" (Unix
seconds), "seconds", "about"}, for `megarl trace`. Where it grows beyond LIMIT bytes it becomes
rank_3.older.jsonl, in place of an earlier one, so that the newest spans stay. Without an open file
nothing is recorded.

<run>/profile/steps_3-4.rank0.json.gz is a Chrome trace (chrome://tracing, ui.perfetto.dev) with the
phases of the step as ranges beside the operators and, on a GPU, their kernels;
step_3.train.rank0.json.gz has one phase alone.

A launcher, which has no torch, records here, too: it is imported where something is traced.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from megarl.config.run import ProfilerConfig
from megarl.observability.logging import get_logger
from megarl.observability.run_log import append_line, read_lines

log = get_logger(__name__)

FOLDER = "timeline"
LIMIT = 32 << 20  # bytes of one file
PHASES, SYNCS, EPISODES, CALLS, MEMORY = "phases", "syncs", "episodes", "calls", "memory"  # tracks


class Timeline:
    """Names the file of one process, and the phases that its main thread is in."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._lock = threading.Lock()
        self._phases: list[tuple[str, float]] = []

    def open(self, run_dir: Path, rank: int) -> None:
        """Begins to record in the run's directory, behind what an earlier start recorded."""
        self._path = run_dir / FOLDER / f"rank_{rank}.jsonl"

    def close(self) -> None:
        """Ends recording."""
        self._path = None

    @property
    def recording(self) -> bool:
        """Returns whether spans are written."""
        return self._path is not None

    def record(self, track: str, name: str, start: float, seconds: float, **about: Any) -> None:
        """Writes a span. start: Unix seconds. A disk that is full costs the span, not the run."""
        path = self._path
        if path is None:
            return
        span = {"track": track, "name": name, "start": round(start, 6), "seconds": seconds}
        with self._lock, suppress(OSError):
            if append_line(path, span | ({"about": about} if about else {})) > LIMIT:
                path.replace(path.with_suffix(".older.jsonl"))

    @contextmanager
    def span(self, track: str, name: str) -> Iterator[dict[str, Any]]:
        """Records the time inside, also where it fails. What is put into the dict goes with it."""
        start, begun = time.time(), time.perf_counter()
        about: dict[str, Any] = {}
        try:
            yield about
        finally:
            self.record(track, name, start, time.perf_counter() - begun, **about)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Records a phase, and says meanwhile that the process is in it (`phase_now`)."""
        start, begun = time.time(), time.perf_counter()
        self._phases.append((name, start))
        try:
            yield
        finally:
            self._phases.pop()
            self.record(PHASES, name, start, time.perf_counter() - begun)

    def phase_now(self) -> tuple[str, float] | None:
        """Returns the innermost phase that has begun and when, in Unix seconds; None outside."""
        return next(reversed(self._phases), None)


def read_spans(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the spans of a process's file and of its older part, see `run_log.read_lines`."""
    for part in (path.with_suffix(".older.jsonl"), path):
        yield from read_lines(part)


timeline = Timeline()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Shows what is done inside: as a phase of the timeline, a range of a profiler's trace where
    one records, and of Nsight Systems where a GPU is in use."""
    import torch

    profiled, on_gpu = torch.autograd._profiler_enabled(), torch.cuda.is_initialized()
    with (
        torch.profiler.record_function(name) if profiled else nullcontext(),
        torch.cuda.nvtx.range(name) if on_gpu else nullcontext(),
        timeline.phase(name),
    ):
        yield


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
        import torch

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
