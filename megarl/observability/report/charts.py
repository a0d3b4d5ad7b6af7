"""Draws charts as inline SVG: points in, HTML out.

A chart is a <figure> with a header (title, legend), the drawing, and a JSON block from which the
page's script makes the hover box (figure.html.jinja). What is drawn are marks, each a path with its
CSS classes. Colours are classes, too (c0, c1, ...), so that light, dark and print each have
their own. Several charts may share one place, where the page's script lets the reader choose one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

Points = Sequence[tuple[float, float]]
Range = tuple[float, float, float]  # x, low, high
Format = Callable[[float], str]
Legend = list[tuple[str, str]]  # (label, CSS classes of its key)
Mark = tuple[str, str]  # (CSS classes, SVG path)
Layer = tuple[str, int, Sequence[float]]  # of bars: label, colour class, a height at every x

WIDTH, HEIGHT = 560, 264
LEFT, RIGHT, TOP, FLOOR = 52, WIDTH - 14, 12, HEIGHT - 38  # of the plot
MAX_POINTS = 400
GREY = 7  # the colour class of what belongs to no series


def percent(value: float) -> str:
    """Writes a share as 12.3%."""
    return f"{100 * value:.1f}%"


def plain(value: float) -> str:
    """Writes a number short enough for an axis, with three digits that matter."""
    if value == 0:
        return "0"
    if abs(value) >= 100_000 or abs(value) < 1e-3:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def signed(value: float) -> str:
    """Writes a number with its sign."""
    return f"+{plain(value)}" if value > 0 else plain(value)


def seconds(value: float) -> str:
    """Writes seconds with their unit."""
    return "0" if value == 0 else f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"


def fill(template: str, **values: Any) -> Markup:
    """Returns the HTML of a template beside this file, or of the viewer's, which shares the
    colours; `values` that are not Markup are escaped."""
    return Markup(_environment().get_template(template).render(values))


@cache
def _environment() -> Environment:
    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader([here, here.parent / "viewer"]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["plain"] = plain
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


@dataclass(kw_only=True)
class Line:
    """Describes one series. `whiskers` are (x, low, high), and so is `band`, an area behind the
    lines; `smooth` is a window in points, and 0 draws them as they are. Points may be means of
    `per_point` steps each."""

    label: str
    points: Points
    color: int
    smooth: int = 0
    per_point: int = 1
    markers: bool = False
    whiskers: Sequence[Range] = ()

    @property
    def is_smoothed(self) -> bool:
        """Tells whether the line is drawn as a moving average, and thinly as it is."""
        return self.smooth > 1 and len(self.points) > 2 * self.smooth


@dataclass(kw_only=True)
class Chart:
    """Describes a chart; `format` writes a value with its unit. `choice` is its name among charts
    that share one place (`one_of`)."""

    title: str
    note: str = ""
    format: Format = "{:.4g}".format
    choice: str = ""


def smooth(points: Points, window: int) -> list[tuple[float, float]]:
    """Returns the centred moving average, at the ends over what there is of the window."""
    values, half = [y for _, y in points], window // 2
    out = []
    for i, (x, _) in enumerate(points):
        part = values[max(0, i - half) : i + half + 1]
        out.append((x, sum(part) / len(part)))
    return out


def bin_size(n: int, limit: int = MAX_POINTS) -> int:
    """Returns how many of n neighbours make one, for at most `limit`."""
    return max(1, math.ceil(n / limit))


def binned(values: Sequence[float], size: int) -> list[float]:
    """Returns the means of every `size` neighbours; the last may be of fewer."""
    parts = [values[i : i + size] for i in range(0, len(values), size)]
    return [sum(part) / len(part) for part in parts]


def thin(points: Points, limit: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Averages neighbours, so that at most `limit` points are left."""
    size = bin_size(len(points), limit)
    xs, ys = ([p[i] for p in points] for i in (0, 1))
    return list(zip(binned(xs, size), binned(ys, size), strict=True))


