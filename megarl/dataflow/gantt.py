"""Shows a timeline, simulated or measured: devices over time, as text and as SVG.

Devices that do the same all the time share a row. What takes no device is the servers'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megarl.dataflow.mesh import Mesh
from megarl.dataflow.schedule import MOVE, Span, Timeline
from megarl.dataflow.svg import INK, LINE, SOFT, Svg, colors_of, width_of
from megarl.observability.report.scale import Scale, nice_ticks

WIDTH = 96  # letters of a row of text
LEFT, RIGHT, ROW = 84.0, 960.0, 34.0  # of the picture, in px


def rows(timeline: Timeline) -> list[tuple[str, list[Span]]]:
    """Returns the devices that have the same spans, such as "g0-g1,g4", with these spans. The first
    row is the servers', where they have spans."""
    by_device: dict[int, list[Span]] = {}
    servers = [span for span in timeline.spans if not span.meshes]
    for span in timeline.spans:
        for device in {device for mesh in span.meshes for device in mesh.devices}:
            by_device.setdefault(device, []).append(span)
    alike: dict[tuple[int, ...], list[int]] = {}
    for device, spans in sorted(by_device.items()):
        alike.setdefault(tuple(map(id, spans)), []).append(device)
    found = [(_name(_runs(devices)), by_device[devices[0]]) for devices in alike.values()]
    return [("servers", servers), *found] if servers else found


def _runs(devices: Sequence[int]) -> list[Mesh]:
    """Returns devices, which ascend, as runs."""
    found: list[Mesh] = []
    for device in devices:
        if found and found[-1].devices.stop == device:
            found[-1] = Mesh(found[-1].first, found[-1].count + 1)
        else:
            found.append(Mesh(device, 1))
    return found


def _name(meshes: Sequence[Mesh]) -> str:
    return ",".join(map(str, meshes))


def text_rows(timeline: Timeline, width: int = WIDTH) -> Iterator[str]:
    """Yields the timeline as lines of text: a call's name from where it begins to where it ends,
    ~ while weights move, . while the devices wait."""
    end = max(span.end for span in timeline.spans)
    found = rows(timeline)
    side = max(len(name) for name, _ in found)
    for name, spans in found:
        line = ["."] * width
        for span in spans:
            a, b = round(span.start / end * width), round(span.end / end * width)
            if a < b:
                line[a:b] = _filled(span, b - a)
        yield f"{name:>{side}} |{''.join(line)}|"
    yield f"{'':>{side}}  0 s{f'{end:.1f} s':>{width - 3}}"


def _filled(span: Span, room: int) -> str:
    """Returns exactly `room` letters for a span."""
    if span.what == MOVE:
        return "~" * room
    return f"[{span.call.name[: max(0, room - 2)]}".ljust(room - 1, "-")[: room - 1] + "]"


def draw_timeline(timeline: Timeline, title: str = "") -> str:
    """Returns the picture of a timeline: models by colour, hooks and moving weights paler."""
    svg, found = Svg(), rows(timeline)
    colors = colors_of(span.call.model for span in timeline.spans)
    ticks = nice_ticks(0.0, max(span.end for span in timeline.spans), 8)
    x = Scale(0.0, ticks[-1], LEFT, RIGHT)
    top = 66.0 if title else 42.0
    floor = top + ROW * len(found)
    if title:
        svg.text(16, 30, title, size=16, font_weight=600)
    _legend(svg, colors, top - 18)
    for tick in ticks:
        svg.path(f"M{x(tick):.1f},{top:.1f}V{floor:.1f}", stroke="#e4e7eb")
        svg.text(x(tick), floor + 16, f"{tick:g}", size=11, fill=SOFT, text_anchor="middle")
    svg.text(RIGHT + 14, floor + 16, "s", size=11, fill=SOFT)
    for i, (name, spans) in enumerate(found):
        y = top + ROW * i
        svg.text(LEFT - 10, y + ROW / 2 + 4, name, size=12, text_anchor="end")
        for span in spans:
            _bar(svg, span, x, y + 4, colors[span.call.model])
    svg.path(f"M{LEFT},{floor:.1f}H{RIGHT}", stroke=LINE)
    return svg.picture(RIGHT + 36, floor + 28)


def _bar(svg: Svg, span: Span, x: Scale, y: float, color: tuple[str, str]) -> None:
    fill, stroke = color
    left, width, height = x(span.start), x(span.end) - x(span.start), ROW - 8
    tip = f"{span.call.name}: {span.end - span.start:.3g} s"
    if span.what == MOVE:
        return svg.rect(left, y + 6, width, height - 12, fill=stroke, tip=f"hooks of {tip}")
    if width <= 0:
        return
    svg.rect(left, y, width, height, fill=fill, stroke=stroke, rx=2, tip=tip)
    svg.rect(left, y, x(span.start + span.hooks) - left, height, fill=stroke)
    if width_of(span.call.name, 11) < width:
        at = left + width / 2
        svg.text(at, y + height / 2 + 4, span.call.name, size=11, fill=INK, text_anchor="middle")


def _legend(svg: Svg, colors: Mapping[str, tuple[str, str]], y: float) -> None:
    x = LEFT
    for model, (fill, stroke) in colors.items():
        svg.rect(x, y - 9, 12, 12, fill=fill, stroke=stroke, rx=3)
        svg.text(x + 17, y + 1, model, size=11)
        x += 29 + width_of(model, 11)
    svg.rect(x + 8, y - 9, 12, 12, fill=SOFT)
    svg.text(x + 25, y + 1, "weights and data on their way", size=11)
