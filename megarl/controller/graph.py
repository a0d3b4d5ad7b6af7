"""Runs the step of a dataflow graph on the workers of a controller.

A *copy* is a role and its engine: one model in one parallel strategy on one mesh. The copy at the
model's home (where it is trained, else where its first call runs) keeps the weights on its devices,
or in host memory between the calls of an offloaded model. Every other copy is a placeholder: a hook
brings it the newest weights before a call, and another hook removes them after it.

A step is a list of tasks: calls, and the hooks around them. A task starts when the tasks that it
needs are over and no earlier task has yet to end on one of its ranks. So every rank sees its tasks
in the one order, whatever ends first elsewhere, and collectives of overlapping meshes cannot cross.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import itemgetter
from typing import Any

import networkx as nx

from megarl.algos.roles import Role
from megarl.api.engine import PARTS
from megarl.api.records import FinetuneSpec
from megarl.api.tokens import IDS
from megarl.controller.batch import RemoteBatch
from megarl.controller.group import Pending, WorkerGroup, same
from megarl.dataflow.graph import COMPUTE, GENERATE, TRAIN_STEP, Call, calls_of, homes
from megarl.dataflow.mesh import Allocation
from megarl.observability.timeline import CALLS, timeline
from megarl.parallel.worlds import World, init_distributed
from megarl.utils.http import in_thread

WEIGHTS = ("params",)


class CallFailed(RuntimeError):
    """Says which call of a graph failed, in which step and on which ranks. The error itself, with
    the worker's traceback, is its cause."""


@dataclass(frozen=True)
class Copy:
    """Is one model in one parallel strategy on one mesh."""

    model: str
    where: Allocation

    def __str__(self) -> str:
        return f"{self.model} on {self.where}"


@dataclass(frozen=True)
class Task:
    """Describes one request of a step.

    name:   is unique in the step, e.g. "train_critic" or "ref: onload".
    copies: it works on these; of two, the first gets the weights of the second.
    needs:  names the earlier tasks that have to be over.
    do:     is called on the ranks, with the copies' roles and `args`; None for the publication of
            the weights, which the controller makes.
    call:   is the call that it makes, None for a hook.
    """

    name: str
    copies: tuple[Copy, ...]
    needs: frozenset[str] = frozenset()
    do: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    call: Call | None = None

    @cached_property
    def ranks(self) -> frozenset[int]:
        """Returns the ranks of the job that work on it, and on nothing else meanwhile."""
        return frozenset(rank for copy in self.copies for rank in copy.where.mesh.devices)


