"""Runs a recipe under a single controller (trainer.mode=controller).

This process has the loop, the metrics, the checkpoints' place and the run's lock. Its workers are
the trainers, one for each rank of torchrun, and one process that drives rollouts; all end with it.
What a recipe makes through its context (trainer/context.py) lives there.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from megarl.ckpt.dist import find_damage
from megarl.config.recipe_engines import engines, trainer_processes
from megarl.config.recipes import BaseConfig
from megarl.controller import start
from megarl.controller.group import WorkerGroup, invoke
from megarl.controller.messages import STOP
from megarl.engine import MegatronEngine
from megarl.observability import stats_tracker
from megarl.observability.timeline import Profiler
from megarl.parallel.ranks import Ranks
from megarl.rpc.group import Scheduler
from megarl.trainer.context import TRAINER, ProcessContext, RunContext, Workers
from megarl.trainer.rollout_metrics import gathered
from megarl.utils import stopping
from megarl.utils.importing import load_object

T = TypeVar("T")
P = ParamSpec("P")

CONTROLLER, DRIVER = "controller", "driver"  # kinds of processes, beside trainers
MAKE_SCHEDULER = "megarl.launcher.workers:make_scheduler"  # a row above this one
LEAVE_TIMEOUT = 5.0  # seconds in which workers of a run that failed say so
LISTEN = 0.5  # seconds between looks for a wish to stop


class RemoteWorkers(Workers):
    """Makes the parts of a run on the workers of a group."""

    def __init__(self, group: WorkerGroup, cfg: BaseConfig, model_path: str) -> None:
        """Has every worker join the group's process group."""
        self.group = group
        super().__init__(self.make(ProcessContext, cfg, model_path=model_path))
        self.ctx.join()

    def make(self, fn: Callable[P, T], /, *args: P.args, **kw: P.kwargs) -> T:
        """Returns a Remote of what `fn(*args, **kw)` makes on every worker."""
        remote: T = self.group.submit(fn, args, kw, keep=True).result()
        return remote

    def leave(self, error: BaseException | None) -> None:
        """Has the workers end what they have begun; those of a run that failed may not answer."""
        if error is None:
            self.ctx.leave(None)
            return
        with contextlib.suppress(RuntimeError, TimeoutError):
            said = RuntimeError(f"the run failed: {type(error).__name__}")
            self.ctx.later.leave(said).result(LEAVE_TIMEOUT)

    def run(self, fn: Callable[P, T], /, *args: P.args, **kw: P.kwargs) -> T:
        """Returns the first worker's `fn(*args, **kw)`; all run it."""
        return self.group.call(fn, *args, **kw)


class ControllerContext(RunContext):
    """Holds what surrounds the loop in the controller, and its workers."""

    trainers: RemoteWorkers
    rollout: RemoteWorkers

    def __init__(self, cfg: BaseConfig, *, model_path: str) -> None:
        super().__init__(cfg, model_path=model_path)
        self._scheduler: Scheduler | None = None
        self._begun: list[RemoteWorkers] = []
        self._over = threading.Event()

    def __enter__(self) -> RunContext:
        try:
            return super().__enter__()
        except BaseException as e:
            self.leave(e)
            raise

    def join(self) -> None:
        """Joins no process group: this process computes nothing."""
        self.ranks = Ranks.of()

    def appear(self, kind: str = CONTROLLER, *, first: int = 0, count: int = 0) -> None:
        """Starts the workers, and has all processes be seen."""
        scheduler: Scheduler = load_object(MAKE_SCHEDULER, what="scheduler")(self.cfg)
        self._scheduler = scheduler
        engine = MegatronEngine(next(iter(engines(self.cfg).values())))
        self.trainers = self._workers(start.trainers(self.cfg, scheduler, engine))
        self.rollout = self._workers(start.driver(self.cfg, scheduler))
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # they have the GPUs
        n = self.world_size
        self.trainers.ctx.appear(TRAINER, first=1, count=n + 2)
        self.rollout.ctx.appear(DRIVER, first=n + 1, count=n + 2)
        super().appear(kind, count=n + 2)
        if self.cfg.profiler.get("start_step"):
            self.profiler = ProfiledWorkers(self.trainers, self.cfg.profiler.get("phases", ()))
            stats_tracker.watch(self.profiler.phase)
        threading.Thread(target=self._pass_on_signals, name="megarl-signals", daemon=True).start()

    def part(self, ranks: Sequence[int]) -> RemoteWorkers:
        """Returns those of the trainers, in a world of their own."""
        return RemoteWorkers(self.trainers.group.on(ranks), self.cfg, self.model_path)

    def _workers(self, group: WorkerGroup) -> RemoteWorkers:
        workers = RemoteWorkers(group, self.cfg, self.model_path)
        self._begun.append(workers)
        return workers

    def _pass_on_signals(self) -> None:
        """Tells the driver, which may wait for answers, of a signal that came here."""
        while not self._over.wait(LISTEN):
            if number := stopping.wish():
                for client in self.rollout.group.clients:
                    client.call_async(STOP, number)
                return

    @property
    def world_size(self) -> int:
        """Returns the number of trainers."""
        return trainer_processes(self.cfg)

    def find_damage(self, engine: Path) -> str | None:
        """Returns what is wrong with an engine's checkpoint, which the trainers read."""
        return self.trainers.run(find_damage, engine)

    def gathered(self) -> dict[str, float]:
        """Returns what stats_tracker has gathered here and on all workers."""
        asked = [w.group.submit(gathered, (), {}) for w in (self.trainers, self.rollout)]
        return stats_tracker.joined(*(a.result() for a in asked), stats_tracker.take())

    def leave(self, error: BaseException | None) -> None:
        """Ends the workers, and what `appear` began here."""
        self._over.set()
        try:
            for workers in self._begun:
                workers.leave(error)
        finally:
            if self._scheduler is not None:
                self._scheduler.close()
            super().leave(error)


class ProfiledWorkers(Profiler):
    """Has the trainers' own profilers trace the steps, and the phases of the loop here, that the
    configuration names."""

    def __init__(self, trainers: RemoteWorkers, phases: Sequence[str]) -> None:
        self._trainers, self._phases = trainers, phases
        self._theirs: Any = trainers.ctx.profiler

    @contextmanager
    def step(self, n: int) -> Iterator[None]:
        """Has the trainers trace step n, if it is wanted."""
        with self._inside(self._theirs.step(n)):
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Has the trainers trace a phase by itself, where the configuration names it."""
        if name not in self._phases:
            yield
            return
        with self._inside(self._theirs.phase(name)):
            yield

    def close(self) -> None:
        """Does nothing: the trainers close theirs."""

    @contextmanager
    def _inside(self, of_theirs: AbstractContextManager[None]) -> Iterator[None]:
        self._trainers.run(invoke, of_theirs, "__enter__")
        try:
            yield
        finally:
            self._trainers.run(invoke, of_theirs, "__exit__", None, None, None)
