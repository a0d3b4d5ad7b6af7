"""Draws a graph of calls as SVG: models by colour, kinds by shape, keys on solid lines, versions of
weights on dashed ones, and the mesh and the strategy of each call that has them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import networkx as nx

from megarl.dataflow.call import COMPUTE, GENERATE, INFERENCE, KINDS, TRAIN_STEP, Call
from megarl.dataflow.graph import across_steps, trained_models
from megarl.dataflow.layers import Slot, make_slots, place
from megarl.dataflow.svg import INK, LINE, SOFT, Svg, colors_of, width_of

SAID = {GENERATE: "generate", INFERENCE: "inference", TRAIN_STEP: "train step", COMPUTE: "compute"}
EDGE, ROW, PAD = 16.0, 15.0, 24.0  # of the picture, of a line of text, of a box's text
LANE = 22.0  # from one line between steps to the next
CUT = 11.0  # of the ends of a train step and a compute
KEYS_WIDTH = 20  # letters of a label's line


def draw_graph(graph: nx.DiGraph, title: str = "") -> str:
    """Returns the picture of a graph, with the version edges to the next step of its trained
    models."""
    trained = trained_models(graph)
    lanes = [(a, b) for a, b in across_steps(graph) if graph.nodes[a]["call"].model in trained]
    columns = make_slots(graph, {(a, b): _label(data) for a, b, data in graph.edges(data=True)})
    picture, margin = _Picture(graph), 18.0 + 8.0 * len(lanes)
    slots = [slot for column in columns for slot in column]
    for slot in slots:
        picture.measure(slot)
    width, height = place(columns, margin)
    top = EDGE + (26.0 if title else 0.0) + 34.0
    for slot in slots:
        slot.x, slot.y = slot.x + EDGE + margin, slot.y + top
    if title:
        picture.svg.text(EDGE, EDGE + 14, title, size=16, font_weight=600)
    end = picture.legend(EDGE, top - 22.0)
    for slot in slots:
        picture.lines_from(slot)
    boxes, floor = {slot.name: slot for slot in slots if slot.name}, top + height
    for i, (a, b) in enumerate(lanes):
        picture.lane(boxes[a], boxes[b], floor + LANE * (i + 1), 12.0 + 8.0 * i)
    for slot in boxes.values():
        picture.box(slot)
    right = max(width + 2 * (EDGE + margin), end + EDGE)
    return picture.svg.picture(right, floor + LANE * len(lanes) + EDGE + 4)


def _label(data: dict[str, object]) -> tuple[str, ...]:
    """Returns the lines of an edge's label: its keys, or that it is about weights."""
    keys = data["keys"]
    assert isinstance(keys, tuple)
    if not keys:
        return (f"old {data['version']}",)
    lines = [""]
    for key in keys:
        if lines[-1] and len(lines[-1]) + len(key) + 2 > KEYS_WIDTH:
            lines[-1] += ","
            lines.append("")
        lines[-1] += f", {key}" if lines[-1] else key
    return tuple(lines)


def _texts(call: Call) -> tuple[str, ...]:
    where = () if call.where is None else (str(call.where),)
    return (call.name, f"{call.model}: {SAID[call.kind]}", *where)


