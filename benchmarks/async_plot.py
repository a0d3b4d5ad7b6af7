"""Draws panels of lines side by side, as one SVG file for the docs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.observability.report.scale import Scale, nice_ticks

WIDTH, HEIGHT = 430, 300  # of a panel
LEFT, RIGHT, TOP, FLOOR = 50, WIDTH - 20, 62, HEIGHT - 46
COLORS = ("#3e63dd", "#d9730d", "#52606d")
INK = "#1f2933"


@dataclass(kw_only=True)
class Series:
    """Holds a line: at each x, the values of the seeds. It is drawn through their means, with a
    dot for each seed."""

    label: str
    points: dict[int, Sequence[float]]


@dataclass(kw_only=True)
class Panel:
    """Describes one drawing; `y_from` is what its axis must reach. The places on the x axis are
    equally far from each other, whatever their numbers."""

    title: str
    x_label: str
    series: Sequence[Series]
    y_from: float | None = None


def draw(path: Path, panels: Sequence[Panel]) -> None:
    """Writes the panels to an SVG file."""
    width = WIDTH * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}">',
        f'<rect width="{width}" height="{HEIGHT}" fill="white"/>',
    ]
    for i, panel in enumerate(panels):
        parts += [f'<g transform="translate({i * WIDTH} 0)">', *_panel(panel), "</g>"]
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _panel(panel: Panel) -> list[str]:
    xs = sorted({x for series in panel.series for x in series.points})
    ys = [y for series in panel.series for values in series.points.values() for y in values]
    ys += [] if panel.y_from is None else [panel.y_from]
    ticks = nice_ticks(min(ys), max(ys))
    x = Scale(0, len(xs) - 1, LEFT + 20, RIGHT - 10)
    y = Scale(ticks[0], ticks[-1], FLOOR, TOP)
    out = [f'<text x="10" y="20" font-weight="600" font-size="14">{panel.title}</text>']
    for tick in ticks:
        at = f"{y(tick):.1f}"
        out.append(f'<path d="M{LEFT},{at}H{RIGHT}" stroke="#e4e7eb"/>')
        out.append(_text(LEFT - 8, y(tick) + 4, f"{tick:g}", "end"))
    out += [_text(x(i), FLOOR + 18, str(value), "middle") for i, value in enumerate(xs)]
    out.append(_text((LEFT + RIGHT) / 2, HEIGHT - 8, panel.x_label, "middle"))
    for n, (series, color) in enumerate(zip(panel.series, COLORS, strict=False)):
        out += _line(series, color, [x(i) for i in range(len(xs))], xs, y)
        out.append(f'<rect x="{LEFT + 170 * n}" y="34" width="14" height="4" fill="{color}"/>')
        out.append(_text(LEFT + 20 + 170 * n, 40, series.label, "start"))
    return out


def _line(series: Series, color: str, at: list[float], xs: list[int], y: Scale) -> list[str]:
    there = [(px, series.points[x]) for px, x in zip(at, xs, strict=True) if x in series.points]
    means = [f"{px:.1f},{y(sum(values) / len(values)):.1f}" for px, values in there]
    dots = [(px, y(value)) for px, values in there for value in values]
    return [
        f'<polyline points="{" ".join(means)}" fill="none" stroke="{color}" stroke-width="2"/>',
        *(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{color}"/>' for a, b in dots),
    ]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
