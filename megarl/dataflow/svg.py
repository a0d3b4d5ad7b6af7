"""Writes SVG pictures that stand alone: shapes and text with the colours of megarl's figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from xml.sax.saxutils import escape, quoteattr

INK, SOFT, LINE = "#1f2933", "#52606d", "#9aa5b1"
# (fill, stroke) of a model: those of docs/images, and the report's further colours
COLORS = (
    ("#e0e8f9", "#4c6fc4"),
    ("#e3f8f0", "#2f8f70"),
    ("#fdeedd", "#c7721c"),
    ("#efe6fb", "#8a56d8"),
    ("#fce4ee", "#c8417f"),
    ("#f6f0cd", "#95790a"),
    ("#ddf1f5", "#0f8ea6"),
)
FONT = "system-ui, sans-serif"


class Svg:
    """Collects the marks of one picture, in px; what comes later lies above."""

    def __init__(self) -> None:
        self._marks: list[str] = []

    def path(self, d: str, *, stroke: str = LINE, fill: str = "none", **style: object) -> None:
        """Adds a path. style: further attributes, with _ for -."""
        self._add("path", "", {"d": d, "fill": fill, "stroke": stroke} | style)

    def rect(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        *,
        fill: str,
        stroke: str = "none",
        rx: float = 0,
        tip: str = "",
    ) -> None:
        """Adds a rectangle with corners rounded by `rx`. tip: what a pointer on it shows."""
        at = dict(x=f"{x:.1f}", y=f"{y:.1f}", width=f"{w:.1f}", height=f"{h:.1f}", rx=f"{rx:g}")
        self._add("rect", "", at | {"fill": fill, "stroke": stroke}, tip)

    def text(self, x: float, y: float, said: str, *, size: float = 12, **style: object) -> None:
        """Adds a line of text whose letters stand on `y`."""
        at = {"x": f"{x:.1f}", "y": f"{y:.1f}", "fill": INK, "font_size": f"{size:g}"}
        self._add("text", said, at | style)

    def _add(self, tag: str, inside: str, style: Mapping[str, object], tip: str = "") -> None:
        named = ((name.replace("_", "-"), str(value)) for name, value in style.items())
        said = " ".join(f"{name}={quoteattr(value)}" for name, value in named)
        inside = escape(inside) + (f"<title>{escape(tip)}</title>" if tip else "")
        self._marks.append(f"<{tag} {said}>{inside}</{tag}>" if inside else f"<{tag} {said}/>")

    def picture(self, width: float, height: float) -> str:
        """Returns the file: the marks on white, `width` by `height` px."""
        size = f"{width:.0f} {height:.0f}"
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="{FONT}">'
        ground = f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fff"/>'
        return "\n".join([head, ground, *self._marks, "</svg>", ""])


def width_of(said: str, size: float = 12) -> float:
    """Returns about how wide a text is, rather too wide, in px."""
    return 0.6 * size * len(said)


def colors_of(models: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Returns the (fill, stroke) of each model, in the order in which they first appear."""
    names = list(dict.fromkeys(models))
    return {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
