"""Builds the dataflow graph of an algorithm's model function calls, checks it and draws it.

A node is a call's name, with the Call as its attribute `call`. An edge says that a call waits for
another of the same step: its attribute `keys` holds the data that passes, and `version` the model
whose weights the later call changes after the earlier one has read them ("" for neither).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import networkx as nx

from megarl.config.errors import ConfigError, raise_if_any
from megarl.dataflow.mesh import Allocation, Devices

GENERATE, INFERENCE, TRAIN_STEP, COMPUTE = "generate", "inference", "train_step", "compute"
KINDS = (GENERATE, INFERENCE, TRAIN_STEP, COMPUTE)
PROMPTS = ("prompts",)  # what a generating call reads of the data set
SHAPES = {
    GENERATE: ("([", "])"),
    INFERENCE: ("[", "]"),
    TRAIN_STEP: ("{{", "}}"),
    COMPUTE: ("[/", "/]"),
}


@dataclass(frozen=True)
class Call:
    """Describes one call of a model as data: what it reads, what it makes, where it runs.

    name: unique in its graph. model: the role whose verb it is. kind: "generate", "inference" or
    "train_step"; a "compute" works on the batch's numbers and runs no model. inputs, outputs: keys
    of the batch.

    verb: the method of the role that is called with the batch and `args`; into: the key under which
    its result is put, empty where the verb adds its keys to the batch itself.

    where: the mesh and the strategy, None for where the model is already. offload: the model leaves
    the devices' memory after the call, and returns before the next.
    """

    name: str
    model: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    verb: str = field(default="", kw_only=True)
    into: str = field(default="", kw_only=True)
    args: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    where: Allocation | None = field(default=None, kw_only=True)
    offload: bool = field(default=False, kw_only=True)


def build_graph(
    calls: Iterable[Call], *, given: Sequence[str] = PROMPTS, devices: Devices | None = None
) -> nx.DiGraph:
    """Returns the graph of one step's calls. Data edges come from keys; version edges have every
    call that reads a model's old weights come before the model's train step.

    given: keys that the data set brings. devices: those that the calls' meshes have to be of.
    Raises ConfigError that lists all that is wrong: names given twice, unknown kinds, keys that
    nothing or several calls make, two train steps of a model, meshes against the rule, cycles.
    """
    calls = tuple(calls)
    raise_if_any(_problems(calls, given, devices))
    graph = nx.DiGraph(given=tuple(given), devices=devices)
    graph.add_nodes_from((call.name, {"call": call}) for call in calls)
    maker = {key: call.name for call in calls for key in call.outputs}
    for call in calls:
        for key in call.inputs:
            if key in maker:
                keys = graph.get_edge_data(maker[key], call.name, {"keys": ()})["keys"]
                graph.add_edge(maker[key], call.name, keys=(*keys, key), version="")
    graph.add_edges_from(list(_version_edges(graph)))
    if not nx.is_directed_acyclic_graph(graph):
        raise ConfigError(_cycle(graph))
    return graph


def calls_of(graph: nx.DiGraph) -> list[Call]:
    """Returns the calls in an order in which they can run: among those that could be next, the
    first that the graph was built with."""
    place = {name: i for i, name in enumerate(graph)}
    order = nx.lexicographical_topological_sort(graph, key=place.__getitem__)
    return [graph.nodes[name]["call"] for name in order]


def allocate(
    graph: nx.DiGraph, where: Mapping[str, Allocation], devices: Devices | None = None
) -> nx.DiGraph:
    """Returns the graph with the calls named by `where` at their allocations. Raises ConfigError
    as build_graph does, and ValueError for a name that no call has."""
    if unknown := [name for name in where if name not in graph]:
        raise ValueError(f"no call is named {unknown[0]!r}; the graph's are {', '.join(graph)}")
    calls = [call for _, call in graph.nodes(data="call")]
    placed = [replace(call, where=where.get(call.name, call.where)) for call in calls]
    return build_graph(placed, given=graph.graph["given"], devices=devices)


def homes(graph: nx.DiGraph) -> dict[str, Allocation]:
    """Returns where each model is at home: where it is trained, else where its first call runs;
    models that no call places are left out. A call elsewhere gets a copy of the weights."""
    places: dict[str, Allocation] = {}
    for call in sorted(calls_of(graph), key=lambda call: call.kind != TRAIN_STEP):
        if call.where is not None:
            places.setdefault(call.model, call.where)
    return places


def trained_models(graph: nx.DiGraph) -> set[str]:
    """Returns the models that a train step changes; the others are frozen."""
    return {call.model for _, call in graph.nodes(data="call") if call.kind == TRAIN_STEP}


def across_steps(graph: nx.DiGraph) -> list[tuple[str, str]]:
    """Returns the version edges between steps, as (call of a step, call of the step after it): the
    first calls of a model follow its last calls of the step before."""
    edges = []
    for names in _by_model(graph).values():
        last = [n for n in names if not nx.descendants(graph, n) & set(names)]
        first = [n for n in names if not nx.ancestors(graph, n) & set(names)]
        edges += [(a, b) for a in last for b in first]
    return edges


def _by_model(graph: nx.DiGraph) -> dict[str, list[str]]:
    models: dict[str, list[str]] = {}
    for name, call in graph.nodes(data="call"):
        models.setdefault(call.model, []).append(name)
    return models


def _version_edges(graph: nx.DiGraph) -> Iterator[tuple[str, str, dict[str, object]]]:
    """Yields an edge to each model's train step from its calls that data does not order already.
    A call that reads what came of the train step has the new weights, and waits as it is."""
    for model, names in _by_model(graph).items():
        for train in (n for n in names if graph.nodes[n]["call"].kind == TRAIN_STEP):
            ordered = nx.ancestors(graph, train) | nx.descendants(graph, train) | {train}
            for name in names:
                if name not in ordered:
                    yield name, train, {"keys": (), "version": model}


def _problems(
    calls: Sequence[Call], given: Sequence[str], devices: Devices | None
) -> Iterator[str]:
    yield from _naming_problems(calls)
    makers: dict[str, list[str]] = {key: ["the data set"] for key in given}
    for call in calls:
        for key in call.outputs:
            makers.setdefault(key, []).append(f"call {call.name!r}")
    for key, names in makers.items():
        if len(names) > 1:
            yield f"key {key!r} is made by {' and '.join(names)}: give one of them another key"
    for call in calls:
        for key in call.inputs:
            if key not in makers:
                fix = f"add one that does, or name it in `given` ({', '.join(given)})"
                yield f"call {call.name!r} reads {key!r}, which no call makes: {fix}"
    for call in calls:
        yield from _allocation_problems(call, devices)


def _naming_problems(calls: Sequence[Call]) -> Iterator[str]:
    names, trained = [call.name for call in calls], dict[str, Call]()
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"{names.count(name)} calls are named {name!r}: names are unique"
    for call in calls:
        if call.kind not in KINDS:
            yield f"call {call.name!r}: kind {call.kind!r} is none of {', '.join(KINDS)}"
        if call.into and call.into not in call.outputs:
            yield f"call {call.name!r}: into={call.into!r} is not among its outputs"
        if call.kind == TRAIN_STEP and (first := trained.setdefault(call.model, call)) is not call:
            why = "a step trains a model once"
            yield f"calls {first.name!r} and {call.name!r} both train {call.model!r}: {why}"


def _allocation_problems(call: Call, devices: Devices | None) -> Iterator[str]:
    if call.where is not None and devices is not None:
        try:
            devices.check(call.where.mesh)
        except ValueError as e:
            yield f"call {call.name!r}: {e}"


def _cycle(graph: nx.DiGraph) -> str:
    """Words a cycle of the graph, call by call."""
    edges = nx.find_cycle(graph)
    steps = []
    for a, b in edges:
        data = graph.edges[a, b]
        what = ", ".join(data["keys"]) or f"the weights of {data['version']}"
        steps.append(f"{b!r} waits for {a!r} ({what})")
    return f"calls wait for each other: {'; '.join(steps)}"


def draw_graph(graph: nx.DiGraph) -> str:
    """Returns the graph as a Mermaid flowchart. A box has a call's name, model, kind and, where it
    has one, its allocation; the shape is the kind's. Solid arrows carry keys of the batch. Dotted
    arrows are about versions of weights, within a step and from a trained model to the next."""
    ids = {name: f"c{i}" for i, name in enumerate(graph)}
    calls, lines = dict(graph.nodes(data="call")), ["flowchart LR"]
    for name, call in calls.items():
        left, right = SHAPES[call.kind]
        place = f"<br/>{call.where}" if call.where else ""
        lines.append(f'{ids[name]}{left}"{name}<br/>{call.model}: {call.kind}{place}"{right}')
    for a, b, data in graph.edges(data=True):
        arrow = "-->" if data["keys"] else "-.->"
        label = ", ".join(data["keys"]) or f"old {data['version']}"
        lines.append(f'{ids[a]} {arrow}|"{label}"| {ids[b]}')
    for a, b in across_steps(graph):
        if (model := calls[a].model) in trained_models(graph):
            lines.append(f'{ids[a]} -.->|"new {model}, next step"| {ids[b]}')
    return "\n    ".join(lines)
