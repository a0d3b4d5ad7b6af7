"""Plans what a dataflow graph asks of its devices in a step: calls, and the hooks around them.

A *copy* is one model in one parallel strategy on one mesh. That at the model's home (where it is
trained, else where its first call runs) has the weights, on the devices or, between the calls of a
model that is offloaded, in host memory. Every other copy is a placeholder: a hook brings it the
newest weights before a call, and another takes them away again. All of it is pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import networkx as nx

from megarl.dataflow.call import COMPUTE, GENERATE, TRAIN_STEP, Call
from megarl.dataflow.graph import calls_of, homes
from megarl.dataflow.mesh import Allocation

Kind = Literal["call", "data", "place", "reallocate", "drop", "onload", "offload", "publish"]
DATA = "data"  # the task that brings the batch of a graph that generates none


@dataclass(frozen=True)
class Copy:
    """Is one model in one parallel strategy on one mesh."""

    model: str
    where: Allocation

    @cached_property
    def ranks(self) -> frozenset[int]:
        """Returns the ranks of the job that the mesh has."""
        return frozenset(self.where.mesh.devices)

    def __str__(self) -> str:
        return f"{self.model} on {self.where}"


@dataclass(frozen=True)
class Task:
    """Describes one request of a step.

    name:    is unique in the step, e.g. "train_critic" or "ref: onload".
    kind:    "call" is a call of a model, "data" brings the step's batch, the others are hooks.
    needs:   names the tasks of the same step that have to be over.
    earlier: names tasks that have to be over in the step so many steps before, if there was one.
    call:    is the graph's call that it is or belongs to; None only where the graph generates
             nothing and its batch comes from the data set.
    copy:    is the copy that it works on, None for the batch; source: where weights come from.
    ranks:   are those that work on it, and on nothing else meanwhile.
    """

    name: str
    kind: Kind
    needs: frozenset[str] = frozenset()
    earlier: Mapping[str, int] = field(default_factory=dict)
    call: Call | None = None
    copy: Copy | None = None
    source: Copy | None = None

    @cached_property
    def ranks(self) -> frozenset[int]:
        """Returns the ranks of both copies."""
        return frozenset[int]().union(*(c.ranks for c in (self.copy, self.source) if c))


class GraphPlan:
    """Holds the tasks of a step in the one order, and the copies that they work on.

    trained: the call that trains each model which is trained.
    ahead: steps that generation may be ahead of the weights (rollout.max_head_offpolicyness).

    Raises ValueError for a model without a place, and for two calls that generate.
    """

    def __init__(self, graph: nx.DiGraph, *, ahead: int = 0) -> None:
        self.calls = calls_of(graph)
        self.homes = {model: Copy(model, where) for model, where in homes(graph).items()}
        self.trained = {c.model: c for c in self.calls if c.kind == TRAIN_STEP}
        self._generated = {c.model for c in self.calls if c.kind == GENERATE}
        self._on_devices = [c for c in self.calls if c.kind != GENERATE]
        for call in self._on_devices:
            if call.where is None and call.model not in self.homes:
                raise ValueError(
                    f"call {call.name!r} has no mesh, nor has another call of {call.model!r}: give "
                    "one of them its mesh and strategy (`where`)"
                )
        if len(self._generated) > 1:
            raise ValueError(
                f"{', '.join(sorted(self._generated))} generate: a step has one batch, which one "
                "call generates"
            )
        # copies whose weights are on their devices
        self._ready = {c for c in self.homes.values() if c.model not in self.resting}
        self.tasks: list[Task] = []
        there = self._bring_batch(ahead)
        for i, call in enumerate(self.calls):
            if call.kind != GENERATE:
                needs = frozenset(graph.predecessors(call.name)) | {there}
                self._add(call, needs, self.calls[i + 1 :])

    @cached_property
    def resting(self) -> set[str]:
        """Returns the models that are offloaded between their calls, as one of these asks."""
        return {call.model for call in self._on_devices if call.offload}

    @cached_property
    def copies(self) -> list[Copy]:
        """Returns one copy for each model, mesh and strategy that a call needs."""
        homes = [self.homes[call.model] for call in self._on_devices]
        return list(dict.fromkeys([*homes, *map(self.copy_of, self._on_devices)]))

    def copy_of(self, call: Call) -> Copy:
        """Returns the copy that a call works on. A call that only computes is at home."""
        if call.where is None or call.kind == COMPUTE:
            return self.homes[call.model]
        return Copy(call.model, call.where)

    def is_placeholder(self, copy: Copy) -> bool:
        """Returns whether the copy has no weights of its own: its model's home is another."""
        return copy != self.homes[copy.model]

    def _bring_batch(self, ahead: int) -> str:
        """Adds what brings the step's batch, and returns the name of the last such task. A batch
        that a call generates follows that of the step before, and the weights that it may not be
        without. The model that wrote it places it first, as in a step without a graph."""
        call = next((c for c in self.calls if c.kind == GENERATE), None)
        if call is None:
            self.tasks.append(Task(DATA, "data", earlier={DATA: 1}))
            return DATA
        earlier = {call.name: 1}
        if call.model in self.trained:
            earlier[f"{self.trained[call.model].name}: publish"] = 1 + ahead
        self.tasks.append(Task(call.name, "data", earlier=earlier, call=call))
        if call.model not in self.homes:
            return call.name
        copy, name = self.homes[call.model], f"{call.name}: place"
        self.tasks.append(Task(name, "place", frozenset({call.name}), call=call, copy=copy))
        return name

    def _add(self, call: Call, needs: frozenset[str], later: list[Call]) -> None:
        """Adds a call between its hooks."""
        copy = self.copy_of(call)
        placeholder = self.is_placeholder(copy)
        if call.kind != COMPUTE and copy not in self._ready:
            self._ready.add(copy)
            needs |= {self._hook("reallocate" if placeholder else "onload", call, needs)}
        self.tasks.append(Task(call.name, "call", needs, call=call, copy=copy))
        if call.kind == TRAIN_STEP and call.model in self._generated:
            self._hook("publish", call, frozenset({call.name}))
        may_go = placeholder or (call.model in self.resting and call.kind != COMPUTE)
        if may_go and not self._called_again(copy, later):
            self._ready.discard(copy)
            self._hook("drop" if placeholder else "offload", call, frozenset({call.name}))

    def _called_again(self, copy: Copy, later: list[Call]) -> bool:
        """Returns whether the copy is called again before its model's weights change."""
        for call in later:
            if call.kind not in (GENERATE, COMPUTE) and self.copy_of(call) == copy:
                return True
            if call.model == copy.model and call.kind == TRAIN_STEP:
                return False
        return False

    def _hook(self, kind: Kind, call: Call, needs: frozenset[str]) -> str:
        """Adds a hook of a call, and returns the name of its task."""
        name, copy = f"{call.name}: {kind}", self.copy_of(call)
        source = self.homes[call.model] if kind == "reallocate" else None
        self.tasks.append(Task(name, kind, needs, call=call, copy=copy, source=source))
        return name
