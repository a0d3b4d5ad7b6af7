"""Runs the tasks of a dataflow graph: side by side on different ranks, in one order on the same.

All tasks of all steps stand in one order (`GraphPlan.tasks`, step after step). A task starts when
those that it needs are over, and no earlier task that is not over shares a rank with it. So every
rank sees its tasks in the one order, whatever ends first elsewhere, and collectives of overlapping
meshes cannot cross.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from megarl.controller.graph_plan import Task
from megarl.observability.timeline import CALLS, timeline

AHEAD = 2  # steps that may be under way at the same time
Key = tuple[int, int]  # (step, place of the task in the order of its step)
Ended = tuple[Key, BaseException | None]
Results = queue.SimpleQueue[Ended]


class CallFailed(RuntimeError):
    """Says which call of a graph failed, in which step and on which ranks. The error itself, with
    the worker's traceback, is its cause."""


class GraphRunner:
    """Runs the tasks of a graph, each in a thread. The thread of `run` alone decides what starts.

    tasks:   those of a step, in the one order; a task needs only earlier ones.
    perform: does a task in a step (from 0), and returns when all of its ranks are done.
    timeout: seconds that one task may take.

    Raises ValueError for a task that needs one that does not come before it.
    """

    def __init__(
        self, tasks: Sequence[Task], perform: Callable[[Task, int], None], *, timeout: float
    ) -> None:
        self.tasks, self.timeout = list(tasks), timeout
        self._perform = perform
        self._place = {task.name: i for i, task in enumerate(self.tasks)}
        for i, task in enumerate(self.tasks):
            if late := sorted(n for n in task.needs if self._place.get(n, i) >= i):
                raise ValueError(f"task {task.name!r} needs {late[0]!r}, which is no earlier task")

    def run(self, first: int, last: int, ended: Callable[[int], None] = lambda step: None) -> None:
        """Runs steps `first` to `last` - 1, and calls `ended(step)` when all tasks of a step are
        over. Tasks of the next step may have begun by then.

        Raises CallFailed for the first task that fails or takes longer than `timeout`. Then nothing
        new starts, and what still runs is not waited for: end the workers.
        """
        over: set[Key] = set()
        running: dict[Key, float] = {}
        results: Results = queue.SimpleQueue()
        for step in range(first, last):
            window = range(step, min(step + AHEAD, last))
            while any((step, i) not in over for i in range(len(self.tasks))):
                for key in self._ready(window, over, running):
                    running[key] = time.monotonic()
                    self._start(key, results)
                key, error = self._next(results, running)
                del running[key]
                if error is not None:
                    raise self._failure(key, str(error) or type(error).__name__) from error
                over.add(key)
            ended(step)

    def _ready(self, steps: range, over: set[Key], running: Mapping[Key, float]) -> list[Key]:
        """Returns the tasks that may start now, in the one order."""
        ready: list[Key] = []
        taken: set[int] = set()  # ranks on which an earlier task has yet to end
        for key in ((step, i) for step in steps for i in range(len(self.tasks))):
            if key in over:
                continue
            ranks = self.tasks[key[1]].ranks
            if key not in running and not taken & ranks and self._needs(key, steps.start) <= over:
                ready.append(key)
            taken |= ranks
        return ready

    def _needs(self, key: Key, since: int) -> set[Key]:
        """Returns the tasks, of step `since` or later, that have to be over before this one."""
        step, task = key[0], self.tasks[key[1]]
        needs = {(step, self._place[name]) for name in task.needs}
        needs |= {(step - back, self._place[name]) for name, back in task.earlier.items()}
        return {need for need in needs if need[0] >= since}

    def _start(self, key: Key, results: Results) -> None:
        step, task = key[0], self.tasks[key[1]]
        where = str(task.copy.where.mesh) if task.copy else "servers"

        def work() -> None:
            error: BaseException | None = None
            try:
                with timeline.span(CALLS, task.name) as about:
                    about |= {"mesh": where, "step": step + 1}
                    self._perform(task, step)
            except BaseException as e:
                error = e
            results.put((key, error))

        # a daemon, so that a task that hangs does not keep the controller from its end
        threading.Thread(target=work, name=f"call {task.name}", daemon=True).start()

    def _next(
        self,
        results: queue.SimpleQueue[tuple[Key, BaseException | None]],
        running: dict[Key, float],
    ) -> tuple[Key, BaseException | None]:
        """Returns the next task that ends. Raises CallFailed for one that takes too long."""
        oldest = min(running, key=running.__getitem__)
        left = running[oldest] + self.timeout - time.monotonic()
        try:
            return results.get(timeout=max(0.0, left))
        except queue.Empty:
            raise self._failure(oldest, f"it did not end within {self.timeout:g} s") from None

    def _failure(self, key: Key, why: str) -> CallFailed:
        task = self.tasks[key[1]]
        where = f"on {task.copy}" if task.copy else "by the servers"
        return CallFailed(f"call {task.name!r} of step {key[0] + 1}, {where}, failed: {why}")
