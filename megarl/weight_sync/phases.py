"""Measures where the time of a sync goes, as the sender sees it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PREFIX = "weight_sync/"


class Phases:
    """Adds up seconds per phase. gather, broadcast and load_wait overlap: they may exceed the
    total. pack, which is copying, is a part of gather."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self._on_device: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._start = time.monotonic()

    @contextmanager
    def time(self, phase: str, device: torch.device | None = None) -> Iterator[None]:
        """Adds the seconds inside the `with` to the phase. With a GPU as `device` these are the
        seconds of its work; else the host's, also where the work fails."""
        if device is not None and device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._on_device.append((phase, begin, end))
            return
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(phase, time.monotonic() - start)

    def add(self, phase: str, seconds: float) -> None:
        """Adds seconds to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def stats(self) -> dict[str, float]:
        """Returns all metrics and phases so far under "weight_sync/", with `total_s` (s) and
        `gb_per_s` (1e9 bytes per second of the whole sync)."""
        for phase, begin, end in self._on_device:
            end.synchronize()
            self.add(phase, begin.elapsed_time(end) / 1e3)
        self._on_device.clear()
        total = time.monotonic() - self._start
        metrics = dict(self.metrics)
        if "bytes" in metrics:
            metrics["gb_per_s"] = metrics["bytes"] / total / 1e9
        metrics |= {f"{phase}_s": s for phase, s in self.seconds.items()} | {"total_s": total}
        return {PREFIX + name: value for name, value in metrics.items()}
