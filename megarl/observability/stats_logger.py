"""Writes the metrics of every step to the console, jsonl, tensorboard, wandb and a tracker of the
user's; at the end a summary of the run and its report.

<run>/stats.jsonl is always written: a RunLog with one object per step, {"step", "time" (Unix
seconds), "elapsed_s", name: value, ...}. A run that continues from step k keeps the rows up to k;
later rows are moved to stats.superseded.jsonl, as are all rows where a run starts anew.
"""

from __future__ import annotations

import json
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megarl.config.errors import ConfigError
from megarl.config.loader import run_dir
from megarl.config.recipes import BaseConfig
from megarl.config.run import StatsLoggerConfig, WandbConfig
from megarl.config.script import note_read, warn_of_unread
from megarl.config.secrets import masked_message, public_tree
from megarl.observability.logging import env_rank, get_logger
from megarl.observability.run_log import RunLog
from megarl.observability.trackers import TensorBoardSink, WandbSink
from megarl.utils import stopping
from megarl.utils.files import DiskFull, full_disk_named, write_whole
from megarl.utils.importing import load_object
from megarl.utils.user_errors import in_one_line

log = get_logger(__name__)

STATS_FILE = "stats.jsonl"
UNGROUPED = "train"
FIRST_GROUPS = ("reward", "eval", UNGROUPED, "response_len", "timing")
# without tables, fast steps share a line: at most one in this many seconds
PROGRESS_INTERVAL = 1.0
CLOSE_S = 60.0  # that a sink has to close
SLOW_S = 30.0  # after which a sink that works is named


class Sink(Protocol):
    """Writes metrics somewhere; a tracker of the user's (stats_logger.tracker) is one, too. What it
    raises here is a warning, the first time of each method, and ends no run."""

    def write(self, step: int, stats: Mapping[str, float], total_steps: int | None) -> None:
        """Writes the metrics after `step` finished steps of `total_steps` (None: not known). A
        continued run writes the steps again that it makes again."""

    def close(self, outcome: str) -> None:
        """Ends it. outcome: "finished", "stopped" (by a signal) or "failed: " and the error."""


