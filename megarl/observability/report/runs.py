"""Reads a run for the report: metrics by step, samples, configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.observability.run_log import RunLog

Points = list[tuple[float, float]]

# one object per evaluation: {"step", "rewards": {prompt: the rewards of its samples}}, and the
# "dataset" where it is one of valid_datasets
EVAL_REWARDS_FILE = "eval_rewards.jsonl"
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

    def points(self, *keys: str) -> Points:
        """Returns (step, value) wherever one of `keys` (aliases, the first present wins) has a
        number."""
        out = []
        for row in self.rows:
            value = next((row[k] for k in keys if row.get(k) is not None), None)
            if value is not None:
                out.append((float(row["step"]), float(value)))
        return out

    def values(self, *keys: str) -> list[float]:
        """Returns the values of `points`, by step."""
        return [y for _, y in self.points(*keys)]

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
