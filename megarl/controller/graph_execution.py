"""Executes a dataflow graph on the workers of a controller.

Each copy of a model (graph_plan.py) is a role with an engine of its own on the workers of its mesh;
a call is a request to these. A batch's tokens lie on workers, and a mesh gets the fields that its
call reads from those that have them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from typing import Any

import networkx as nx

from megarl.algos.role import Role
from megarl.api.engine import PARTS
from megarl.api.records import FinetuneSpec
from megarl.api.tokens import IDS
from megarl.controller.batch import RemoteBatch
from megarl.controller.graph_buffer import KeyBuffer
from megarl.controller.graph_plan import Copy, GraphPlan, Task
from megarl.controller.graph_runner import GraphRunner
from megarl.controller.group import WorkerGroup
from megarl.dataflow.call import TRAIN_STEP, Call
from megarl.parallel.groups import init_distributed
from megarl.parallel.worlds import World

WEIGHTS = ("params",)


@dataclass
class StepState:
    """Holds a step under way.

    keys:   the books of the batch's keys.
    stats:  metrics by call.
    worked: when the first worker began and ended each call, in Unix seconds of its clock.
    """

    batch: RemoteBatch
    keys: KeyBuffer
    stats: dict[str, dict[str, float]] = field(default_factory=dict)
    worked: dict[str, tuple[float, float]] = field(default_factory=dict)


class GraphExecution:
    """Runs the steps of a graph on a group of workers, one for each device of the graph's meshes.

    roles:   by model, not initialized: the engine's configuration, but for the strategy, and what
             the calls' verbs are of.
    batches: returns the batch of a step (from 0); of a graph that generates, it is what does so.
    publish: brings a role's weights to the servers, under a version. It is needed where a model
             both generates and is trained.
    args:    further arguments of calls' verbs, by call.
    spec:    gives learning-rate schedules their length.
    keep:    keys that are kept until the end of a step although no call reads them any more.
    ahead:   steps that generation may be ahead of the weights.
    timeout: seconds that one call may take.

    Making one is making its models. Raises ValueError for a graph that the workers or the roles do
    not fit.
    """

    def __init__(
        self,
        graph: nx.DiGraph,
        workers: WorkerGroup,
        roles: Mapping[str, Role],
        *,
        batches: Callable[[int], RemoteBatch],
        publish: Callable[[Any, int], dict[str, float]] | None = None,
        args: Mapping[str, Mapping[str, Any]] | None = None,
        spec: FinetuneSpec | None = None,
        keep: Collection[str] = (),
        ahead: int = 0,
        timeout: float = 3600.0,
    ) -> None:
        self.plan = GraphPlan(graph, ahead=ahead)
        self._check(workers, roles, publish)
        self._workers, self._batches, self._publish = workers, batches, publish
        self._args, self._keep, self._timeout = args or {}, keep, timeout
        self._published = {t.call.name for t in self.plan.tasks if t.kind == "publish" and t.call}
        self._steps: dict[int, StepState] = {}
        self._lock = threading.RLock()  # of handles: several threads call
        self._everywhere: dict[Copy | None, Any] = {}  # the roles with their placeholders
        workers.call(init_distributed)
        for task in self.plan.tasks:  # before threads ask
            self._group(task.ranks)
        self._roles: dict[Copy | None, Any] = {
            copy: self._make(copy, roles[copy.model], spec) for copy in self.plan.copies
        }
        self._runner = GraphRunner(self.plan.tasks, self._do, timeout=timeout)

    def _check(
        self,
        workers: WorkerGroup,
        roles: Mapping[str, Role],
        publish: Callable[[Any, int], dict[str, float]] | None,
    ) -> None:
        for copy in self.plan.copies:
            if missing := sorted(r for r in copy.ranks if r >= len(workers)):
                raise ValueError(f"{copy}: there is no worker {missing[0]}, only {len(workers)}")
            if copy.model not in roles:
                raise ValueError(f"roles has no {copy.model!r}, only {', '.join(roles)}")
        if publish is None and any(task.kind == "publish" for task in self.plan.tasks):
            raise ValueError("the graph generates with a model that it trains: give `publish`")

    def role(self, model: str) -> Any:
        """Returns the Remote of a model's role at its home."""
        return self._roles[self.plan.homes[model]]

    def at_home(self, model: str, fn: Callable[..., Any], *args: Any) -> Any:
        """Returns `fn(role, *args)` of the workers at a model's home."""
        copy = self.plan.homes[model]
        return self._group(copy.ranks).call(fn, self._roles[copy], *args)

    def everywhere(self, fn: Callable[..., Any], *args: Any) -> list[list[Any]]:
        """Returns `fn(role, *args)` of all workers, for each copy; elsewhere than on its mesh the
        role is a placeholder."""
        return [self._workers.each(fn, role, *args) for role in self._everywhere.values()]

    def run(
        self,
        first: int,
        last: int,
        ended: Callable[[int, StepState], None] = lambda step, state: None,
    ) -> None:
        """Runs steps `first` to `last` - 1, and calls `ended(step, state)` after each. Raises
        CallFailed where a call fails; the workers are of no use after that."""

        def over(step: int) -> None:
            ended(step, self._steps.pop(step))

        self._runner.run(first, last, over)

    def destroy(self) -> None:
        """Destroys the roles."""
        for role in self._everywhere.values():
            role.destroy()

    # -- copies

    def _group(self, ranks: frozenset[int]) -> WorkerGroup:
        """Returns the group of some workers, whose calls are made inside their world."""
        return self._workers.on(sorted(ranks)) if ranks else self._workers

    def _make(self, copy: Copy, role: Role, spec: FinetuneSpec | None) -> Any:
        """Returns the Remote of a copy on its mesh. All workers make it, of which others than those
        of the mesh have a placeholder: weights travel between workers that know both ends."""
        group = self._group(copy.ranks)
        empty = self.plan.is_placeholder(copy)
        trained = copy.model in self.plan.trained and not empty
        everywhere = self._workers.call(
            make_copy, role, copy, group.world, spec, trained=trained, empty=empty
        )
        self._everywhere[copy] = everywhere
        if empty or copy.model in self.plan.resting:
            group.call(send_away, everywhere, WEIGHTS if empty else PARTS, keep=not empty)
        return group.call(same, everywhere)

    # -- tasks

    def _do(self, task: Task, step: int) -> None:
        """Does a task, and waits for it. Threads call it, one for each task."""
        if task.kind == "data":
            self._begin(step)
            return
        state, role = self._steps[step], self._roles[task.copy]
        match task.kind:
            case "call":
                self._call(task, role, state, step)
            case "place":
                self._ask(task, place, role, state.batch, fields=(IDS,))
            case "reallocate":
                both = self._everywhere[task.copy], self._everywhere[task.source]
                self._ask(task, bring_weights, *both, self._rests(task))
            case "drop":
                self._ask(task, send_away, role, WEIGHTS, False)
            case "offload":
                self._ask(task, send_away, role, PARTS, True)
            case "onload":
                self._ask(task, Role.onload, role)
            case "publish" if self._publish:
                state.stats[task.name] = self._publish(role, step + 1)

    def _rests(self, task: Task) -> bool:
        return task.source is not None and task.source.model in self.plan.resting

    def _begin(self, step: int) -> None:
        """Takes the step's batch, and drops what nobody will read."""
        batch = self._batches(step)
        keys = KeyBuffer(self.plan.calls, self._keep)
        with self._lock:
            self._drop(batch, keys.put(batch.keys()))
        self._steps[step] = StepState(batch, keys)

    def _call(self, task: Task, role: Any, state: StepState, step: int) -> None:
        """Makes a call of the graph, and drops the keys that it was the last to read."""
        call = task.call
        assert call is not None, f"task {task.name}: a call has a Call"
        state.keys.need(call)
        args = {**call.args, **self._args.get(call.name, {})}
        version = None if call.name in self._published else step + 1
        inputs = (role, call, state.batch, args, version)
        stats, worked = self._ask(task, make_call, *inputs, fields=call.inputs)
        with self._lock:
            gone = state.keys.put([key for key in call.outputs if key in state.batch])
            self._drop(state.batch, gone + state.keys.read_by(call))
            state.stats[call.name], state.worked[call.name] = stats, worked

    @staticmethod
    def _drop(batch: RemoteBatch, keys: Sequence[str]) -> None:
        for key in keys:
            if key in batch:
                batch.pop(key)

    def _ask(
        self, task: Task, fn: Callable[..., Any], *args: Any, fields: Sequence[str] | None = None
    ) -> Any:
        """Returns fn(*args) of the task's workers."""
        group = self._group(task.ranks)
        with self._lock:
            pending = group.submit(fn, args, {}, fields=fields)
        wait([pending.future], self._timeout)  # without the lock: other tasks call meanwhile
        with self._lock:
            return pending.result(timeout=0)


