"""Sums up a run: what it did, and that its books balance.

The summary is a pure function of stats.jsonl, so that the totals of a resumed run are those of the
whole run.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import ROUNDED
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megarl.config.secrets import masked_message
from megarl.observability.report.charts import plain
from megarl.observability.report.curves import OUTSIDE_STEP, end_window, step_phases
from megarl.observability.report.runs import ACCURACY, PAIRS, REWARD, Gain, Run, gain, measures
from megarl.observability.stats_logger import duration, number
from megarl.utils.user_errors import in_one_line

Summary = dict[str, Any]

SUMMARY_FILE = "summary.json"
REST = "start_and_other"  # a phase: until the first step, and what nobody timed
COUNTERS = ("submitted", "running", "accepted", "rejected", "failed", "dropped")
_FAILED = "rollout/failed_samples/"  # begins the names of counts by kind
# what a run may leave behind, by the name the summary gives it
_PATHS = {
    "final model": "final",
    "saved models": "hf",
    "checkpoints": "recover",
    "logs": "logs",
    "episodes (megarl view)": "episodes",
}
# name in the summary -> what evaluations measure
_MEASURES = {"accuracy": ACCURACY, "pairs_ranked_right": PAIRS, "eval_reward": REWARD}


def summarize(
    run: Run,
    *,
    seconds: float,
    total_steps: int | None = None,
    final: Mapping[str, float] | None = None,
    error: BaseException | None = None,
) -> Summary:
    """Returns plain data for summary.json.

    final: counters rollout/... as the run ends, which win over those of the last step. error: what
    ended the run. Metrics that the kind of run does not have (supervised training has no rollouts)
    are left out.
    """
    last = (run.rows[-1] if run.rows else {}) | dict(final or {})
    steps = run.rows[-1]["step"] if run.rows else 0
    summary: Summary = {
        "run": run.label,
        "status": _status(error, early=total_steps is not None and steps < total_steps),
        "steps": steps,
        "total_steps": total_steps,
        "seconds": round(seconds, 3),
        "samples_trained": _total(run, "tokens/sequences") - _total(run, "skipped_sequences"),
        "tokens_trained": _total(run, "tokens/trained") - _total(run, "skipped_tokens"),
        "skipped_updates": _total(run, "skipped_updates"),
        "samples_skipped": _total(run, "skipped_sequences"),
        "seconds_by_phase": _phases(run, seconds),
    }
    if "rollout/submitted" in last:
        summary |= _rollouts(last, summary["samples_trained"], summary["samples_skipped"])
    ends = {"reward": "reward/mean", "loss": "loss"}
    summary |= {name: _ends(run, key) for name, key in ends.items() if run.values(key)}
    summary |= _held_out(run)
    if syncs := run.values("weight_sync/total_s"):
        nbytes = int(sum(run.values("weight_sync/bytes")))
        summary["weight_syncs"] = {"count": len(syncs), "bytes": nbytes}
    return summary


def _status(error: BaseException | None, *, early: bool) -> str:
    if error is None:
        return "stopped early" if early else "finished"
    return f"failed: {masked_message(in_one_line(error))}"


def _total(run: Run, metric: str) -> int:
    return int(sum(run.values(metric)))


def _rollouts(last: Mapping[str, float], samples: int, skipped: int) -> Summary:
    """Returns the counts of prompts. `samples` were trained and `skipped` were not, as the steps'
    metrics have it: the books must agree."""
    counts = {name: int(last[f"rollout/{name}"]) for name in COUNTERS}
    prompts, handed_out = (int(last[f"rollout/{n}"]) for n in ("trained", "handed_out"))
    booked = int(last["rollout/trained_samples"]), int(last.get("rollout/skipped_samples", 0))
    prompts_skipped = int(last.get("rollout/skipped", 0))
    return {
        "prompts": counts,
        "prompts_trained": prompts,
        "prompts_skipped": prompts_skipped,
        "handed_out_untrained": handed_out - prompts - prompts_skipped,
        "each_sample_trained_once": (samples, skipped) == booked,
        "failed_rollouts": {
            name.removeprefix(_FAILED): int(count)
            for name, count in last.items()
            if name.startswith(_FAILED) and name != f"{_FAILED}len_mean"
        },
    }


def _ends(run: Run, key: str) -> list[float]:
    """Returns [first, last], means over end_window values."""
    values = run.values(key)
    n = end_window(len(values))
    return [statistics.fmean(values[:n]), statistics.fmean(values[-n:])]


def _held_out(run: Run) -> Summary:
    """Returns [first, last] of what evaluations measured, and the 95 % interval of the gain where
    there is one."""
    out: Summary = {}
    for name, measure in _MEASURES.items():
        if measure not in measures(run):
            continue
        values, change = run.values(measure.key), gain(run, measure)
        out[name] = [values[0], values[-1]]
        if change is not None and change.interval is not None:
            out[f"{name}_gain_ci"] = list(change.interval)
    return out


def _phases(run: Run, seconds: float) -> dict[str, float]:
    """Returns the seconds in the phases of a step and beside it, and REST."""
    phases = {name: sum(values) for name, values in step_phases(run)[1] if name != "other"}
    phases |= {n: sum(run.values(f"timing/{n}_s")) for n in OUTSIDE_STEP}
    phases[REST] = max(0.0, seconds - sum(phases.values()))
    return {name: round(s, 3) for name, s in phases.items() if s > 0}


def summary_lines(summary: Summary) -> list[tuple[str, str]]:
    """Returns (name, text) for people, in reading order; the console and the report show
    the same."""
    of = f" of {summary['total_steps']}" if summary["total_steps"] else ""
    lines = [
        ("status", summary["status"]),
        ("steps", f"{summary['steps']}{of} in {duration(summary['seconds'])}"),
    ]
    if "prompts" in summary:
        lines.append(("prompts", _identity(summary["prompts"])))
    if summary["samples_trained"]:  # a script may log none
        lines.append(("trained", _trained(summary)))
    first = "reward" if "reward" in summary else "loss"
    if first in summary:
        lines.append((first, " → ".join(map(plain, summary[first]))))
    lines += _held_out_lines(summary)
    if failed := summary.get("failed_rollouts"):
        lines.append(("failed rollouts", ", ".join(f"{n} {kind}" for kind, n in failed.items())))
    if summary["skipped_updates"]:
        left_out = f", {summary['samples_skipped']} samples not trained"
        lines.append(("skipped updates", f"{summary['skipped_updates']}{left_out}"))
    if "weight_syncs" in summary:
        sync = summary["weight_syncs"]
        lines.append(("weight syncs", f"{sync['count']}, {number(sync['bytes'])}B in all"))
    if {*summary["seconds_by_phase"]} - {REST}:
        lines.append(("time, whole run", _time_split(summary["seconds_by_phase"])))
    return lines


def _held_out_lines(summary: Summary) -> list[tuple[str, str]]:
    lines = []
    for name, measure in _MEASURES.items():
        if name not in summary:
            continue
        before, after = summary[name]
        text = f"{measure.format(before)} → {measure.format(after)}"
        if interval := summary.get(f"{name}_gain_ci"):
            change = Gain(measure=measure, first=before, last=after, interval=tuple(interval))
            text += f" ({change.difference}{change.bounds})"
        lines.append((name.replace("_", " "), text))
    return lines


def _identity(prompts: Mapping[str, int]) -> str:
    terms = " + ".join(f"{prompts[name]} {name}" for name in COUNTERS[1:])
    return f"{prompts['submitted']} submitted = {terms}"


def _trained(summary: Summary) -> str:
    text = f"{summary['samples_trained']} samples, {number(summary['tokens_trained'])} tokens"
    if "prompts" not in summary:
        return text
    once = "each once" if summary["each_sample_trained_once"] else "NOT EACH ONCE"
    text += f", of {summary['prompts_trained']} prompts, {once}"
    if lost := summary["handed_out_untrained"]:
        text += f" (the run ended with {lost} more about to be trained)"
    return text


def _time_split(phases: Mapping[str, float]) -> str:
    total = sum(phases.values()) or 1.0
    shares = sorted(((100 * s / total, name) for name, s in phases.items()), reverse=True)
    return " · ".join(f"{name.replace('_', ' ')} {s:.0f}%" for s, name in shares if s >= 0.5)


def artifacts(run_dir: Path) -> dict[str, str]:
    """Returns the paths of what the run left behind, by name."""
    return {name: str(run_dir / file) for name, file in _PATHS.items() if (run_dir / file).exists()}


def print_summary(summary: Summary, console: Console | None = None) -> None:
    """Prints the summary in a frame, then its paths."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in summary_lines(summary):
        table.add_row(name, Text(text))
    good = not summary["status"].startswith("failed")
    title = Text(summary["run"], style="bold")
    panel = Panel(table, title=title, box=ROUNDED, border_style="green" if good else "red")
    console = console or Console(highlight=False)
    console.print(panel)
    for name, path in summary["paths"].items():  # outside the frame: long ones must stay whole
        console.print(Text(f"  {name + ':':14} {path}"), soft_wrap=True)
