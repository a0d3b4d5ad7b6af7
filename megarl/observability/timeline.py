"""Records when things began and ended, which processes there are, and traces of some steps by
torch's profiler.

<run>/timeline/rank_3.jsonl has one line per span of a process: {"track", "name", "start" (Unix
seconds), "seconds", "about"}, for `megarl trace`. Where it grows beyond LIMIT bytes it becomes
rank_3.older.jsonl, in place of an earlier one, so that the newest spans stay. Without an open file
nothing is recorded.

<run>/processes/rank_3.json, for `megarl status`, is written by a thread every BEAT seconds and at
the end: host, pid, `beat` (Unix seconds of the write), the phase that the process is in and since
when, how it ended. A launcher writes launcher_0.json when a start of its node's part begins and
when it fails.

<run>/profile/steps_3-4.rank0.json.gz is a Chrome trace (chrome://tracing, ui.perfetto.dev) with the
phases of the step as ranges beside the operators and, on a GPU, their kernels;
step_3.train.rank0.json.gz has one phase alone.

A launcher, which has no torch, records here, too: it is imported where something is traced.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from megarl.config.run import ProfilerConfig
from megarl.config.secrets import masked_message
from megarl.observability.logging import get_logger
from megarl.observability.run_log import append_line, read_lines
from megarl.utils.files import clean_up, write_whole
from megarl.utils.user_errors import in_one_line

log = get_logger(__name__)

FOLDER = "timeline"
LIMIT = 32 << 20  # bytes of one file
PHASES, SYNCS, EPISODES, CALLS, MEMORY = "phases", "syncs", "episodes", "calls", "memory"  # tracks
PROCESSES = "processes"  # folder
BEAT = 5.0  # seconds
RUNNING, ENDED, FAILED = "running", "ended", "failed"


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
        self._phases.append((name, time.time()))
        try:
            with self.span(PHASES, name):
                yield
        finally:
            self._phases.pop()

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


# ---- which processes are there


class Presence:
    """Writes the file of this process until `end`. It is number `rank` of `world_size`, and called
    `name`, which is that of a trainer where it is empty. servers: returns the addresses that it
    generates with, asked anew each time; where it raises OSError or ValueError, they stay."""

    def __init__(
        self,
        run_dir: Path,
        *,
        rank: int,
        world_size: int,
        name: str = "",
        servers: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self.total_steps: int | None = None
        self._servers = servers
        self._path = run_dir / PROCESSES / f"rank_{rank}.json"
        self._about: dict[str, Any] = {
            "rank": rank,
            "name": name or f"trainer {rank}",
            "world_size": world_size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "parent": os.getppid(),
            "started": time.time(),
            "servers": [],
        }
        clean_up(self._path.parent, self._path.name)
        self._over = threading.Event()
        self._write(RUNNING)
        self._thread = threading.Thread(target=self._beat, name="megarl-presence", daemon=True)
        self._thread.start()

    def end(self, error: BaseException | None) -> None:
        """Writes how the process ended: with `error`, or well."""
        self._over.set()
        self._thread.join(2 * BEAT)
        text = masked_message(in_one_line(error)) if error is not None else None
        self._write(FAILED if error is not None else ENDED, text)

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            self._write(RUNNING)

    def _write(self, state: str, error: str | None = None) -> None:
        with suppress(OSError, ValueError):
            self._about["servers"] = list(self._servers())
        phase = timeline.phase_now()
        now = {
            "state": state,
            "error": error,
            "beat": time.time(),
            "phase": phase[0] if phase else None,
            "phase_since": phase[1] if phase else None,
            "total_steps": self.total_steps,
        }
        _write(self._path, self._about | now)


class LauncherPresence:
    """Writes the file of the launcher of node `node`: that a start begins, and why it failed."""

    def __init__(self, run_dir: Path, node: int) -> None:
        """Says that a start begins; why the one before failed stays said (`before`)."""
        self._path = run_dir / PROCESSES / f"launcher_{node}.json"
        process = {"host": socket.gethostname(), "pid": os.getpid()}
        earlier = read_launcher(run_dir, node) or {}
        same = all(earlier.get(name) == value for name, value in process.items())
        self._about = process | {"before": earlier["error"] if same else None}
        clean_up(self._path.parent, self._path.name)
        self._write(RUNNING)

    def failed(self, why: str) -> None:
        """Says why the start failed; another may follow."""
        self._write(FAILED, why)

    def _write(self, state: str, error: str | None = None) -> None:
        _write(self._path, self._about | {"state": state, "error": error, "beat": time.time()})


def _write(path: Path, content: dict[str, Any]) -> None:
    with suppress(OSError):  # a full disk ends no run from here
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(content) + "\n")


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """Yields what a process last said, nothing where it has said nothing."""
    with suppress(OSError, json.JSONDecodeError):
        yield json.loads(path.read_text(encoding="utf-8"))


def read_launcher(run_dir: Path, node: int = 0) -> dict[str, Any] | None:
    """Returns what the launcher of a node last said, None where it has said nothing."""
    return next(_read(run_dir / PROCESSES / f"launcher_{node}.json"), None)


def read_presence(run_dir: Path) -> list[dict[str, Any]]:
    """Returns what the processes of the newest start last said, by rank; none where there are no
    files."""
    files = (run_dir / PROCESSES).glob("rank_*.json")
    processes = sorted(chain.from_iterable(map(_read, files)), key=lambda p: p["rank"])
    world = processes[0]["world_size"] if processes else 0
    return [p for p in processes if p["rank"] < world]