def line_chart(
    chart: Chart,
    lines: Sequence[Line],
    *,
    log: bool = False,
    y_from: float | None = None,
    named: bool = False,
) -> Markup:
    """Draws a chart of lines over one axis; returns "" where there is no point. `y_from` is what
    its axis must reach; `named` has the legend name also a single line."""
    lines = [_prepare(line, log) for line in lines]
    xs = sorted({x for line in lines for x, _ in line.points})
    ys = [y for line in lines for _, y in line.points]
    ys += [v for line in lines for _, lo, hi in line.whiskers for v in (lo, hi)]
    if not xs:
        return Markup()
    y_ticks = log_ticks(min(ys), max(ys)) if log else _y_ticks(min(ys), max(ys), y_from)
    x = Scale(xs[0], xs[-1], LEFT + 6, RIGHT - 6)
    y = Scale(y_ticks[0], y_ticks[-1], FLOOR, TOP, log=log)
    marks = [mark for line in lines for mark in _line_marks(line, x, y)]
    series = [_line_values(line, xs, y, chart.format) for line in lines]
    return _figure(chart, x, y, xs, y_ticks, _line_legend(lines, named), marks, series)


def stacked_chart(chart: Chart, xs: Sequence[float], layers: Sequence[Layer]) -> Markup:
    """Draws a chart of bars at `xs`; returns "" where there is no bar."""
    totals = [sum(parts) for parts in zip(*(h for _, _, h in layers), strict=True)]
    if not totals:
        return Markup()
    y_ticks = nice_ticks(0.0, max(totals))
    gap = min(b - a for a, b in pairwise(xs)) if xs[1:] else 1.0
    x = Scale(xs[0] - gap / 2, xs[-1] + gap / 2, LEFT + 2, RIGHT)
    y = Scale(0.0, y_ticks[-1], FLOOR, TOP)
    width = min(28.0, (x(gap) - x(0.0)) * 0.82)
    marks, base = [], [0.0] * len(totals)
    for _, color, heights in layers:
        top = [b + h for b, h in zip(base, heights, strict=True)]
        bars = zip(xs, map(y, base), map(y, top), strict=True)
        path = "".join(
            f"M{x(px) - width / 2:.2f},{low:.2f}V{high:.2f}h{width:.2f}V{low:.2f}Z"
            for px, low, high in bars
        )
        marks.append((f"bar c{color}", path))
        base = top
    rows = [(label, f"c{color}", heights) for label, color, heights in reversed(layers)]
    series = [
        {"n": label, "c": css, "v": list(map(chart.format, values))}
        for label, css, values in (*rows, ("total", "", totals))
    ]
    legend = [(label, f"c{color}") for label, color, _ in layers]
    return _figure(chart, x, y, xs, y_ticks, legend, marks, series)


def one_of(charts: Sequence[Markup]) -> Markup:
    """Returns charts that share one place: the page's script shows the one that the reader chooses,
    the first to begin with."""
    drawn = [chart for chart in charts if chart]
    if len(drawn) < 2:
        return Markup().join(drawn)
    return Markup('<div class="choice">{}</div>').format(Markup().join(drawn))


