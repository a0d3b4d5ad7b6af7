"""The sinks of metrics: the console, tensorboard and Weights & Biases. Also formats numbers for the
console and for reports."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megarl.config.errors import raise_if_any
from megarl.observability.logging import get_logger
from megarl.observability.run_log import RunLog
from megarl.utils.extras import require
from megarl.utils.importing import option_problems

log = get_logger(__name__)

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

    def close(self, outcome: str) -> None:
        """Does nothing: the console stays open."""


def seconds_per_step(ends: deque[tuple[int, float]]) -> float | None:
    """Returns the median over recent steps, so that one evaluation does not upset the forecast, or
    None."""
    spans = [(t1 - t0) / (s1 - s0) for (s0, t0), (s1, t1) in pairwise(ends) if s1 > s0]
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


class TensorBoardSink:
    """Writes tensorboard events into `path`. Raises ValueError if the package is missing."""

    def __init__(self, path: Path, from_step: int | None = None) -> None:
        user = "stats_logger.tensorboard=true"
        tensorboard = require("torch.utils.tensorboard", extra="tensorboard", user=user)
        # hides what an earlier start wrote beyond the step this one continues from
        self._writer = tensorboard.SummaryWriter(
            str(path), purge_step=0 if from_step is None else from_step + 1
        )

    def write(self, step: int, stats: Mapping[str, float], total_steps: int | None) -> None:
        """Writes one scalar per metric."""
        for name, value in stats.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def close(self, outcome: str) -> None:
        """Closes the event file."""
        self._writer.close()


class WandbSink:
    """Writes to Weights & Biases. The run's id is kept in <run>/wandb_id.txt, so that a resumed run
    continues the same curve. wandb itself is silent on the console: one line says where the run is.
    Raises ValueError if the package is missing, and ConfigError for options that wandb.init
    does not take, or has from megarl."""

    def __init__(
        self,
        *,
        mode: str,
        options: dict[str, Any],
        name: str,
        run_dir: Path,
        run_config: dict[str, Any],
    ) -> None:
        wandb = require("wandb", extra="wandb", user=f"stats_logger.wandb.mode={mode}")
        if "weave" not in sys.modules:  # else wandb recommends it on the console
            os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")
        self._run_dir, self._table = run_dir, wandb.Table
        id_file = run_dir / "wandb_id.txt"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8])
        ours: dict[str, Any] = {
            "mode": mode,
            "name": name,
            "id": id_file.read_text().strip(),
            "resume": "allow",
            "dir": str(run_dir),
            "config": run_config,
            "settings": wandb.Settings(silent=True),
        }
        key = "stats_logger.wandb.options"
        raise_if_any(option_problems(wandb.init, options, key=key, by_name=tuple(ours)))
        self._run = wandb.init(**ours, **options)
        where = self._run.url if mode == "online" else Path(self._run.dir).parent
        log.info("wandb, %s: %s", mode, where)
        # our own step axis: wandb's must never go back, a resumed run's may
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, stats: Mapping[str, float], total_steps: int | None) -> None:
        """Logs the metrics with `step` as their axis."""
        self._run.log({**stats, "step": step})

    def show(self, step: int, completions: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Logs the rows of each name as a table completions/<name>, with `step` as the axis."""
        tables = {f"completions/{n}": self._of(rows) for n, rows in completions.items() if rows}
        if tables:
            self._run.log({**tables, "step": step})

    def close(self, outcome: str) -> None:
        """Logs the rows of samples.jsonl as a table and ends wandb's run, which failed where this
        one did."""
        if samples := RunLog(self._run_dir / "samples.jsonl").read():
            self._run.log({"samples": self._of(samples)})
        self._run.finish(exit_code=int(outcome.startswith("failed")))

    def _of(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        """Returns a table of rows, with a column for every name."""
        columns: list[str | int] = list(dict.fromkeys(name for row in rows for name in row))
        data = [[_cell(row.get(str(name))) for name in columns] for row in rows]
        return self._table(columns=columns, data=data)


def _cell(value: Any) -> Any:
    """Returns a value as a table of wandb shows it."""
    return value if isinstance(value, str | int | float | None) else json.dumps(value)
