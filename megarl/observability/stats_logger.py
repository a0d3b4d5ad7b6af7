"""Writes the metrics of every step to the console, jsonl, tensorboard, wandb and a tracker of the
user's; at the end a summary of the run and its report.

<run>/stats.jsonl is always written: a RunLog with one object per step, {"step", "time" (Unix
seconds), "elapsed_s", name: value, ...}. A run that continues from step k keeps the rows up to k;
later rows are moved to stats.superseded.jsonl, as are all rows where a run starts anew.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megarl.config.errors import ConfigError
from megarl.config.loader import run_dir
from megarl.config.recipes import BaseConfig
from megarl.config.run import StatsLoggerConfig, WandbConfig
from megarl.config.script import note_read, warn_of_unread
from megarl.config.secrets import public_tree
from megarl.observability.logging import env_rank, get_logger
from megarl.observability.run_log import RunLog
from megarl.observability.sinks import ConsoleSink, TensorBoardSink, WandbSink
from megarl.utils import stopping
from megarl.utils.files import DiskFull, full_disk_named, write_whole
from megarl.utils.importing import in_one_line, load_object

log = get_logger(__name__)

STATS_FILE = "stats.jsonl"
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
                    [
                        f"stats_logger.tracker.type={config.tracker.type}: {tracker!r} lacks a "
                        "method write or close; return an object that has both"
                    ]
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
            outcome = f"failed: {in_one_line(error)}"
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
