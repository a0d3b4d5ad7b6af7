"""Reads a run for the report: metrics by step, samples, configuration; and tells what it reached on
held-out prompts: accuracy or reward, before and after, the gain and its confidence interval.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megarl.observability.intervals import Estimate, correlation, difference_ci
from megarl.observability.report.charts import Format, percent, plain, signed
from megarl.observability.run_log import EVAL_REWARDS_FILE, RunLog

Points = list[tuple[float, float]]

_FIRST = ("config.yaml", "processes", "episodes")  # are there before the first step has ended


@dataclass(kw_only=True)
class Run:
    """Holds what a run left behind. `rows` are the objects of stats.jsonl, one per step,
    ascending."""

    label: str
    rows: list[dict[str, Any]]
    samples: list[dict[str, Any]] = field(default_factory=list)
    config: str = ""
    summary: dict[str, Any] = field(default_factory=dict)  # summary.json, of a run that ended
    # by the step of the evaluation, then by prompt
    eval_rewards: dict[int, dict[str, list[float]]] = field(default_factory=dict)

    def points(self, key: str) -> Points:
        """Returns (step, value) wherever a metric has a number."""
        rows = [row for row in self.rows if row.get(key) is not None]
        return [(float(row["step"]), float(row[key])) for row in rows]

    def values(self, key: str) -> list[float]:
        """Returns the values of `points`, by step."""
        return [y for _, y in self.points(key)]

    @property
    def datasets(self) -> list[str]:
        """Returns the names of the validation sets that have metrics of their own."""
        names = (key.split("/") for row in self.rows for key in row if key.startswith("eval/"))
        return list(dict.fromkeys(parts[1] for parts in names if len(parts) == 3))

    @property
    def elapsed(self) -> float | None:
        """Returns the seconds that the run took so far, None where no row says it."""
        seconds = [row["elapsed_s"] for row in self.rows if row.get("elapsed_s") is not None]
        return max(seconds) if seconds else None


def load_run(source: str | Path) -> Run:
    """Reads a run. `source` is its directory, or "label=directory"; the label defaults to its last
    two names (<experiment>/<trial>).

    A run before the end of its first step has no rows, a summary.json that is damaged counts as
    none. Raises FileNotFoundError for a directory without a run, ValueError for another file that
    is not JSON.
    """
    label, directory = "", Path(source)
    if "=" in str(source) and not directory.exists():
        label, _, name = str(source).partition("=")
        directory = Path(name)
    stats = directory / "stats.jsonl"
    if not any((directory / name).exists() for name in (stats.name, *_FIRST)):
        raise FileNotFoundError(f"{stats} does not exist: is {directory} a run directory?")
    by_step = {  # a step twice: the later line
        row["step"]: row for row in RunLog(stats).read() if isinstance(row.get("step"), int)
    }
    config = directory / "config.yaml"
    return Run(
        label=label or "/".join(directory.resolve().parts[-2:]),
        rows=[by_step[s] for s in sorted(by_step)],
        samples=RunLog(directory / "samples.jsonl").read(),
        config=config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
        summary=_read_summary(directory / "summary.json"),
        eval_rewards={
            row["step"]: row["rewards"]
            for row in RunLog(directory / EVAL_REWARDS_FILE).read()
            if "dataset" not in row  # of valid_datasets, the headline is not theirs
        },
    )


def _read_summary(path: Path) -> dict[str, Any]:
    """Returns what summary.json holds, {} where it is missing or damaged."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError:
        return {}
    return summary if isinstance(summary, dict) else {}


def pair_samples(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one record per prompt in order of appearance: {"prompt", "answer", "before",
    "after"}. The last two are sample records or None; the latest of several counts."""
    pairs: dict[str, dict[str, Any]] = {}
    for s in samples:
        prompt = prompt_text(s.get("prompt", ""))
        pair = pairs.setdefault(prompt, {"prompt": prompt, "before": None, "after": None})
        pair["answer"] = s.get("answer", "")
        if s.get("when") in ("before", "after"):
            pair[s["when"]] = s
    return [p for p in pairs.values() if p["before"] or p["after"]]


def prompt_text(prompt: Any) -> str:
    """Returns a prompt, which is text or a list of chat messages, as text."""
    if isinstance(prompt, list):
        return "\n".join(f"{m.get('role', '')}: {m.get('content', '')}" for m in prompt)
    return str(prompt)


# ---- what a run reached on held-out prompts


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Describes one thing that evaluations measure. `key` is its name in stats.jsonl; `score`
    turns one sample's reward into its score. `format` writes a value, `difference` a gain with its
    sign and unit, and `bound` an end of an interval."""

    name: str
    key: str
    score: Callable[[float], float]
    format: Format
    difference: Format
    bound: Format

    def interval(self, bounds: tuple[float, float]) -> str:
        """Writes the interval of a value or of a gain, as "3.1 to 21.9"."""
        return " to ".join(map(self.bound, bounds))


ACCURACY = Measure(
    name="accuracy",
    key="eval/accuracy",
    score=lambda reward: float(reward >= 1),
    format=percent,
    difference=lambda gain: f"{100 * gain:{'+' if gain else ''}.1f} points",
    bound=lambda value: f"{100 * value:.1f}",
)
# what the recipes dpo and rm call their accuracy
PAIRS = replace(ACCURACY, name="pairs ranked right")
REWARD = Measure(
    name="reward", key="eval/reward", score=float, format=plain, difference=signed, bound=plain
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
    accuracy = [ACCURACY] if run.values(ACCURACY.key) else []
    if not accuracy:
        return [REWARD] if run.values(REWARD.key) else []
    if not graded(run):
        return accuracy
    return [ACCURACY, REWARD] if any(run.values(ACCURACY.key)) else [REWARD]


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
    first, last = (float(row[measure.key]) for row in (rows[0], rows[-1]))
    return Gain(measure=measure, first=first, last=last, interval=interval)


def last_interval(run: Run, measure: Measure) -> tuple[float, float] | None:
    """Returns (low, high) of the last evaluation's value, or None."""
    rows = _evaluations(run, measure)
    estimate = _estimate(rows[-1], measure) if rows else None
    return None if estimate is None else (estimate.low, estimate.high)


def _evaluations(run: Run, measure: Measure) -> list[dict[str, Any]]:
    """Returns the rows of evaluations. One of pairs that are all ties, as before the first update,
    is none: its 50 % are so by construction."""
    rows = [row for row in run.rows if row.get(measure.key) is not None]
    return [row for row in rows if measure is not PAIRS or row["eval/margin"]]


def _estimate(row: dict[str, Any], measure: Measure) -> Estimate | None:
    low, high = (row.get(f"{measure.key}_{end}") for end in ("lo", "hi"))
    return None if low is None or high is None else Estimate(float(row[measure.key]), low, high)


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
