"""Draws a graph of calls as Mermaid text, which GitHub and many editors show as a picture."""

from __future__ import annotations

import networkx as nx

from megarl.dataflow.call import COMPUTE, GENERATE, INFERENCE, TRAIN_STEP
from megarl.dataflow.graph import across_steps, trained_models

SHAPES = {
    GENERATE: ("([", "])"),
    INFERENCE: ("[", "]"),
    TRAIN_STEP: ("{{", "}}"),
    COMPUTE: ("[/", "/]"),
}


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
