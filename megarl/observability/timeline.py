"""Records when things began and ended, so that `megarl trace` can show a run on one time axis.

<run>/timeline/rank_3.jsonl has one line per span of a process: {"track", "name", "start" (Unix
seconds), "seconds", "about"}. Where it grows beyond LIMIT bytes it becomes rank_3.older.jsonl, in
place of an earlier one, so that the newest spans stay. Without an open file nothing is recorded.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

FOLDER = "timeline"
LIMIT = 32 << 20  # bytes of one file
PHASES, SYNCS, EPISODES, CALLS, MEMORY = "phases", "syncs", "episodes", "calls", "memory"  # tracks


class Timeline:
    """Holds the file of one process, and the phases that its main thread is in."""

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._path = Path()
        self._lock = threading.Lock()
        self._phases: list[tuple[str, float]] = []

    def open(self, run_dir: Path, rank: int) -> None:
        """Begins to record in the run's directory, behind what an earlier start recorded."""
        self._path = run_dir / FOLDER / f"rank_{rank}.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Ends recording."""
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                with contextlib.suppress(OSError):  # a disk that is full, as in `record`
                    file.close()

    @property
    def recording(self) -> bool:
        """Returns whether spans are written."""
        return self._file is not None

    def record(self, track: str, name: str, start: float, seconds: float, **about: Any) -> None:
        """Writes a span. start: Unix seconds. A disk that is full costs the span, not the run."""
        if self._file is None:
            return
        span = {"track": track, "name": name, "start": round(start, 6), "seconds": seconds}
        line = json.dumps(span | ({"about": about} if about else {})) + "\n"
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._file is None:
                return
            self._file.write(line)
            self._file.flush()
            if self._file.tell() > LIMIT:
                self._file.close()
                self._path.replace(self._path.with_suffix(".older.jsonl"))
                self._file = self._path.open("a", encoding="utf-8")

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
    """Yields the spans of a process's file and of its older part, but for a line cut short."""
    for part in (path.with_suffix(".older.jsonl"), path):
        if not part.exists():
            continue
        for line in part.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)


timeline = Timeline()
