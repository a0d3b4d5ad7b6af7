"""Tells what a run reached on held-out prompts: accuracy or reward, before and after, the gain
and its confidence interval, and their curves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from megarl.observability.intervals import Estimate, correlation, difference_ci
from megarl.observability.report.charts import (
    Format,
    Line,
    LineChart,
    line_chart,
    one_of,
    percent,
    plain,
    signed,
)
from megarl.observability.report.runs import Run

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
# what the recipes dpo and rm call their accuracy
PAIRS = replace(ACCURACY, name="pairs ranked right", keys=("eval/accuracy",))
REWARD = Measure(
    name="reward", keys=("eval/reward",), score=float, format=plain, difference=signed, bound=plain
)
MEASURES = (ACCURACY, PAIRS, REWARD)


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


def measures(run: Run) -> list[Measure]:
    """Returns what the run's evaluations measure, its headline first: its accuracy, and its reward
    where that is in parts of a point, alone where no sample was ever worth a whole one."""
    if run.values("eval/margin"):
        return [PAIRS]
    accuracy = [ACCURACY] if run.values(*ACCURACY.keys) else []
    if not accuracy:
        return [REWARD] if run.values(*REWARD.keys) else []
    if not graded(run):
        return accuracy
    return [ACCURACY, REWARD] if any(run.values(*ACCURACY.keys)) else [REWARD]


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
    first, last = (_value(row, measure) for row in (rows[0], rows[-1]))
    return Gain(measure=measure, first=first, last=last, interval=interval)


def last_interval(run: Run, measure: Measure) -> tuple[float, float] | None:
    """Returns (low, high) of the last evaluation's value, or None."""
    rows = _evaluations(run, measure)
    estimate = _estimate(rows[-1], measure) if rows else None
    return None if estimate is None else (estimate.low, estimate.high)


def _evaluations(run: Run, measure: Measure) -> list[dict[str, Any]]:
    """Returns the rows of evaluations. One of pairs that are all ties, as before the first update,
    is none: its 50 % are so by construction."""
    rows = [row for row in run.rows if any(row.get(k) is not None for k in measure.keys)]
    return [row for row in rows if measure is not PAIRS or row["eval/margin"]]


def _value(row: dict[str, Any], measure: Measure) -> float:
    return next(float(row[k]) for k in measure.keys if row.get(k) is not None)


def _estimate(row: dict[str, Any], measure: Measure) -> Estimate | None:
    low, high = (row.get(f"{measure.keys[0]}_{end}") for end in ("lo", "hi"))
    return None if low is None or high is None else Estimate(_value(row, measure), low, high)


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


def curves(runs: list[Run], measure: Measure) -> Markup:
    """Draws the measure with its confidence intervals; of several validation sets the reader
    chooses one."""
    names = dict.fromkeys(name for run in runs for name in run.datasets)
    whole = _curve(runs, measure, "", choice="all sets" if names else "")
    return one_of([whole, *(_curve(runs, measure, f"{name}/", choice=name) for name in names)])


def _curve(runs: list[Run], measure: Measure, dataset: str, *, choice: str) -> Markup:
    """Draws the measure of one validation set, "name/", or of all, ""."""
    keys = [f"eval/{dataset}{key.removeprefix('eval/')}" for key in measure.keys]
    lines = []
    for r, run in enumerate(runs):
        points = run.points(*keys)
        if not points:
            continue
        low, high = (dict(run.points(f"{keys[0]}_{end}")) for end in ("lo", "hi"))
        lines.append(
            Line(
                label=run.label if len(runs) > 1 else measure.name,
                points=points,
                color=r % COLORS,
                markers=len(points) <= 30,
                whiskers=[(x, low[x], high[x]) for x in low if x in high],
            )
        )
    return line_chart(
        LineChart(
            title=f"Held-out {measure.name}",
            note="bars: 95% confidence interval" if any(li.whiskers for li in lines) else "",
            choice=choice,
            lines=lines,
            format=measure.format,
            y_from=None if measure is REWARD else 0.0,
            named=len(runs) > 1,
        )
    )
