"""Lays out a graph from left to right: where the boxes of calls and the labels of edges stand.

Columns of calls and columns of labels take turns. A call stands in the column of its generation, an
edge's label in the column behind its first call, and where an edge passes by a column it has a slot
of its own there: so nothing that is drawn lies above anything else. In each column the slots stand
in the order that crosses fewest lines of the neighbours, as near to these as their heights allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import networkx as nx

GAP = 14.0  # between slots of a column
SWEEPS = 12


@dataclass(eq=False)
class Slot:
    """Holds a place in a column. `lines` are what is written: none where an edge passes by. After
    the layout `x` is the left side and `y` the middle, in px."""

    column: int
    lines: tuple[str, ...] = ()
    name: str = ""  # of a call
    version: str = ""  # the model whose weights the edge is about
    width: float = 0.0
    height: float = 4.0
    before: list[Slot] = field(default_factory=list)
    after: list[Slot] = field(default_factory=list)
    x: float = 0.0
    y: float = 0.0

    def to(self, other: Slot) -> None:
        """Joins the slot with one of the next column."""
        self.after.append(other)
        other.before.append(self)


def make_slots(
    graph: nx.DiGraph, labels: dict[tuple[str, str], tuple[str, ...]]
) -> list[list[Slot]]:
    """Returns the columns of slots, not yet placed. labels: what is written at each edge; edges of
    a call with the same label, to calls of one column, share it."""
    nodes: dict[str, Slot] = {}
    for i, names in enumerate(nx.topological_generations(graph)):
        nodes |= {name: Slot(2 * i, name=name) for name in sorted(names, key=list(graph).index)}
    columns: list[list[Slot]] = [[] for _ in range(max(s.column for s in nodes.values()) + 1)]
    for slot in nodes.values():
        columns[slot.column].append(slot)
    shared: dict[tuple[object, ...], Slot] = {}
    for a, b, data in graph.edges(data=True):
        key = (a, labels[a, b], data["version"], nodes[b].column)
        if key not in shared:
            label = Slot(nodes[a].column + 1, labels[a, b], version=data["version"])
            nodes[a].to(label)
            columns[label.column].append(label)
            shared[key] = _passing(label, nodes[b].column, columns)
        shared[key].to(nodes[b])
    return columns


def _passing(slot: Slot, column: int, columns: list[list[Slot]]) -> Slot:
    """Returns the last slot of an edge before `column`, with those on its way."""
    while slot.column < column - 1:
        further = Slot(slot.column + 1, version=slot.version)
        columns[further.column].append(further)
        slot.to(further)
        slot = further
    return slot


def place(columns: list[list[Slot]], margin: float) -> tuple[float, float]:
    """Gives every slot its x and y, by the widths and heights that they have; returns those of the
    whole. margin: px that stay free on both sides of a column of calls."""
    _order(columns)
    x = 0.0
    for i, column in enumerate(columns):
        width = max(slot.width for slot in column)
        x += margin if i % 2 else 0.0
        for slot in column:
            slot.width = width if not slot.name and not slot.lines else slot.width
            slot.x = x + (width - slot.width) / 2
        x += width + (margin if i % 2 else 0.0)
    for sweep in range(2 * SWEEPS):
        for column in columns if sweep % 2 == 0 else columns[::-1]:
            _settle(column)
    slots = [slot for column in columns for slot in column]
    top = min(slot.y - slot.height / 2 for slot in slots)
    for slot in slots:
        slot.y -= top
    return x, max(slot.y + slot.height / 2 for slot in slots)


def _order(columns: list[list[Slot]]) -> None:
    """Puts every column into the order that crosses fewest lines, by the neighbours' mean place."""
    best, fewest = [list(column) for column in columns], _crossings(columns)
    for sweep in range(SWEEPS):
        forward = sweep % 2 == 0
        for left, right in pairwise(columns if forward else columns[::-1]):
            at = {slot: i for i, slot in enumerate(left)}
            means = {
                slot: sum(map(at.__getitem__, near)) / len(near)
                for slot in right
                if (near := slot.before if forward else slot.after)
            }
            place = {slot: means.get(slot, float(i)) for i, slot in enumerate(right)}
            right.sort(key=place.__getitem__)
        if (found := _crossings(columns)) < fewest:
            best, fewest = [list(column) for column in columns], found
    for column, order in zip(columns, best, strict=True):
        column[:] = order


def _crossings(columns: Sequence[Sequence[Slot]]) -> int:
    count = 0
    for left, right in pairwise(columns):
        at = {slot: i for i, slot in enumerate(right)}
        ends = [(i, at[b]) for i, slot in enumerate(left) for b in slot.after]
        count += sum(a < c and b > d for a, b in ends for c, d in ends)
    return count


def _settle(column: Sequence[Slot]) -> None:
    """Moves the slots as near to the middle of their neighbours as their order and heights allow:
    the least squares of the distances, by pooling those that would overlap."""
    offsets = [0.0]
    for a, b in pairwise(column):
        offsets.append(offsets[-1] + (a.height + b.height) / 2 + GAP)
    pools: list[tuple[float, int]] = []  # mean of what the slots want, less their offsets; slots
    for slot, offset in zip(column, offsets, strict=True):
        near = [*slot.before, *slot.after]
        wanted = sum(other.y for other in near) / len(near) if near else slot.y
        mean, n = wanted - offset, 1
        while pools and pools[-1][0] > mean:
            other, m = pools.pop()
            mean, n = (mean * n + other * m) / (n + m), n + m
        pools.append((mean, n))
    starts = [mean for mean, n in pools for _ in range(n)]
    for slot, start, offset in zip(column, starts, offsets, strict=True):
        slot.y = start + offset