def _prepare(line: Line, log: bool) -> Line:
    points = [(x, v) for x, v in line.points if math.isfinite(v) and (v > 0 or not log)]
    size = bin_size(len(points))
    return replace(line, points=thin(points), smooth=line.smooth // size, per_point=size)


def _y_ticks(lo: float, hi: float, y_from: float | None) -> list[float]:
    if 0 <= lo < 0.5 * hi:
        lo = 0.0
    return nice_ticks(lo if y_from is None else min(lo, y_from), hi)


def _line_legend(lines: list[Line], named: bool) -> Legend:
    """Returns the lines' names where there are several, or `named`; and what thin and thick mean,
    where the thick ones are averages."""
    legend = []
    if named or len(lines) > 1:
        legend = [(line.label, f"c{line.color}") for line in lines]
    if averaged := [line for line in lines if line.is_smoothed]:
        css = f"c{lines[0].color if len(lines) == 1 else GREY}"
        legend.append((_means(line.per_point for line in averaged), f"{css} raw"))
        legend.append((_means(line.per_point * line.smooth for line in averaged), css))
    return legend


def _means(steps: Iterator[int]) -> str:
    least, *_, most = sorted([*steps] * 2)
    if most == 1:
        return "each step"
    return f"mean of {least} steps" if least == most else f"mean of {least} to {most} steps"


def _line_marks(line: Line, x: Scale, y: Scale) -> Iterator[Mark]:
    def path(points: Points) -> str:
        return "M" + "L".join(f"{x(px):.1f},{y(py):.1f}" for px, py in points)

    css, points = f"c{line.color}", line.points
    if line.is_smoothed:
        yield f"line raw {css}", path(points)
        points = smooth(points, line.smooth)
    for wx, lo, hi in line.whiskers:
        px, a, b = x(wx), y(lo), y(hi)
        ends = "".join(f"M{px - 4:.1f},{end:.1f}h8" for end in (a, b))
        yield f"whisker {css}", f"M{px:.1f},{a:.1f}V{b:.1f}{ends}"
    yield f"line {css}", path(points)
    if line.markers or len(points) == 1:
        circle = "a3.2,3.2 0 1,0 6.4,0a3.2,3.2 0 1,0 -6.4,0"
        for px, py in points:
            yield f"dot {css}", f"M{x(px) - 3.2:.1f},{y(py):.1f}{circle}"


def _line_values(line: Line, xs: Sequence[float], y: Scale, fmt: Format) -> dict[str, Any]:
    """Returns what the hover box shows of the line at each of `xs`: the value as text, and the
    height of its dot."""
    at = dict(line.points)
    texts = {px: fmt(value) for px, value in line.points}
    for wx, lo, hi in line.whiskers:
        if wx in texts:
            texts[wx] += f" [{fmt(lo)}, {fmt(hi)}]"
    heights = [round(y(at[px]), 1) if px in at else None for px in xs]
    return {"n": line.label, "c": f"c{line.color}", "y": heights, "v": list(map(texts.get, xs))}


def _figure(
    chart: Chart,
    x: Scale,
    y: Scale,
    xs: Sequence[float],
    y_ticks: Sequence[float],
    legend: Legend,
    marks: Sequence[Mark],
    series: list[dict[str, Any]],
) -> Markup:
    """Fills the template. `series` is what the hover box shows at each of `xs`, which ascend: for
    every series n(ame), c(lass), v(alues) and, for lines, y (px)."""
    ends = (xs[0], xs[-1])
    x_ticks = [t for t in nice_ticks(*ends, 6) if ends[0] <= t <= ends[1]]
    x_ticks = [t for t in x_ticks if round(t, 6).is_integer()]  # there is no step 1.5
    places = [f"step {_tick_text(v)}" for v in xs]
    return fill(
        "figure.html.jinja",
        chart=chart,
        legend=legend,
        x_ticks=[(x(t), _tick_text(t)) for t in (x_ticks if xs[1:] else xs)],
        y_ticks=[(y(t), chart.format(t).replace(".0%", "%")) for t in y_ticks],
        marks=marks,
        hover={"x": [round(x(v), 1) for v in xs], "l": places, "s": series},
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        right=RIGHT,
        top=TOP,
        floor=FLOOR,
    )


def _tick_text(value: float) -> str:
    return f"{value:g}" if value == int(value) else f"{value:.4g}"


# axes


class Scale:
    """Maps data to pixels along one axis, linearly or by the base-10 logarithm."""

    def __init__(self, lo: float, hi: float, a: float, b: float, *, log: bool = False) -> None:
        self.log = log
        self.lo, self.hi = (math.log10(lo), math.log10(hi)) if log else (lo, hi)
        self.a, self.b = a, b

    def __call__(self, value: float) -> float:
        v = math.log10(value) if self.log else value
        span = self.hi - self.lo
        return self.a + (self.b - self.a) * ((v - self.lo) / span if span else 0.5)


def nice_ticks(lo: float, hi: float, n: int = 5) -> list[float]:
    """Returns about n round numbers (1, 2, 2.5, 5 times a power of ten) that enclose [lo, hi], but
    for a rounding error: 1.0000001 is no reason for a tick at 1.25."""
    if hi <= lo:
        hi = lo + (abs(lo) * 0.1 or 1.0)
    rough = (hi - lo) / max(1, n - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(lo / step + 1e-5), math.ceil(hi / step - 1e-5)
    return [round(i * step, 12) for i in range(first, last + 1)]


def log_ticks(lo: float, hi: float) -> list[float]:
    """Returns powers of ten that enclose [lo, hi], every second or third of them when there are
    many."""
    first, last = math.floor(math.log10(lo)), math.ceil(math.log10(hi))
    last = max(last, first + 1)
    step = max(1, math.ceil((last - first) / 5))
    return [10.0**e for e in range(first, last + step, step)]