class GraphPlan:
    """Plans a step: `tasks` in the one order, and the `copies` that they work on. It is pure.

    calls:     those of the graph, in the order in which they run.
    generates: the call that makes the step's batch, None where the data set brings it.
    homes:     the copy of each model that has the weights.
    trained:   the call that trains each model which is trained.
    resting:   the models that are offloaded between their calls, as one of these asks.

    Raises ValueError for a model without a place, and for two calls that generate.
    """

    def __init__(self, graph: nx.DiGraph) -> None:
        self.calls = calls_of(graph)
        self.homes = {model: Copy(model, where) for model, where in homes(graph).items()}
        self.trained = {c.model: c for c in self.calls if c.kind == TRAIN_STEP}
        generating = [call for call in self.calls if call.kind == GENERATE]
        self.generates = generating[0] if generating else None
        on_devices = [call for call in self.calls if call.kind != GENERATE]
        if lost := [call for call in on_devices if call.model not in self.homes]:
            why = f"call {lost[0].name!r} has no mesh, nor has another call of {lost[0].model!r}"
            raise ValueError(f"{why}: give one of them its mesh and strategy (`where`)")
        if len(generating) > 1:
            names = ", ".join(call.name for call in generating)
            raise ValueError(f"{names} generate: a step has one batch, which one call generates")
        self.resting = {call.model for call in on_devices if call.offload}
        self.copies = list(dict.fromkeys([*self.homes.values(), *map(self.copy_of, on_devices)]))
        # copies whose weights are on their devices
        self._ready = {c for c in self.homes.values() if c.model not in self.resting}
        self.tasks: list[Task] = []
        first = self._place()
        for i, call in enumerate(on_devices):
            before = frozenset(graph.predecessors(call.name)) - {c.name for c in generating}
            self._add(call, first | before, on_devices[i + 1 :])

    def copy_of(self, call: Call) -> Copy:
        """Returns the copy that a call works on. A call that only computes is at home."""
        if call.where is None or call.kind == COMPUTE:
            return self.homes[call.model]
        return Copy(call.model, call.where)

    def is_placeholder(self, copy: Copy) -> bool:
        """Returns whether the copy keeps no weights, as it is not at its model's home."""
        return copy != self.homes[copy.model]

    def publishes(self, call: Call) -> bool:
        """Returns whether servers get the weights that a call has trained."""
        generates = self.generates is not None and self.generates.model == call.model
        return generates and call.kind == TRAIN_STEP

    def _place(self) -> frozenset[str]:
        """Has the model that wrote the batch place it first, as in a step without a graph. Returns
        what all other tasks need."""
        call = self.generates
        if call is None or call.model not in self.homes:
            return frozenset()
        place = Call(f"{call.name}: place", call.model, COMPUTE, (IDS,), verb="place")
        return self._put(Task(place.name, (self.homes[call.model],), do=make_call, call=place))

    def _add(self, call: Call, needs: frozenset[str], later: Sequence[Call]) -> None:
        """Adds a call between its hooks."""
        copy, rests = self.copy_of(call), call.model in self.resting
        away, computes = self.is_placeholder(copy), call.kind == COMPUTE
        if not computes and copy not in self._ready:
            self._ready.add(copy)
            needs |= self._put(self._fill(call, copy, needs))
        over = self._put(Task(call.name, (copy,), needs, make_call, call=call))
        if self.publishes(call):
            self._put(Task(f"{call.name}: publish", (copy,), over))
        if (away or (rests and not computes)) and not self._called_again(copy, later):
            self._ready.discard(copy)
            hook, *parts = ("drop", WEIGHTS, False) if away else ("offload", PARTS, True)
            self._put(Task(f"{call.name}: {hook}", (copy,), over, send_away, tuple(parts)))

    def _fill(self, call: Call, copy: Copy, needs: frozenset[str]) -> Task:
        """Returns the hook that gives a copy its weights before a call."""
        if not self.is_placeholder(copy):
            return Task(f"{call.name}: onload", (copy,), needs, Role.onload)
        both, rests = (copy, self.homes[call.model]), call.model in self.resting
        return Task(f"{call.name}: reallocate", both, needs, bring_weights, (rests,))

    def _put(self, task: Task) -> frozenset[str]:
        """Adds a task and returns its name."""
        self.tasks.append(task)
        return frozenset({task.name})

    def _called_again(self, copy: Copy, later: Sequence[Call]) -> bool:
        """Returns whether the copy is called again before its model's weights change."""
        for call in later:
            if call.kind != COMPUTE and self.copy_of(call) == copy:
                return True
            if call.model == copy.model and call.kind == TRAIN_STEP:
                return False
        return False


