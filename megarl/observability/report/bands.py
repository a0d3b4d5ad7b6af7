"""Draws what earlier runs did behind the curves of a run: at each step their lowest, highest and
median value."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from megarl.observability.report.runs import Run
from megarl.observability.report.svg import GREY, Line

REWARD = "reward/mean"  # of RL, and of RL alone
NOT_METRICS = ("step", "time", "elapsed_s", "epoch")


def band(earlier: Sequence[Run], *keys: str, of: str = "", color: int = GREY) -> Line | None:
    """Returns the line of the medians of `earlier` runs within their lowest and highest values, at
    every step for which one of them has a number; None where none has. keys: see Run.points; of:
    the line that it stands behind, where there are several."""
    values: dict[float, list[float]] = {}
    for run in earlier:
        for step, value in run.points(*keys):
            values.setdefault(step, []).append(value)
    if not values:
        return None
    steps = sorted(values)
    runs = "an earlier run" if len(earlier) == 1 else f"{len(earlier)} earlier runs"
    label = f"{runs}: {of or 'median, lowest to highest'}"
    return Line(
        label=label,
        points=[(x, statistics.median(values[x])) for x in steps],
        color=color,
        dashed=True,
        band=[(x, min(values[x]), max(values[x])) for x in steps],
    )


def check_bands(run: Run, earlier: Sequence[Run]) -> None:
    """Raises ValueError for an earlier run that shares no metric with `run`, or is supervised
    training where that is RL, whose steps are other things."""
    mine = _metrics(run)
    for other in earlier:
        theirs = _metrics(other)
        if not mine & theirs or (REWARD in mine) != (REWARD in theirs):
            raise ValueError(
                f"band: {other.label} shares no metric with {run.label} "
                f"({_some(theirs)} there, {_some(mine)} here); name runs of one recipe"
            )


def _metrics(run: Run) -> set[str]:
    found = {key for row in run.rows for key, value in row.items() if value is not None}
    return found - set(NOT_METRICS)


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:3]) + ", ..." * (len(names) > 3) if names else "none"
