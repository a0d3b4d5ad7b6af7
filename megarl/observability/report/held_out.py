"""Tells what a run reached on held-out prompts: accuracy or reward, before and after, the gain
and its confidence interval, and their curves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from megarl.observability.intervals import Estimate, correlation, difference_ci
from megarl.observability.report.bands import band
from megarl.observability.report.formats import percent, plain, signed
from megarl.observability.report.runs import Run
from megarl.observability.report.svg import Format, Line, LineChart, line_chart

COLORS = 7  # c0..c6 tell runs apart


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Describes one thing that evaluations measure. `keys` are its names in stats.jsonl; `score`
    turns one sample's reward into its score. `format` writes a value, `difference` a gain with its
    sign and unit, and `bound` an end of an interval."""

    name: str
    keys: tuple[str, ...]
    score: Callable[[float], float]
    format: Format
    difference: Format
    bound: Format

    def interval(self, bounds: tuple[float, float]) -> str:
        """Writes the interval of a value or of a gain, as "3.1 to 21.9"."""
        return " to ".join(map(self.bound, bounds))


ACCURACY = Measure(
    name="accuracy",
    keys=("eval/accuracy", "eval/exact_match"),
    score=lambda reward: float(reward >= 1),
    format=percent,
    difference=lambda gain: f"{100 * gain:{'+' if gain else ''}.1f} points",
    bound=lambda value: f"{100 * value:.1f}",
)
REWARD = Measure(
    name="reward", keys=("eval/reward",), score=float, format=plain, difference=signed, bound=plain
)


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Compares the first with the last evaluation. `interval` is that of last - first; it is None
    where the run has no intervals."""

    measure: Measure
    first: float
    last: float
    interval: tuple[float, float] | None

    @property
    def up(self) -> bool:
        """Tells whether the whole interval of the gain is above 0."""
        return self.interval is not None and self.interval[0] > 0

    @property
    def down(self) -> bool:
        """Tells whether the whole interval of the gain is below 0."""
        return self.interval is not None and self.interval[1] < 0

    @property
    def difference(self) -> str:
        """Writes the gain."""
        return self.measure.difference(self.last - self.first)

    @property
    def bounds(self) -> str:
        """Writes ", 95% CI 3.1 to 21.9", or nothing."""
        return "" if self.interval is None else f", 95% CI {self.measure.interval(self.interval)}"


def headline(run: Run) -> Measure | None:
    """Returns the measure of the run: its accuracy, or its reward where that is in parts of a
    point and no sample was ever worth a whole one. None where nothing was evaluated.
    """
    if not run.values(*ACCURACY.keys):
        return REWARD if run.values(*REWARD.keys) else None
    return REWARD if graded(run) and not any(run.values(*ACCURACY.keys)) else ACCURACY


def graded(run: Run) -> bool:
    """Tells whether the reward says anything that the accuracy does not."""
    return any(
        row.get("eval/reward") is not None
        and abs(row["eval/reward"] - row.get("eval/accuracy", 0.0)) > 1e-6
        for row in run.rows
    )


def gain(run: Run, measure: Measure) -> Gain | None:
    """Compares the evaluations of a run; returns None for a run with fewer than two."""
    rows = _evaluations(run, measure)
    if len(rows) < 2:
        return None
    before, after = (_estimate(row, measure) for row in (rows[0], rows[-1]))
    interval = None
    if before is not None and after is not None:
        steps = (rows[0]["step"], rows[-1]["step"])
        interval = difference_ci(before, after, correlation=_correlation(run, measure, *steps))
    values = run.values(*measure.keys)
    return Gain(measure=measure, first=values[0], last=values[-1], interval=interval)


def last_interval(run: Run, measure: Measure) -> tuple[float, float] | None:
    """Returns (low, high) of the last evaluation's value, or None."""
    rows = _evaluations(run, measure)
    estimate = _estimate(rows[-1], measure) if rows else None
    return None if estimate is None else (estimate.low, estimate.high)


def _evaluations(run: Run, measure: Measure) -> list[dict[str, Any]]:
    return [row for row in run.rows if any(row.get(k) is not None for k in measure.keys)]


def _estimate(row: dict[str, Any], measure: Measure) -> Estimate | None:
    names = [f"eval/{measure.name}{end}" for end in ("_lo", "_hi")]
    value = next(row[k] for k in measure.keys if row.get(k) is not None)
    low, high = (row.get(name) for name in names)
    return None if low is None or high is None else Estimate(value, low, high)


def _correlation(run: Run, measure: Measure, first: float, last: float) -> float:
    """Returns the correlation of the two evaluations where they answered the same prompts,
    else 0."""
    before, after = (run.eval_rewards.get(int(step)) for step in (first, last))
    if not before or not after or set(before) != set(after):
        return 0.0
    sides = [
        [[measure.score(r) for r in side[prompt]] for prompt in before] for side in (before, after)
    ]
    return correlation(*sides)


def by_dataset(run: Run, measure: Measure) -> Markup:
    """Draws the measure of every validation set of a run with its confidence intervals; nothing
    where there is one set alone."""
    lines = []
    for color, name in enumerate(run.datasets):
        keys = [f"eval/{name}/{key.removeprefix('eval/')}" for key in measure.keys]
        points = run.points(*keys)
        ends = (f"eval/{name}/{measure.name}_{end}" for end in ("lo", "hi"))
        low, high = (dict(run.points(end)) for end in ends)
        lines.append(
            Line(
                label=name,
                points=points,
                color=color % COLORS,
                markers=len(points) <= 30,
                whiskers=[(x, low[x], high[x]) for x in low if x in high],
            )
        )
    if not lines:
        return Markup()
    return line_chart(
        LineChart(
            title=f"Held-out {measure.name} by data set",
            note="bars: 95% confidence interval" if any(li.whiskers for li in lines) else "",
            lines=lines,
            format=measure.format,
            y_from=None if measure is REWARD else 0.0,
            x_label="step",
            named=True,
        )
    )


def curve(
    runs: list[Run], measure: Measure, *, by_time: bool, earlier: Sequence[Run] = ()
) -> Markup:
    """Draws the measure with its confidence intervals, by step or by minutes of the run; by step
    before the band of `earlier` runs."""
    x, scale = ("elapsed_s", 1 / 60) if by_time else ("step", 1.0)
    lines = []
    for r, run in enumerate(runs):
        points = [(scale * px, v) for px, v in run.points(*measure.keys, x=x)]
        if not points:
            continue
        low, high = (dict(run.points(f"eval/{measure.name}_{b}", x=x)) for b in ("lo", "hi"))
        lines.append(
            Line(
                label=run.label if len(runs) > 1 else measure.name,
                points=points,
                color=r % COLORS,
                markers=len(points) <= 30,
                whiskers=[(scale * px, low[px], high[px]) for px in low if px in high],
            )
        )
    if lines and not by_time and (behind := band(earlier, *measure.keys)):
        lines.append(behind)
    return line_chart(
        LineChart(
            title=f"Held-out {measure.name}" + (" by wall time" if by_time else ""),
            note="bars: 95% confidence interval" if any(li.whiskers for li in lines) else "",
            lines=lines,
            format=measure.format,
            y_from=None if measure is REWARD else 0.0,
            x_label="minutes" if by_time else "step",
            named=len(runs) > 1,
        )
    )
