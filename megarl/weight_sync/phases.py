"""Where the time of a sync went, as seen by the owner."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PREFIX = "weight_sync/"


class Phases:
    """Seconds per phase. gather, broadcast and load_wait overlap: they may exceed the total."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.figures: dict[str, float] = {}
        self._start = time.monotonic()

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(phase, time.monotonic() - start)

    def add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def stats(self) -> dict[str, float]:
        """All figures and phases so far, `total_s` and `gb_per_s` (bytes over the whole sync)."""
        total = time.monotonic() - self._start
        figures = dict(self.figures)
        if "bytes" in figures:
            figures["gb_per_s"] = figures["bytes"] / total / 1e9
        figures |= {f"{phase}_s": s for phase, s in self.seconds.items()} | {"total_s": total}
        return {PREFIX + name: value for name, value in figures.items()}
