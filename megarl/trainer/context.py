"""Surrounds every recipe's loop: processes, run directory, tokenizer, logging, clock. Says where a
run's parts are made: in this process, or in worker processes under a single controller.

A recipe makes its roles, checks and client by `workers.make`, and calls their methods. Under
torchrun every rank does so for itself. A single controller (trainer.mode=controller) has the same
lines make them on its workers: what `make` returns there stands for the object of every worker, and
its methods are calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TextIO, TypeVar

import torch

from megarl.ckpt.dist import find_damage
from megarl.config.earlier_run import Checkpoint
from megarl.config.loader import run_dir
from megarl.config.recipe_engines import server_addresses
from megarl.config.recipes import BaseConfig, GRPOConfig
from megarl.config.run import ProfilerConfig
from megarl.data.tokenizer import run_tokenizer
from megarl.observability import stats_tracker
from megarl.observability.logging import get_logger
from megarl.observability.stats_logger import StatsLogger
from megarl.observability.timeline import Presence, Profiler, timeline
from megarl.parallel.ranks import Ranks
from megarl.parallel.worlds import init_distributed, shutdown_distributed
from megarl.trainer.rollout_metrics import gathered
from megarl.trainer.run_dir import claim, newest_checkpoint
from megarl.utils import stopping

log = get_logger(__name__)

TRAINER = "trainer"  # a kind of process
SAVE_FILE = "SAVE"  # asks for a checkpoint after the step under way
T = TypeVar("T")
P = ParamSpec("P")


class Workers:
    """Makes objects and runs functions in the processes of one kind: the trainers, or the one that
    drives rollouts. Arguments that stand for objects there arrive as these objects. This class does
    so in this process, as every rank of torchrun does for itself.

    ctx: the ProcessContext there."""

    def __init__(self, ctx: Any = None) -> None:
        self.ctx = ctx

    @property
    def tokenizer(self) -> Any:
        """Returns the tokenizer there."""
        return self.make(getattr, self.ctx, "tokenizer")

    def make(self, fn: Callable[P, T], /, *args: P.args, **kw: P.kwargs) -> T:
        """Returns what `fn(*args, **kw)` makes there, or what stands for it."""
        return fn(*args, **kw)

    def run(self, fn: Callable[P, T], /, *args: P.args, **kw: P.kwargs) -> T:
        """Returns the result of `fn(*args, **kw)` there, which is plain data."""
        return fn(*args, **kw)


HERE = Workers()


class ProcessContext:
    """Holds what surrounds the work of one process of a run: process group, run directory,
    tokenizer, what others see of it. `ranks` are those of the process's world."""

    def __init__(self, cfg: BaseConfig, *, model_path: str) -> None:
        self.cfg, self.model_path = cfg, model_path
        self.run_dir = run_dir(cfg)
        self.tokenizer: Any = run_tokenizer(cfg, model_path)
        self._presence: Presence | None = None

    def join(self) -> None:
        """Joins the process group of the world. Collective."""
        init_distributed(timeout=self.cfg.collective_timeout)
        torch.manual_seed(self.cfg.seed)
        self.ranks = Ranks.of()

    def appear(self, kind: str = TRAINER, *, first: int = 0, count: int = 0) -> None:
        """Has `megarl status`, `megarl trace` and the profiler see this process from now on, of
        `count` (0: of those that train). `first` is the number of the first process of its kind.
        """
        rank, cfg = self.ranks.rank, self.cfg
        number = first + rank
        timeline.open(self.run_dir, number)

        def servers() -> list[str]:
            if number or not isinstance(cfg, GRPOConfig):
                return []
            return server_addresses(cfg.rollout)

        self._presence = Presence(
            self.run_dir,
            rank=number,
            world_size=count or self.world_size,
            name=f"{kind} {rank}" if kind == TRAINER else kind,
            servers=servers,
        )
        self.profiler = Profiler(ProfilerConfig(**cfg.profiler), run_dir=self.run_dir, rank=rank)
        stats_tracker.watch(self.profiler.phase)

    def leave(self, error: BaseException | None) -> None:
        """Ends what `appear` and `join` began. Collective, unless there is an error."""
        try:
            stats_tracker.watch()
            if self._presence is not None:
                self.profiler.close()
        finally:
            timeline.close()
            if self._presence is not None:
                self._presence.end(error)
            shutdown_distributed(failed=error is not None)

    @property
    def world_size(self) -> int:
        """Returns the number of processes that train."""
        return self.ranks.size


