"""Draws charts as inline SVG. Pure: points in, text out.

A chart is a <figure> with a header (title, legend), the drawing, and a JSON block from which the
page's script makes the hover box. Colours are CSS classes (c0, c1, ...), so that light, dark and
print each have their own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import pairwise

from megarl.observability.report.scale import Scale, log_ticks, nice_ticks

Points = Sequence[tuple[float, float]]
Format = Callable[[float], str]
Legend = list[tuple[str, str]]  # (label, CSS classes of its key)

WIDTH, HEIGHT = 560, 264
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 38
MAX_POINTS = 400
GREY = 7  # the colour class of what belongs to no series


@dataclass(kw_only=True)
class Line:
    """Describes one series. `whiskers` are (x, low, high); `smooth` is a window in points, and 0
    draws them as they are. Points may be means of `per_point` steps each."""

    label: str
    points: Points
    color: int
    dashed: bool = False
    smooth: int = 0
    per_point: int = 1
    markers: bool = False
    whiskers: Sequence[tuple[float, float, float]] = ()


@dataclass(kw_only=True)
class LineChart:
    """Describes a chart of lines over one axis. `y_from` and `y_to` are what its axis must reach;
    `named` has the legend name also a single line."""

    title: str
    lines: list[Line]
    note: str = ""
    x_label: str = "step"
    format: Format = field(default=lambda v: f"{v:.4g}")
    log: bool = False
    y_from: float | None = None
    y_to: float | None = None
    named: bool = False  # the legend names the line also where it is the only one


@dataclass(kw_only=True)
class StackedChart:
    """Describes bars at `xs`, stacked of `layers`: (label, color class, one height per x)."""

    title: str
    xs: Sequence[float]
    layers: Sequence[tuple[str, int, Sequence[float]]]
    note: str = ""
    x_label: str = "step"
    format: Format = field(default=lambda v: f"{v:.3g}")


def smooth(points: Points, window: int) -> list[tuple[float, float]]:
    """Returns the centred moving average, at the ends over what there is of the window."""
    values, half = [y for _, y in points], window // 2
    out = []
    for i, (x, _) in enumerate(points):
        part = values[max(0, i - half) : i + half + 1]
        out.append((x, sum(part) / len(part)))
    return out


def bin_size(n: int, limit: int = MAX_POINTS) -> int:
    """Returns how many of n neighbouring points make one, for at most `limit`."""
    return max(1, math.ceil(n / limit))


def thin(points: Points, limit: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Averages neighbours, so that at most `limit` points are left."""
    size = bin_size(len(points), limit)
    if size == 1:
        return list(points)
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in p) / len(p), sum(y for _, y in p) / len(p)) for p in parts]


def line_chart(chart: LineChart) -> str:
    """Draws a chart of lines; returns "" where there is no point."""
    lines = [_prepare(line, chart.log) for line in chart.lines]
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    ys += [v for line in lines for _, lo, hi in line.whiskers for v in (lo, hi)]
    if not xs:
        return ""
    y_ticks = log_ticks(min(ys), max(ys)) if chart.log else _y_ticks(chart, min(ys), max(ys))
    x = Scale(min(xs), max(xs), LEFT + 6, WIDTH - RIGHT - 6)
    y = Scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP, log=chart.log)
    body = _axes(x, y, _x_ticks(min(xs), max(xs)), y_ticks, chart.format, chart.x_label)
    for line in lines:
        body += _draw_line(line, x, y)
    return _figure(
        chart.title,
        chart.note,
        _line_legend(lines, chart.named),
        body,
        _hover_lines(lines, x, y, chart),
    )


