"""Shows a step on the console: a table of its metrics and one progress line."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import pairwise

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

UNGROUPED = "train"
FIRST_GROUPS = ("reward", "eval", UNGROUPED, "response_len", "timing")


# without tables, fast steps share a line: at most one in this many seconds
PROGRESS_INTERVAL = 1.0


class ConsoleSink:
    """Prints a table of each step's metrics and one line of progress; without tables, fast steps
    share a line."""

    def __init__(
        self,
        *,
        table: bool = True,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table, self._clock = table, clock
        self._console = console or Console(highlight=False)
        self._ends: deque[tuple[int, float]] = deque(maxlen=21)  # (step, when it was committed)
        self._shown = -math.inf

    def write(self, step: int, stats: Mapping[str, float], total_steps: int | None) -> None:
        """Prints one step, unless a line was printed less than PROGRESS_INTERVAL seconds ago."""
        now = self._clock()
        self._ends.append((step, now))
        always = step == total_steps or any(name.startswith("eval/") for name in stats)
        if not (self._table or always) and now - self._shown < PROGRESS_INTERVAL:
            return
        self._shown = now
        if self._table and stats:
            self._console.print(stats_table(stats, width=self._console.width))
        line = progress_line(step, stats, total_steps, seconds_per_step(self._ends))
        self._console.print(Text(line, style="bold"), soft_wrap=True)

    def close(self) -> None:
        """Does nothing: the console stays open."""


def seconds_per_step(ends: deque[tuple[int, float]]) -> float | None:
    """Returns the median over recent steps, so that one evaluation does not upset the forecast, or
    None."""
    pairs = list(ends)
    spans = [(t1 - t0) / (s1 - s0) for (s0, t0), (s1, t1) in pairwise(pairs) if s1 > s0]
    return statistics.median(spans) if spans else None


def progress_line(
    step: int, stats: Mapping[str, float], total_steps: int | None, pace: float | None
) -> str:
    """Returns one line: step, reward or loss, speed, and the time left at `pace` seconds
    per step."""
    parts = [f"step {step}" + (f"/{total_steps}" if total_steps else "")]
    reward = "reward/mean" if "reward/mean" in stats else "reward"  # as a script may log it
    for name, key in (("reward", reward), ("loss", "loss"), ("accuracy", "eval/accuracy")):
        if key in stats and not (name == "loss" and reward in stats):
            parts.append(f"{name} {stats[key]:.3f}")
    graded, accuracy = stats.get("eval/reward"), stats.get("eval/accuracy", 0.0)
    if graded is not None and abs(graded - accuracy) > 1e-6:  # in parts of a point
        parts.append(f"eval reward {graded:.3f}")
    if failed := stats.get("eval/failed"):
        parts.append(f"{failed:.1%} of eval failed")
    if seconds := stats.get("timing/step_s"):
        parts.append(f"{seconds:.2f} s/step")
    if speed := stats.get("perf/tokens_per_s"):
        parts.append(f"{number(speed)} tok/s")
    if pace is not None and total_steps is not None and total_steps > step:
        parts.append(f"ETA {duration(pace * (total_steps - step))}")
    return " · ".join(parts)


def stats_table(stats: Mapping[str, float], *, width: int) -> Table:
    """Returns the metrics by group (the part of the name before the first /), in as many columns as
    fit into `width` characters."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for key, value in stats.items():
        group, _, name = key.partition("/") if "/" in key else (UNGROUPED, "", key)
        groups.setdefault(group, []).append((name, number(value)))
    name_width = min(24, max(len(n) for cells in groups.values() for n, _ in cells))
    columns = max(1, (width - 20) // (name_width + 14))

    table = Table(box=SIMPLE_HEAD, show_header=False, padding=(0, 1), pad_edge=False)
    table.add_column(style="bold cyan", max_width=18, overflow="fold")
    for _ in range(columns):
        table.add_column(style="dim", max_width=name_width, overflow="fold")
        table.add_column(justify="right", no_wrap=True, min_width=9)
    first = {g: i for i, g in enumerate(FIRST_GROUPS)}
    for group in sorted(groups, key=lambda g: (first.get(g, len(first)), g)):
        cells = groups[group]
        for start in range(0, len(cells), columns):
            row = [text for cell in cells[start : start + columns] for text in cell]
            table.add_row(group if start == 0 else "", *row)
    return table


def number(value: float) -> str:
    """Writes a number in at most nine characters, with four digits that matter."""
    v = float(value)
    if not math.isfinite(v):
        return str(v)
    if v == int(v) and abs(v) < 100_000:
        return str(int(v))
    size = abs(v)
    if 1e-3 <= size < 10_000:
        return f"{v:.4g}"
    for bound, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if bound <= size < 1e15:
            return f"{v / bound:.4g}{unit}"
    return f"{v:.2e}"


def duration(seconds: float) -> str:
    """Writes seconds as 5s, 4m 07s, 2h 05m or 3d 04h."""
    s = max(0, round(seconds))
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m {s % 60:02d}s"
    if s < 86400:
        return f"{s // 3600}h {s % 3600 // 60:02d}m"
    return f"{s // 86400}d {s % 86400 // 3600:02d}h"
