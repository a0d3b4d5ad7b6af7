"""What ReaL's text says of graphs: which calls can run at the same time, which weights meet on a
device, who is whose group."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import networkx as nx

from megarl.dataflow.graph import COMPUTE, Call, across_steps, calls_of, homes
from megarl.dataflow.mesh import Allocation


def concurrent(graph: nx.DiGraph) -> set[frozenset[str]]:
    """Returns the pairs of calls that may run at the same time: neither waits for the other, and
    their meshes are disjoint. A call without a mesh takes its model's; one whose model has none
    takes no device."""
    places = placements(graph)
    waits = {name: nx.ancestors(graph, name) for name in graph}
    return {
        frozenset(pair)
        for pair in combinations(graph, 2)
        if not any(a in waits[b] for a, b in (pair, pair[::-1])) and not _meet(places, *pair)
    }


def _meet(places: Mapping[str, Allocation], a: str, b: str) -> bool:
    return (
        a in places
        and b in places
        and not set(places[a].mesh.devices).isdisjoint(places[b].mesh.devices)
    )


def placements(graph: nx.DiGraph) -> dict[str, Allocation]:
    """Returns where each call runs: where it says, else where its model is at home. Calls of models
    without a home are left out."""
    home = homes(graph)
    found = {call.name: call.where or home.get(call.model) for call in calls_of(graph)}
    return {name: where for name, where in found.items() if where is not None}


def reallocated(graph: nx.DiGraph) -> set[str]:
    """Returns the calls that run elsewhere than their model's home, or in another layout, and so
    get a copy of its weights for their time."""
    home, places = homes(graph), placements(graph)
    return {
        call.name
        for call in calls_of(graph)
        if call.kind != COMPUTE
        and call.name in places
        and places[call.name] != home.get(call.model)
    }


def residents(graph: nx.DiGraph) -> dict[int, dict[str, tuple[str, ...]]]:
    """Returns, for each device that has work, the weights on it during each call that runs there,
    as names of models; a copy for the call's time is "model (call)".

    A model is always on the devices of its home, unless one of its calls says `offload`: then only
    while its calls run. A "compute" brings no weights.
    """
    home, places, copies = homes(graph), placements(graph), reallocated(graph)
    calls = calls_of(graph)
    resting = {call.model for call in calls if call.offload}
    found: dict[int, dict[str, tuple[str, ...]]] = {}
    for call in calls:
        if call.name not in places:
            continue
        for device in places[call.name].mesh.devices:
            there = [m for m in home if m not in resting and device in home[m].mesh.devices]
            there += _brought(call, call.name in copies, there)
            found.setdefault(device, {})[call.name] = tuple(there)
    return found


def _brought(call: Call, copied: bool, there: list[str]) -> list[str]:
    """Returns what a call adds to the weights on its devices."""
    if copied:
        return [f"{call.model} ({call.name})"]
    return [] if call.kind == COMPUTE or call.model in there else [call.model]


def peak_residents(graph: nx.DiGraph) -> dict[int, tuple[str, ...]]:
    """Returns the most weights that meet on each device during one call."""
    return {device: max(by_call.values(), key=len) for device, by_call in residents(graph).items()}


def unrolled(graph: nx.DiGraph, steps: int) -> nx.DiGraph:
    """Returns the graph of `steps` steps. Its nodes are (step, call's name), with the graph's own
    attributes; edges between steps have no keys and name their model as `version`."""
    many = nx.DiGraph(**graph.graph)
    for step in range(steps):
        many.add_nodes_from(((step, n), data) for n, data in graph.nodes(data=True))
        many.add_edges_from(((step, a), (step, b), d) for a, b, d in graph.edges(data=True))
    for step in range(1, steps):
        for a, b in across_steps(graph):
            model = graph.nodes[a]["call"].model
            many.add_edge((step - 1, a), (step, b), keys=(), version=model)
    return many


def groups(where: Allocation, degree: str) -> list[list[int]]:
    """Returns the devices of each group of a degree: "tp", "cp", "dp" or "pp"."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, device in enumerate(where.mesh.devices):
        coords = where.layout.coords(rank)
        rest = tuple(getattr(coords, n) for n in ("tp", "cp", "dp", "pp") if n != degree)
        found.setdefault(rest, []).append(device)
    return sorted(found.values())


def layers(where: Allocation, num_layers: int) -> dict[int, tuple[int, ...]]:
    """Returns which of a model's layers each device of the mesh holds."""
    layout = where.layout
    stages = [
        tuple(i for v in range(layout.vpp) for i in layout.layers(num_layers, pp, v))
        for pp in range(layout.pp)
    ]
    devices = enumerate(where.mesh.devices)
    return {device: stages[layout.coords(rank).pp] for rank, device in devices}