def _line_legend(lines: list[Line], named: bool) -> Legend:
    """Returns the lines' names where there are several, or `named`; and what thin and thick mean,
    where the thick ones are averages."""
    legend = []
    if named or len(lines) > 1:
        legend = [
            (line.label, f"c{line.color}{' dashed' if line.dashed else ''}") for line in lines
        ]
    averaged = [line for line in lines if _is_smoothed(line)]
    if averaged:
        css = f"c{lines[0].color if len(lines) == 1 else GREY}"
        thin_line = [line.per_point for line in averaged]
        thick_line = [line.per_point * line.smooth for line in averaged]
        legend += [(_means(thin_line), f"{css} raw"), (_means(thick_line), css)]
    return legend


def _means(steps: Sequence[int]) -> str:
    least, most = min(steps), max(steps)
    if most == 1:
        return "each step"
    return f"mean of {least} steps" if least == most else f"mean of {least} to {most} steps"


def _is_smoothed(line: Line) -> bool:
    return line.smooth > 1 and len(line.points) > 2 * line.smooth


def _prepare(line: Line, log: bool) -> Line:
    points = [(x, v) for x, v in line.points if math.isfinite(v) and (v > 0 or not log)]
    size = bin_size(len(points))
    return replace(line, points=thin(points), smooth=line.smooth // size, per_point=size)


def _y_ticks(chart: LineChart, lo: float, hi: float) -> list[float]:
    if 0 <= lo < 0.5 * hi:
        lo = 0.0
    lo = lo if chart.y_from is None else min(lo, chart.y_from)
    hi = hi if chart.y_to is None else max(hi, chart.y_to)
    return nice_ticks(lo, hi)


def _x_ticks(lo: float, hi: float) -> list[float]:
    if hi <= lo:
        return [lo]
    return [t for t in nice_ticks(lo, hi, 6) if lo <= t <= hi]


def _draw_line(line: Line, x: Scale, y: Scale) -> str:
    css = f"c{line.color}"
    out = ""
    smoothed = _is_smoothed(line)
    if smoothed:
        out += f'<path class="line raw {css}" d="{_path(line.points, x, y)}"/>'
    for wx, lo, hi in line.whiskers:
        px, a, b = x(wx), y(lo), y(hi)
        out += (
            f'<path class="whisker {css}" d="M{px:.1f},{a:.1f}V{b:.1f}'
            f'M{px - 4:.1f},{a:.1f}h8M{px - 4:.1f},{b:.1f}h8"/>'
        )
    points = smooth(line.points, line.smooth) if smoothed else line.points
    dash = " dashed" if line.dashed else ""
    out += f'<path class="line {css}{dash}" d="{_path(points, x, y)}"/>'
    if line.markers or len(points) == 1:
        out += "".join(
            f'<circle class="dot {css}" cx="{x(px):.1f}" cy="{y(py):.1f}" r="3.2"/>'
            for px, py in points
        )
    return out


def _path(points: Points, x: Scale, y: Scale) -> str:
    return "M" + "L".join(f"{x(px):.1f},{y(py):.1f}" for px, py in points)


def stacked_chart(chart: StackedChart) -> str:
    """Draws a chart of stacked bars; returns "" where there is no bar."""
    totals = [sum(parts) for parts in zip(*(h for _, _, h in chart.layers), strict=True)]
    if not totals:
        return ""
    ticks = nice_ticks(0.0, max(totals))
    gap = min(b - a for a, b in pairwise(chart.xs)) if totals[1:] else 1.0
    x = Scale(chart.xs[0] - gap / 2, chart.xs[-1] + gap / 2, LEFT + 2, WIDTH - RIGHT)
    y = Scale(0.0, ticks[-1], HEIGHT - BOTTOM, TOP)
    x_ticks = _x_ticks(chart.xs[0], chart.xs[-1])
    body = _axes(x, y, x_ticks, ticks, chart.format, chart.x_label)
    width = min(28.0, (x(gap) - x(0.0)) * 0.82)
    base = [0.0] * len(totals)
    for _, color, heights in chart.layers:
        path = ""
        for i, h in enumerate(heights):
            top, bottom = y(base[i] + h), y(base[i])
            left = x(chart.xs[i]) - width / 2
            path += f"M{left:.2f},{bottom:.2f}V{top:.2f}h{width:.2f}V{bottom:.2f}Z"
            base[i] += h
        body += f'<path class="bar c{color}" d="{path}"/>'
    series = [
        {"n": label, "c": f"c{color}", "v": [chart.format(h) for h in heights]}
        for label, color, heights in reversed(chart.layers)
    ]
    series.append({"n": "total", "c": "", "v": [chart.format(t) for t in totals]})
    hover = {
        "x": [round(x(v), 1) for v in chart.xs],
        "l": [_place(chart.x_label, v) for v in chart.xs],
        "s": series,
    }
    legend = [(label, f"c{color}") for label, color, _ in chart.layers]
    return _figure(chart.title, chart.note, legend, body, hover)


def _hover_lines(lines: list[Line], x: Scale, y: Scale, chart: LineChart) -> dict[str, object]:
    """Returns for each x of any line the values standing there, as text, and the height of their
    dots."""
    xs = sorted({px for line in lines for px, _ in line.points})
    series = []
    for line in lines:
        at = dict(line.points)
        bounds = {wx: (lo, hi) for wx, lo, hi in line.whiskers}
        texts: list[str | None] = []
        for px in xs:
            text = chart.format(at[px]) if px in at else None
            if text is not None and px in bounds:
                lo, hi = bounds[px]
                text += f" [{chart.format(lo)}, {chart.format(hi)}]"
            texts.append(text)
        heights = [round(y(at[px]), 1) if px in at else None for px in xs]
        series.append({"n": line.label, "c": f"c{line.color}", "y": heights, "v": texts})
    return {
        "x": [round(x(v), 1) for v in xs],
        "l": [_place(chart.x_label, v) for v in xs],
        "s": series,
    }


def _axes(
    x: Scale,
    y: Scale,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    fmt: Format,
    x_label: str,
) -> str:
    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
    out = ""
    for i, t in enumerate(y_ticks):
        css = "axis" if i == 0 else "grid"
        out += f'<path class="{css}" d="M{LEFT},{y(t):.1f}H{right}"/>'
        out += f'<text class="tick" x="{LEFT - 8}" y="{y(t) + 3.6:.1f}" text-anchor="end">'
        out += f"{escape(fmt(t).replace('.0%', '%'))}</text>"
    for t in x_ticks:
        out += f'<text class="tick" x="{x(t):.1f}" y="{floor + 16}" text-anchor="middle">'
        out += f"{_tick_text(t)}</text>"
    middle = (LEFT + right) / 2
    out += f'<text class="tick" x="{middle}" y="{HEIGHT - 5}" text-anchor="middle">'
    return out + f"{escape(x_label)}</text>"


def _tick_text(value: float) -> str:
    return f"{value:g}" if value == int(value) else f"{value:.4g}"


def _place(x_label: str, value: float) -> str:
    """Returns "step 12", or "3.4 minutes"."""
    return f"step {_tick_text(value)}" if x_label == "step" else f"{value:.1f} {x_label}"


def _figure(title: str, note: str, legend: Legend, body: str, hover: dict[str, object]) -> str:
    keys = "".join(f'<li><i class="key {css}"></i>{escape(label)}</li>' for label, css in legend)
    # "</" inside a script element would end it
    data = json.dumps(hover, separators=(",", ":")).replace("</", "<\\/")
    return (
        f'<figure class="chart"><figcaption><h3>{escape(title)}</h3>'
        + (f"<p>{escape(note)}</p>" if note else "")
        + (f'<ul class="legend">{keys}</ul>' if keys else "")
        + f'</figcaption><div class="plot"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title, quote=True)}">{body}'
        f'<g class="cursor"><path d="M0,{TOP}V{HEIGHT - BOTTOM}"/></g></svg>'
        f'<div class="tip" hidden></div></div>'
        f'<script type="application/json">{data}</script></figure>\n'
    )
