"""Draws where the time of a step goes: its phases, each with a colour of its own in every
report."""

from __future__ import annotations

import re
import zlib

from markupsafe import Markup

from megarl.observability.report.formats import seconds
from megarl.observability.report.runs import Run
from megarl.observability.report.svg import (
    GREY,
    StackedChart,
    bin_size,
    binned,
    stacked_chart,
)

_PHASE = re.compile(r"timing/([^/]+)_s")
# in the order of a step, each with its colour class; a name not listed here has a colour by its
# spelling, so that it keeps it, too
PHASES = {
    "rollout": 0,
    "reward_model": 8,
    "logp": 1,
    "ref": 3,
    "values": 6,
    "train_critic": 4,
    "train": 2,
    "update_weights": 5,
}
OUTSIDE_STEP = ("eval", "save", "recover")  # timed beside the step, not inside it
_MAX_BARS = 70


def phase_color(name: str) -> int:
    """Returns the colour class of a phase; a phase that is not listed gets one by its spelling."""
    if name == "other":
        return GREY
    return PHASES.get(name, sorted(PHASES.values())[zlib.crc32(name.encode()) % len(PHASES)])


def step_phases(run: Run) -> tuple[list[float], list[tuple[str, list[float]]]]:
    """Returns (steps, [(phase, seconds per step)]): the phases inside a step, and "other" for the
    rest."""
    rows = [row for row in run.rows if row.get("timing/step_s") is not None]
    names = {m[1] for row in rows for key in row if (m := _PHASE.fullmatch(key))}
    names -= {"step", *OUTSIDE_STEP}
    known = [n for n in PHASES if n in names]
    ordered = known + sorted(names - set(known))
    phases = [(n, [float(row.get(f"timing/{n}_s") or 0.0) for row in rows]) for n in ordered]
    inside = [sum(parts) for parts in zip(*(s for _, s in phases), strict=True)]
    other = [
        max(0.0, float(row["timing/step_s"]) - (inside[i] if inside else 0.0))
        for i, row in enumerate(rows)
    ]
    return [float(row["step"]) for row in rows], [*phases, ("other", other)]


def step_time(run: Run, *, several: bool = False) -> Markup:
    """Draws the stacked seconds per step; long runs are averaged over neighbouring steps."""
    steps, phases = step_phases(run)
    if not steps:
        return Markup()
    total = sum(sum(s) for _, s in phases) or 1.0
    size = bin_size(len(steps), _MAX_BARS)
    layers = [
        (
            f"{name.replace('_', ' ')} {100 * sum(values) / total:.0f}%",
            phase_color(name),
            binned(values, size),
        )
        for name, values in phases
        if sum(values) >= 0.001 * total
    ]
    # the last bin may be short: its bar stands where a full one would, as far from its neighbour
    xs = [steps[i] + (size - 1) / 2 for i in range(0, len(steps), size)]
    note = run.label if several else ""
    if size > 1:
        note = ", ".join(p for p in (note, f"mean of {size} steps per bar") if p)
    return stacked_chart(
        StackedChart(title="Step time", note=note, xs=xs, layers=layers, format=seconds)
    )