class StatsLogger:
    """Writes on rank 0; on other ranks every method does nothing."""

    def __init__(
        self,
        config: StatsLoggerConfig,
        *,
        run_dir: str | Path,
        experiment_name: str,
        trial_name: str,
        run_config: dict[str, Any],
        from_step: int | None = None,
    ) -> None:
        """Opens the sinks, on rank 0. `from_step`: the step that a resumed run continues from."""
        self._run_dir = Path(run_dir)
        self._total_steps: int | None = None
        self._committed = False
        self._report = config.report and env_rank() == 0
        self._sinks: list[Sink] = []
        self._failed: list[Callable[..., None]] = []  # methods of sinks that raised
        self._wandb: WandbSink | None = None
        if env_rank() != 0:
            return
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._log = RunLog(self._run_dir / STATS_FILE)
        self._log.begin(-1 if from_step is None else from_step)
        rows = self._log.read()
        self._start = time.monotonic() - (float(rows[-1]["elapsed_s"]) if rows else 0.0)
        self._sinks.append(ConsoleSink(table=config.table))
        if config.tensorboard:
            self._sinks.append(TensorBoardSink(self._run_dir / "tensorboard", from_step))
        wandb = WandbConfig(**config.wandb)
        if wandb.mode != "disabled":
            self._wandb = WandbSink(
                mode=wandb.mode,
                options={"project": experiment_name, **wandb.options},
                name=f"{experiment_name}/{trial_name}",
                run_dir=self._run_dir,
                run_config=run_config,
            )
            self._sinks.append(self._wandb)
        if config.metrics_port is not None:
            from megarl.observability.prometheus import PrometheusSink  # which few runs need

            self._sinks.append(PrometheusSink(config.metrics_port, from_step))
        if config.tracker.type:
            make = load_object(config.tracker.type, what="stats_logger.tracker")
            about = {"run_dir": self._run_dir, "from_step": from_step}
            tracker = make(run_config, **about, **config.tracker.options)
            if not all(callable(getattr(tracker, name, None)) for name in ("write", "close")):
                raise ConfigError(
                    f"stats_logger.tracker.type={config.tracker.type}: {tracker!r} lacks a "
                    "method write or close; return an object that has both"
                )
            self._sinks.append(tracker)

    @classmethod
    def for_run(cls, cfg: BaseConfig, *, from_step: int | None = None) -> StatsLogger:
        """Makes the logger of a run, in its directory. from_step: see __init__."""
        note_read(cfg, "stats_logger")
        return cls(
            cfg.stats_logger,
            run_dir=run_dir(cfg),
            experiment_name=cfg.experiment_name,
            trial_name=cfg.trial_name,
            run_config=public_tree(cfg),
            from_step=from_step,
        )

    def commit(
        self,
        epoch: int,
        step: int,
        global_step: int,
        stats: Mapping[str, float] | Sequence[Mapping[str, float]],
    ) -> None:
        """Logs what step `global_step` of a script's loop gave: one dict, or several that do not
        share names. epoch, its step and global_step count from 0; the row is that of
        global_step + 1 finished steps, with `epoch` as a metric.
        """
        several = [stats] if isinstance(stats, Mapping) else stats
        merged = {name: value for part in several for name, value in part.items()}
        self.log(global_step + 1, {"epoch": float(epoch)} | merged)
        warn_of_unread()

    def log(
        self,
        step: int,
        stats: Mapping[str, float],
        *,
        total_steps: int | None = None,
        completions: Mapping[str, Sequence[Mapping[str, Any]]] = {},
    ) -> None:
        """Logs the metrics of `step` finished steps; step 0 holds those from before the first.
        completions: rows of the tables completions/<name>, for wandb alone. Raises DiskFull where
        there is no room."""
        self._total_steps, self._committed = total_steps, True
        stats = {**stats, **throughput(stats)}
        with full_disk_named(f"writing the metrics of step {step}", self._run_dir):
            if self._sinks:
                row = {k: float(v) if math.isfinite(v) else None for k, v in stats.items()}
                clock = {"time": round(time.time(), 3), "elapsed_s": self._elapsed()}
                self._log.append(step, row | clock)
            for sink in self._sinks:
                self._tell(sink.write, step, stats, total_steps)
            if self._wandb is not None:
                self._tell(self._wandb.show, step, completions)

    def close(
        self, *, final: Mapping[str, float] | None = None, error: BaseException | None = None
    ) -> None:
        """Ends every sink, writes <run>/summary.json and, where configured, <run>/report.html, and
        prints the summary. `final`: counters as the run ends; `error`: what ended it. A start that
        logged no step (it was refused, or the run is over) leaves an earlier start's as they are. A
        disk that is full is a warning: what the run has made is there without a summary.
        """
        sinks, self._sinks = self._sinks, []
        outcome = "stopped" if stopping.status() else "finished"
        if error is not None:
            outcome = f"failed: {masked_message(in_one_line(error))}"
        try:
            with full_disk_named("writing the summary", self._run_dir):
                for sink in sinks:
                    # a thread, so that a tracker that hangs holds no run that is over
                    closing = threading.Thread(
                        target=self._tell, args=(sink.close, outcome), daemon=True
                    )
                    closing.start()
                    closing.join(CLOSE_S)
                    if closing.is_alive():
                        log.warning("%s took %g s: given up", _name(sink.close), CLOSE_S)
                if sinks:
                    self._sum_up(final, error)
        except DiskFull as e:
            log.warning("the summary or the report is not written: %s", e)

    def _tell(self, method: Callable[..., None], *args: Any) -> None:
        """Calls a method of a sink. The first time that it raises is a warning; one that takes
        longer than SLOW_S is named."""
        slow = f"the run waits for {_name(method)}, which takes longer than {SLOW_S:g} s"
        timer = threading.Timer(SLOW_S, log.warning, (slow,))
        timer.daemon = True
        timer.start()
        try:
            method(*args)
        except (Exception, SystemExit, GeneratorExit) as e:
            if method not in self._failed:
                self._failed.append(method)
                log.warning("%s failed, and the run goes on: %s", _name(method), in_one_line(e))
        finally:
            timer.cancel()

    def _elapsed(self) -> float:
        """Returns the seconds of the run, earlier starts included."""
        return round(time.monotonic() - self._start, 3)

    def _sum_up(self, final: Mapping[str, float] | None, error: BaseException | None) -> None:
        from megarl.observability.report import load_run, write_report
        from megarl.observability.report import summary as report

        if not self._committed and (self._run_dir / report.SUMMARY_FILE).exists():
            return
        try:
            run = load_run(self._run_dir)
        except (OSError, ValueError) as e:  # removed or written over while the run went on
            log.warning("there is no summary: %s", e)
            return
        if not run.rows and not (final and error):
            return  # it ended before it did anything, or was a replay
        summary = report.summarize(
            run,
            seconds=self._elapsed(),
            total_steps=self._total_steps,
            final=final,
            error=error,
        )
        summary["paths"] = report.artifacts(self._run_dir)
        if self._report:
            run.summary = summary
            path = write_report(self._run_dir / "report.html", [run])
            summary["paths"] = {"report": str(path)} | summary["paths"]
        write_whole(self._run_dir / report.SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")
        report.print_summary(summary)


def _name(method: Callable[..., None]) -> str:
    return getattr(method, "__qualname__", str(method))


def throughput(stats: Mapping[str, float]) -> dict[str, float]:
    """Returns perf/tokens_per_s of a step that tells its tokens and seconds, else {}: all tokens of
    the batch, prompts included, over the whole step."""
    tokens, seconds = stats.get("tokens/total"), stats.get("timing/step_s")
    return {"perf/tokens_per_s": tokens / seconds} if tokens and seconds else {}


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
        if step:  # row 0 ends an evaluation, before what the first step waits for
            self._ends.append((step, now))
        always = step == total_steps or any(name.startswith("eval/") for name in stats)
        if not (self._table or always) and now - self._shown < PROGRESS_INTERVAL:
            return
        self._shown = now
        if self._table and stats:
            self._console.print(stats_table(stats, width=self._console.width))
        pace = seconds_per_step(self._ends) or stats.get("timing/step_s")
        line = progress_line(step, stats, total_steps, pace)
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
