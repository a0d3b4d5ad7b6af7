"""Draws a grid of small panels over the same axes, as one SVG file for the docs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.observability.report.scale import Scale, nice_ticks

COLUMNS = 4
WIDTH, HEIGHT = 220, 150  # of a panel
LEFT, RIGHT, TOP, FLOOR = 34, WIDTH - 12, 30, HEIGHT - 24
BLUE, GREY, INK = "#3e63dd", "#d8dde3", "#1f2933"
Points = Sequence[tuple[float, float]]


@dataclass(kw_only=True)
class Panel:
    """Describes one drawing: a curve for each seed, all at the same x. Their mean is drawn thick,
    and in grey behind it the means of the other panels."""

    title: str
    curves: Sequence[Points]

    @property
    def mean(self) -> list[tuple[float, float]]:
        """Returns the mean curve."""
        return [
            (ps[0][0], sum(y for _, y in ps) / len(ps)) for ps in zip(*self.curves, strict=True)
        ]


def draw(path: Path, panels: Sequence[Panel]) -> None:
    """Writes the panels to an SVG file, row by row."""
    rows = -(-len(panels) // COLUMNS)
    size = (WIDTH * COLUMNS, HEIGHT * rows)
    points = [p for panel in panels for curve in panel.curves for p in curve]
    x_ticks = nice_ticks(0.0, max(x for x, _ in points), 3)
    y_ticks = nice_ticks(min(y for _, y in points), max(y for _, y in points), 4)
    x = Scale(0.0, max(x for x, _ in points), LEFT, RIGHT)
    y = Scale(y_ticks[0], y_ticks[-1], FLOOR, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" '
        f'font-family="system-ui, sans-serif" font-size="10" fill="{INK}">',
        f'<rect width="{size[0]}" height="{size[1]}" fill="white"/>',
    ]
    means = [panel.mean for panel in panels]
    for i, panel in enumerate(panels):
        row, column = divmod(i, COLUMNS)
        parts.append(f'<g transform="translate({column * WIDTH} {row * HEIGHT})">')
        parts.append(f'<text x="{LEFT - 24}" y="18" font-weight="600" font-size="12">')
        parts[-1] += f"{panel.title}</text>"
        parts += _axes(x, y, [t for t in x_ticks if t <= x.hi], y_ticks)
        parts += [_line(mean, x, y, GREY, 1.0) for mean in means if mean is not means[i]]
        parts += [_line(curve, x, y, BLUE, 0.8) for curve in panel.curves]
        parts += [_line(means[i], x, y, BLUE, 2.4), "</g>"]
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _axes(x: Scale, y: Scale, x_ticks: list[float], y_ticks: list[float]) -> Iterator[str]:
    for tick in y_ticks:
        yield f'<path d="M{LEFT},{y(tick):.1f}H{RIGHT}" stroke="#eef0f3"/>'
        yield _text(LEFT - 5, y(tick) + 3, f"{tick:g}", "end")
    for tick in x_ticks:
        yield _text(x(tick), FLOOR + 14, f"{tick:,.0f}", "middle")


def _line(points: Points, x: Scale, y: Scale, color: str, width: float) -> str:
    path = " ".join(f"{x(px):.1f},{y(py):.1f}" for px, py in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