class _Picture:
    """Draws the parts of one graph's picture."""

    def __init__(self, graph: nx.DiGraph) -> None:
        self.svg = Svg()
        self.calls: dict[str, Call] = dict(graph.nodes(data="call"))
        self.colors = colors_of(call.model for call in self.calls.values())

    def measure(self, slot: Slot) -> None:
        """Gives a slot the size of what is written there; all boxes are equally wide."""
        if slot.name:
            texts = [said for call in self.calls.values() for said in _texts(call)]
            slot.width = PAD + max(map(width_of, texts))
            slot.height = 20.0 + ROW * len(_texts(self.calls[slot.name]))
        elif slot.lines:
            slot.width = 10.0 + max(width_of(said, 11) for said in slot.lines)
            slot.height = 4.0 + 13.0 * len(slot.lines)

    def lines_from(self, slot: Slot) -> None:
        """Draws a label, and the lines from a slot to those of the next column."""
        for i, line in enumerate(slot.lines):
            y = slot.y + 13.0 * (i - (len(slot.lines) - 1) / 2) + 4.0
            x = slot.x + slot.width / 2
            self.svg.text(x, y, line, size=11, fill=SOFT, text_anchor="middle")
        for other in slot.after:
            stroke, dash = self._stroke(slot.version or other.version)
            y, end = _port(slot, slot.after, other), _port(other, other.before, slot)
            x = slot.x + slot.width - self._inset(slot, y, right=True)
            to = other.x + self._inset(other, end, right=False)
            line_end = to - (6.0 if other.name else 0.0)
            middle = (x + line_end) / 2
            curve = f"C{middle:.1f},{y:.1f} {middle:.1f},{end:.1f} {line_end:.1f},{end:.1f}"
            further = other.width if not other.name and not other.lines else 0.0
            d = f"M{x:.1f},{y:.1f}{curve}h{further:.1f}"
            self.svg.path(d, stroke=stroke, stroke_width=1.4, **dash)
            if other.name:
                self._arrow(to, end, stroke)

    def _stroke(self, version: str) -> tuple[str, dict[str, str]]:
        if not version:
            return LINE, {}
        return self.colors[version][1], {"stroke_dasharray": "5 4"}

    def _arrow(self, x: float, y: float, color: str) -> None:
        d = f"M{x - 8:.1f},{y - 4:.1f}L{x:.1f},{y:.1f}L{x - 8:.1f},{y + 4:.1f}Z"
        self.svg.path(d, fill=color, stroke="none")

    def _inset(self, slot: Slot, y: float, *, right: bool) -> float:
        """Returns how far inside its side a box's outline is at height `y`."""
        if not slot.name:
            return 0.0
        kind, half = self.calls[slot.name].kind, slot.height / 2
        share = (y - slot.y) / half
        if kind == GENERATE:
            return half * (1 - math.sqrt(max(0.0, 1 - share * share)))
        if kind == TRAIN_STEP:
            return CUT * abs(share)
        if kind == COMPUTE:
            return CUT * (1 + share if right else 1 - share) / 2
        return 0.0

    def lane(self, a: Slot, b: Slot, y: float, out: float) -> None:
        """Draws the line to the next step: out of `a`, below all, into `b` from the left."""
        model = self.calls[a.name].model
        stroke, dash = self._stroke(model)
        begin, end = a.y + a.height / 2 - 8, b.y + b.height / 2 - 8
        right = a.x + a.width - self._inset(a, begin, right=True)
        left = b.x + self._inset(b, end, right=False)
        d = (
            f"M{right:.1f},{begin:.1f}H{a.x + a.width + out:.1f}V{y:.1f}"
            f"H{b.x - out - 6:.1f}V{end:.1f}H{left - 6:.1f}"
        )
        self.svg.path(d, stroke=stroke, stroke_width=1.4, stroke_linejoin="round", **dash)
        self._arrow(left, end, stroke)
        said = f"new {model}, next step"
        x, width = (left + right) / 2, width_of(said, 11)
        self.svg.rect(x - width / 2, y - 8, width, 16, fill="#fff")
        self.svg.text(x, y + 4, said, size=11, fill=stroke, text_anchor="middle")

    def box(self, slot: Slot) -> None:
        """Draws a call."""
        call = self.calls[slot.name]
        y, texts = slot.y - slot.height / 2, _texts(call)
        colors = self.colors[call.model]
        _shape(self.svg, call.kind, slot.x, y, slot.width, slot.height, *colors)
        for i, said in enumerate(texts):
            at = slot.x + slot.width / 2, slot.y + ROW * (i - (len(texts) - 1) / 2) + 4.0
            style = {"font_weight": 600} if i == 0 else {"fill": SOFT if i == 1 else INK}
            self.svg.text(*at, said, size=12 if i == 0 else 11, text_anchor="middle", **style)

    def legend(self, x: float, y: float) -> float:
        """Draws what colours, shapes and lines mean, on one line; returns where it ends."""
        for model, (fill, stroke) in self.colors.items():
            self.svg.rect(x, y - 9, 12, 12, fill=fill, stroke=stroke, rx=3)
            self.svg.text(x + 17, y + 1, model, size=11)
            x += 29 + width_of(model, 11)
        x += 8
        for kind in (k for k in KINDS if any(call.kind == k for call in self.calls.values())):
            _shape(self.svg, kind, x, y - 10, 26, 14, "#fff", SOFT)
            self.svg.text(x + 31, y + 1, SAID[kind], size=11)
            x += 43 + width_of(SAID[kind], 11)
        x += 8
        for said, dash in (("data", "none"), ("weights", "5 4")):
            d = f"M{x:.1f},{y - 3:.1f}h26"
            self.svg.path(d, stroke=SOFT, stroke_width=1.4, stroke_dasharray=dash)
            self.svg.text(x + 31, y + 1, said, size=11)
            x += 43 + width_of(said, 11)
        return x


def _port(slot: Slot, joined: Sequence[Slot], other: Slot) -> float:
    """Returns the height at which a line meets a slot: lines to a box spread over its side, in the
    order of their other ends."""
    if not slot.name:
        return slot.y
    order = sorted(joined, key=lambda s: s.y)
    step = min(11.0, (slot.height - 18.0) / max(1, len(order) - 1))
    return slot.y + step * (order.index(other) - (len(order) - 1) / 2)


def _shape(
    svg: Svg, kind: str, x: float, y: float, w: float, h: float, fill: str, stroke: str
) -> None:
    """Draws a kind's shape: generate has round ends, a train step pointed ones, inference is a
    rectangle and compute a slanted one."""
    cut = min(CUT, h / 2.5)
    if kind in (GENERATE, INFERENCE):
        return svg.rect(x, y, w, h, fill=fill, stroke=stroke, rx=h / 2 if kind == GENERATE else 3)
    if kind == TRAIN_STEP:
        top, bottom = (
            f"l{cut},{-h / 2}h{w - 2 * cut}l{cut},{h / 2}",
            f"l{-cut},{h / 2}h{2 * cut - w}",
        )
        d = f"M{x},{y + h / 2}{top}{bottom}Z"
    else:
        d = f"M{x + cut},{y}h{w - cut}l{-cut},{h}h{cut - w}Z"
    svg.path(d, fill=fill, stroke=stroke, stroke_width=1.6 if kind == TRAIN_STEP else 1)