def run_tasks(
    tasks: Sequence[Task],
    start: Callable[[Task], Pending],
    end: Callable[[Task, Any], None],
    *,
    step: int,
    timeout: float,
) -> None:
    """Runs the tasks of step `step` (from 0): side by side on different ranks, in their order on
    the same. `end(task, result)` is called after each. `start` must not wait for tasks that run, as
    no other task starts and no timeout counts meanwhile.

    Raises CallFailed for the first task that fails or takes longer than `timeout` s. Then nothing
    new starts, and what still runs is not waited for: end the workers.
    """

    def failed(task: Task, why: object) -> CallFailed:
        where = f"call {task.name!r} of step {step + 1}, on {task.copies[0]}"
        return CallFailed(f"{where}, failed: {why}")

    waiting, over = list(tasks), set[str]()
    running: dict[Future[Any], tuple[Task, Pending, float]] = {}
    while waiting or running:
        taken = {rank for task, _, _ in running.values() for rank in task.ranks}
        for task in list(waiting):
            if task.needs <= over and not taken & task.ranks:
                waiting.remove(task)
                try:
                    pending = start(task)
                except Exception as e:
                    raise failed(task, e) from e
                pending.future.add_done_callback(partial(_record, task, step, time.time()))
                running[pending.future] = task, pending, time.monotonic() + timeout
            taken |= task.ranks
        assert running, f"nothing can start of {', '.join(task.name for task in waiting)}"
        task, _, limit = min(running.values(), key=itemgetter(2))
        done, _ = wait(running, max(0.0, limit - time.monotonic()), FIRST_COMPLETED)
        if not done:
            raise failed(task, f"it did not end within {timeout:g} s")
        for future in done:
            task, pending, _ = running.pop(future)
            try:
                end(task, pending.result())
            except Exception as e:
                raise failed(task, str(e) or type(e).__name__) from e
            over.add(task.name)


def _record(task: Task, step: int, begun: float, future: Future[Any]) -> None:
    mesh = str(task.copies[0].where.mesh)
    timeline.record(CALLS, task.name, begun, time.time() - begun, mesh=mesh, step=step + 1)


@dataclass
class StepState:
    """Holds a step under way.

    stats:  metrics by call.
    worked: when the first worker began and ended each call, in Unix seconds of its clock.
    """

    batch: RemoteBatch
    stats: dict[str, dict[str, float]] = field(default_factory=dict)
    worked: dict[str, tuple[float, float]] = field(default_factory=dict)