# ---- what runs on the workers --------------------------------------------------------------------


def same(value: Any) -> Any:
    """Returns `value`."""
    return value


def make_copy(
    role: Role,
    copy: Copy,
    world: World,
    spec: FinetuneSpec | None,
    *,
    trained: bool,
    empty: bool,
) -> Role:
    """Returns the role with an engine in the copy's strategy on its mesh: with an optimizer if it
    is trained, and without weights that rest in host memory if it is empty between its calls."""
    old: Any = role.engine
    config = replace(old.config, parallel=copy.where.parallel)
    if not trained:
        config = replace(config, optimizer=None)
    if empty:
        config = replace(config, offload=False)
    role.engine = type(old)(config, seed=old.seed, world=world)
    role.initialize(None, spec if trained else None)
    return role


def place(role: Any, batch: Any) -> None:
    """Gives the batch's rows to the role's workers, on which it will train on them."""
    role.place(batch)


def make_call(
    role: Any, call: Call, batch: Any, args: Mapping[str, Any], version: int | None
) -> tuple[dict[str, float], tuple[float, float]]:
    """Calls the role's verb, and returns the metrics that it answers with, and when it began and
    ended. A train step moves the learning rate on, and the weights get their `version`, if it is
    given."""
    begun = time.time()
    made = getattr(role, call.verb)(batch, **args)
    if call.into:
        batch[call.into] = made
    if call.kind == TRAIN_STEP:
        role.step_lr_scheduler()
        if version is not None:
            role.set_version(version)
    return made if isinstance(made, dict) else {}, (begun, time.time())


def bring_weights(target: Any, source: Any, rests: bool) -> None:
    """Fills a copy without weights from the model's home, which may rest in host memory."""
    for role in (target, source):
        if role.engine.is_member:
            role.onload(WEIGHTS)
    target.engine.copy_weights(source.engine)
    if rests and source.engine.is_member:
        source.offload(WEIGHTS)


def send_away(role: Any, parts: Sequence[str], keep: bool) -> None:
    """Frees the device memory of parts of a copy."""
    role.engine.offload(parts, keep=keep)
