"""Simulates steps of a placed graph: which call runs when, on which devices.

The order is the executor's. All tasks of all steps stand in one order; a task starts when those it
waits for have ended and no earlier task that shares a device with it is under way. Devices are the
resource, seconds come from the caller's costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import networkx as nx

from megarl.dataflow.call import COMPUTE, Call
from megarl.dataflow.graph import across_steps, calls_of, home_calls
from megarl.dataflow.mesh import Allocation, Mesh

AHEAD = 2  # steps that may be under way at the same time
RUN, MOVE = "run", "reallocate"
Places = Mapping[str, Allocation]  # by call or by model


class Costs(Protocol):
    """Gives the seconds and the bytes of calls."""

    capacity: int  # bytes of a device that models may use

    def run(self, call: Call, where: Allocation, room: int) -> float:
        """Returns the seconds of the call itself. room: bytes per device that nothing else uses."""

    def reallocate(self, model: str, source: Allocation, target: Allocation) -> float:
        """Returns the seconds in which `target` gets a copy of the weights that `source` has."""

    def onload(self, call: Call, where: Allocation) -> float:
        """Returns the seconds in which the call's model comes back from host memory."""

    def fetch(self, keys: Sequence[str], source: Allocation, target: Allocation) -> float:
        """Returns the seconds in which the values of `keys` come from one mesh to another."""

    def held(self, call: Call, where: Allocation) -> Sequence[int]:
        """Returns the bytes that the call's model takes on a device of each pipeline stage."""

    def working(self, call: Call, where: Allocation) -> Sequence[int]:
        """Returns the bytes that a device of each pipeline stage needs besides for the call."""


@dataclass(frozen=True)
class Span:
    """Says that a call of step `step` (from 0) takes `meshes` from `start` to `end`, in seconds.
    `what` is RUN, whose first `hooks` seconds bring data and weights, or MOVE, which is the
    reallocation of weights before the call."""

    step: int
    call: Call
    what: str
    meshes: tuple[Mesh, ...]
    start: float
    end: float
    hooks: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """Holds the spans of some steps in their order, and the bytes on the fullest device of each
    call's mesh while it runs."""

    spans: tuple[Span, ...]
    nbytes: Mapping[str, int]

    def first(self, steps: int) -> Timeline:
        """Returns the first `steps` steps of the timeline."""
        return replace(self, spans=tuple(span for span in self.spans if span.step < steps))

    @property
    def seconds(self) -> float:
        """Returns the seconds of a step: the first step's where there is one, else the mean time by
        which each further step ends later."""
        ends: dict[int, float] = {}
        for span in self.spans:
            ends[span.step] = max(ends.get(span.step, 0.0), span.end)
        last = max(ends)
        return (ends[last] - ends[0]) / last if last else ends[0]


@dataclass(frozen=True)
class _Task:
    """Holds what a step does for one call: seconds of the reallocation before it, which takes the
    `moves` meshes, of the hooks, and of the call."""

    call: Call
    mesh: Mesh
    moves: tuple[Mesh, ...]
    moving: float
    hooks: float
    running: float