class GraphExecution:
    """Runs the steps of a graph on a group of workers, one for each device of the graph's meshes.
    A batch's tokens lie on workers. A mesh fetches the fields that its call reads from the workers
    that hold them.

    roles:   the role of each model, not initialized. It has the engine's configuration without the
             strategy, and the methods that the calls name.
    batches: returns the batch of a step (from 0). In a graph that generates, this call generates.
    publish: brings a role's weights to the servers, under a version. It is needed where a model
             both generates and is trained.
    spec:    gives learning-rate schedules their length.
    timeout: seconds that one call may take.

    The constructor makes the models: `roles` has a Remote of each copy on all workers; on workers
    outside of its mesh the role is a placeholder. Raises ValueError for a graph that the workers or
    the roles do not fit.
    """

    def __init__(
        self,
        graph: nx.DiGraph,
        workers: WorkerGroup,
        roles: Mapping[str, Role],
        *,
        batches: Callable[[int], RemoteBatch],
        publish: Callable[[Any, int], dict[str, float]] | None = None,
        spec: FinetuneSpec | None = None,
        timeout: float = 3600.0,
    ) -> None:
        self.plan = GraphPlan(graph)
        self._check(workers, roles, publish)
        self._workers, self._batches, self._publish = workers, batches, publish
        self._timeout = timeout
        workers.call(init_distributed)
        for task in self.plan.tasks:  # here, as the making of a world waits for all workers
            self._group(task.ranks)
        self.roles = {copy: self._make(copy, roles[copy.model], spec) for copy in self.plan.copies}
        self._at_home = {
            model: self._group(copy.where.mesh.devices).call(same, self.roles[copy])
            for model, copy in self.plan.homes.items()
        }

    def _check(
        self,
        workers: WorkerGroup,
        roles: Mapping[str, Role],
        publish: Callable[[Any, int], dict[str, float]] | None,
    ) -> None:
        for copy in self.plan.copies:
            if missing := [r for r in copy.where.mesh.devices if r >= len(workers)]:
                raise ValueError(f"{copy}: there is no worker {missing[0]}, only {len(workers)}")
            if copy.model not in roles:
                raise ValueError(f"roles has no {copy.model!r}, only {', '.join(roles)}")
        if publish is None and any(task.do is None for task in self.plan.tasks):
            raise ValueError("the graph generates with a model that it trains: give `publish`")

    def _group(self, ranks: Collection[int]) -> WorkerGroup:
        """Returns the group of some workers, whose calls are made inside their world."""
        return self._workers.on(sorted(ranks))

    def _make(self, copy: Copy, role: Role, spec: FinetuneSpec | None) -> Any:
        """Returns the Remote of a copy. All workers make it: weights travel between workers that
        know both ends."""
        group = self._group(copy.where.mesh.devices)
        empty = self.plan.is_placeholder(copy)
        trained = copy.model in self.plan.trained and not empty
        remote = self._workers.call(
            make_copy, role, copy, group.world, spec, trained=trained, empty=empty
        )
        if empty or copy.model in self.plan.resting:
            group.call(send_away, remote, WEIGHTS if empty else PARTS, not empty)
        return remote

    def role(self, model: str) -> Any:
        """Returns the Remote of a model's role at its home."""
        return self._at_home[model]

    def step(self, step: int) -> StepState:
        """Makes step `step` (from 0). Raises CallFailed where a call fails; the workers are of no
        use after that. An error of `batches` is raised as it is."""
        call = self.plan.generates
        with timeline.span(CALLS, call.name if call else "data") as about:
            about |= {"mesh": "servers", "step": step + 1}
            state = StepState(self._batches(step))
        start, end = partial(self._start, state, step), partial(self._end, state)
        run_tasks(self.plan.tasks, start, end, step=step, timeout=self._timeout)
        return state

    def _start(self, state: StepState, step: int, task: Task) -> Pending:
        if task.do is None:
            assert self._publish is not None, "_check has seen to it"
            role = self.role(task.copies[0].model)
            published = in_thread(self._publish, role, step + 1)
            return Pending("publish", (), [published], itemgetter(0))
        roles, group = [self.roles[copy] for copy in task.copies], self._group(task.ranks)
        if task.call is None:
            return group.submit(task.do, (*roles, *task.args), {})
        call = task.call
        if missing := [key for key in call.inputs if key not in state.batch]:
            there = ", ".join(sorted(state.batch))
            raise ValueError(f"it reads {missing[0]!r}, and the step's batch has only {there}")
        version = None if self.plan.publishes(call) else step + 1  # which publish sets
        return group.submit(task.do, (*roles, call, state.batch, version), {}, fields=call.inputs)

    def _end(self, state: StepState, task: Task, result: Any) -> None:
        if task.do is None:
            state.stats[task.name] = result
        elif task.call is not None:
            state.stats[task.name], state.worked[task.name] = result

    def destroy(self) -> None:
        """Destroys the roles."""
        for role in self.roles.values():
            role.destroy()


# ---- what runs on the workers --------------------------------------------------------------------


def make_copy(
    role: Role, copy: Copy, world: World, spec: FinetuneSpec | None, *, trained: bool, empty: bool
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


def make_call(
    role: Any, call: Call, batch: Any, version: int | None
) -> tuple[dict[str, float], tuple[float, float]]:
    """Calls the role's verb, and returns the metrics that it answers with, and when it began and
    ended. A train step moves the learning rate on, and the weights get their `version`, if it is
    given."""
    begun = time.time()
    result = getattr(role, call.verb)(batch, **call.args)
    if call.into:
        batch[call.into] = result
    if call.kind == TRAIN_STEP:
        role.step_lr_scheduler()
        if version is not None:
            role.set_version(version)
    return result if isinstance(result, dict) else {}, (begun, time.time())


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