class RunContext(ProcessContext):
    """Holds what surrounds every recipe's loop: besides what every process has, the run's lock,
    logger and clock, and the workers on which the loop's parts are made.

    Enter it once per process; that is collective, and raises ConfigError or RuntimeError where the
    run may not use its directory."""

    def __init__(self, cfg: BaseConfig, *, model_path: str) -> None:
        super().__init__(cfg, model_path=model_path)
        self.trainers = self.rollout = Workers(self)
        self.final_counters: dict[str, float] = {}  # rank 0's, as the run ends; for its summary
        self._logger: StatsLogger | None = None
        self._lock: TextIO | None = None
        self.resumed: Checkpoint | None = None  # what this start continues from

    def __enter__(self) -> RunContext:
        self.join()
        self.ranks.from_zero(self._claim)
        self.appear()
        self.resumed = newest_checkpoint(self.cfg, self.ranks.from_zero, self.find_damage)
        self.start = self.clock() - (self.resumed.info["elapsed_s"] if self.resumed else 0.0)
        if self.ranks.is_zero:
            from_step = self.resumed.step if self.resumed else None
            self._logger = StatsLogger.for_run(self.cfg, from_step=from_step)
        return self

    def find_damage(self, engine: Path) -> str | None:
        """Returns what is wrong with an engine's checkpoint, None where nothing is. Collective."""
        return find_damage(engine)

    def _claim(self) -> None:
        self._lock = claim(self.cfg)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._logger is not None:
                self._logger.close(final=self.final_counters, error=error)
        finally:
            try:
                self.leave(error)
            finally:
                if self._lock is not None:
                    self._lock.close()

    def gathered(self) -> dict[str, float]:
        """Returns what stats_tracker has gathered in all processes since the last call, and the
        memory that was in use. Collective."""
        return stats_tracker.joined(gathered())

    def clock(self) -> float:
        """Returns the seconds of rank 0's monotonic clock, the same on every rank. Collective."""
        return self.ranks.from_zero(time.monotonic)

    def elapsed(self) -> float:
        """Returns the run's seconds, without those between a checkpoint and the start that
        continues from it. Collective."""
        return self.clock() - self.start

    def wishes(self) -> tuple[bool, bool]:
        """Returns whether a signal asks any rank to stop, and whether <run>/SAVE, as rank 0 sees
        it, asks for a checkpoint; the same on every rank. Collective, at the end of a step: signals
        and files reach the ranks at different moments."""
        asked = self.ranks.is_zero and (self.run_dir / SAVE_FILE).is_file()
        signals, files = zip(*self.ranks.gather((stopping.wish(), asked)))
        return max(signals) > 0, any(files)

    def stop(self, saved: Path | None, step: int) -> None:
        """Logs after which step a signal ends the run and where its checkpoint is, and makes the
        signal the run's exit status. Collective."""
        stopping.honour(max(self.ranks.gather(stopping.wish())))
        resumable = f"the same command goes on from {saved}" if saved else "no checkpoint was made"
        log.warning("stopped by a signal after step %d: %s", step, resumable)

    def log_stats(
        self,
        step: int,
        stats: dict[str, float],
        *,
        total_steps: int,
        completions: Mapping[str, Sequence[dict[str, Any]]] = {},
    ) -> None:
        """Logs the metrics of a step and its completions, rank 0's. Collective. Raises DiskFull
        where there is no room for them."""
        if self._presence is not None:
            self._presence.total_steps = total_steps

        def log_step() -> None:
            if self._logger is not None:
                self._logger.log(step, stats, total_steps=total_steps, completions=completions)

        self.ranks.from_zero(log_step)