class Simulator:
    """Simulates a graph under different allocations."""

    def __init__(self, graph: nx.DiGraph, costs: Costs) -> None:
        self.calls, self.costs = calls_of(graph), costs
        self._resting = {call.model for call in self.calls if call.offload}
        self._needs: dict[str, list[tuple[str, tuple[str, ...]]]] = {
            name: [(a, graph.edges[a, name]["keys"]) for a in graph.predecessors(name)]
            for name in graph
        }
        self._before: dict[str, list[str]] = {name: [] for name in graph}
        for a, b in across_steps(graph):
            self._before[b].append(a)

    def run(self, where: Places, steps: int = 3) -> Timeline:
        """Returns the timeline of `steps` steps with each call where `where` says; a call that is
        left out runs at its model's home. Raises ValueError for one that has none."""
        makers = home_calls(self.calls, where)
        home = {model: where[call.name] for model, call in makers.items()}
        places = dict(where)
        for call in self.calls:
            if call.model not in home:
                raise ValueError(f"call {call.name!r} has no mesh: say where it runs")
            places.setdefault(call.name, home[call.model])
        nbytes = self._memory(places, home, makers)
        tasks = [self._task(call, places, home, nbytes[call.name]) for call in self.calls]
        return Timeline(tuple(self._simulate(tasks, steps)), nbytes)

    def _memory(self, places: Places, home: Places, makers: Mapping[str, Call]) -> dict[str, int]:
        """Returns the bytes on the fullest device of each call's mesh while it runs: of the models
        at home there that do not rest in host memory, of the call, and of the copy it brings."""
        always: dict[int, int] = {}
        for model, call in makers.items():
            if model not in self._resting:
                _add(always, home[model], self.costs.held(call, home[model]))
        nbytes = {}
        for call in self.calls:
            there, place = dict[int, int](), places[call.name]
            _add(there, place, self.costs.working(call, place))
            rests = call.model in self._resting and call.kind != COMPUTE
            if rests or self._away(call, place, home):
                _add(there, place, self.costs.held(call, place))
            nbytes[call.name] = max(n + always.get(device, 0) for device, n in there.items())
        return nbytes

    @staticmethod
    def _away(call: Call, place: Allocation, home: Places) -> bool:
        """Returns whether the call gets a copy of its model's weights."""
        return call.kind != COMPUTE and place != home[call.model]

    def _task(self, call: Call, places: Places, home: Places, nbytes: int) -> _Task:
        costs, place = self.costs, places[call.name]
        hooks = sum(
            costs.fetch(keys, places[a], place)
            for a, keys in self._needs[call.name]
            if keys and places[a] != place
        )
        moving = 0.0
        if call.model in self._resting and call.kind != COMPUTE:
            hooks += costs.onload(call, place)
        elif self._away(call, place, home):
            moving = costs.reallocate(call.model, home[call.model], place)
        running = costs.run(call, place, costs.capacity - nbytes)
        moves = (home[call.model].mesh, place.mesh)
        return _Task(call, place.mesh, moves, moving, hooks, running)

    def _simulate(self, tasks: Sequence[_Task], steps: int) -> list[Span]:
        busy: dict[int, float] = {}  # until when each device is
        spans: list[Span] = []
        ended: dict[tuple[int, str], float] = {}
        over = [0.0] * AHEAD  # when each step and all before it have ended

        def take(meshes: tuple[Mesh, ...], after: float, seconds: float) -> tuple[float, float]:
            devices = [device for mesh in meshes for device in mesh.devices]
            start = max([after, *(busy.get(device, 0.0) for device in devices)])
            busy.update(dict.fromkeys(devices, start + seconds))
            return start, start + seconds

        for step in range(steps):
            last = over[-1]
            for task in tasks:
                name = task.call.name
                waits = [ended[step, a] for a, _ in self._needs[name]]
                waits += [ended[step - 1, a] for a in self._before[name] if step]
                after = max([over[-AHEAD], *waits])
                if task.moving:
                    start, after = take(task.moves, after, task.moving)
                    spans.append(Span(step, task.call, MOVE, task.moves, start, after))
                start, end = take((task.mesh,), after, task.hooks + task.running)
                spans.append(Span(step, task.call, RUN, (task.mesh,), start, end, task.hooks))
                ended[step, name] = end
                last = max(last, end)
            over.append(last)
        return spans


def _add(total: dict[int, int], place: Allocation, stages: Sequence[int]) -> None:
    """Adds the bytes of each pipeline stage to those of its devices."""
    size = place.mesh.count // len(stages)  # stages are runs of devices: pp is the outermost
    for i, device in enumerate(place.mesh.devices):
        total[device] = total.get(device, 0) + stages[i // size]
