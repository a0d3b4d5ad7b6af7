"""One HTML file that shows the episodes of a run, without network: `megarl view`.

viewer.html.jinja, viewer.css, records.js, viewer.js   the page; its colours are the report's

Lists cover all records; details are those of some groups, as `megarl.observability.episodes` packs
them, which the browser unpacks when it shows them.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from markupsafe import Markup

from megarl.observability.episodes import read_bytes, read_index
from megarl.observability.report.charts import fill
from megarl.observability.report.runs import Run, load_run
from megarl.utils.files import write_whole

LISTED = 20_000  # groups in lists, the newest
_SCRIPTS = ("records.js", "viewer.js")
Line = dict[str, Any]
_STATS = {  # what the list of steps takes from stats.jsonl, which knows every group
    "reward": "reward/mean",
    "length": "response_len/mean",
    "gap": "train_rollout_logprob_abs_diff/mean",
    "staleness": "staleness/max",
}


@dataclass(frozen=True, kw_only=True)
class Written:
    """Says what was written: bytes of the file, groups with details, groups and steps listed."""

    size: int
    detailed: int
    groups: int
    steps: int


def write_viewer(
    run_dir: Path,
    out: Path,
    *,
    steps: tuple[int, int] | None = None,
    groups: int | None = None,
    max_bytes: int = 32 << 20,
) -> Written | None:
    """Writes the page about the episodes of a run to `out`; None where none are recorded.

    steps: only steps from the first to the second, counted from 1. groups: details of so many
    groups of a step at most: those with most failures first, then those whose rewards differ most.
    max_bytes: of details; those of the newest steps come first."""
    first, last = steps or (0, math.inf)
    lines = [line for line in read_index(run_dir) if first <= line["step"] <= last][-LISTED:]
    if not lines:
        return None
    run = load_run(run_dir)
    details = dict(_details(run_dir, _chosen(lines, groups, max_bytes)))
    page = _page(lines, run, details)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, page)
    return Written(
        size=len(page.encode()),
        detailed=len(details),
        groups=len(lines),
        steps=len({line["step"] for line in lines}),
    )


def _page(lines: Sequence[Line], run: Run, details: Mapping[str, str]) -> str:
    shown = [_listed(line) | {"details": _name(line) in details} for line in lines]
    about = {
        "run": run.label,
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "steps": list(_steps(shown, run)),
        "groups": shown,
    }
    here = Path(__file__).parent
    script = "\n".join((here / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    return fill(
        "viewer.html.jinja",
        title=f"{run.label}: episodes",
        script=Markup(script),
        script_hash=_hash(script),
        about=_inert(about),
        details=details,
    )


def _chosen(lines: Sequence[Line], per_step: int | None, max_bytes: int) -> Iterator[Line]:
    """Yields the groups whose details fit, the newest steps first."""
    left = max_bytes
    for _, groups in reversed(_by_step(lines)):
        if per_step is not None:
            groups = sorted(groups, key=_interest, reverse=True)[:per_step]
        for line in groups:
            left -= -(-line["size"] // 3) * 4  # in base64
            if left < 0:
                return
            yield line


def _by_step(lines: Iterable[Line]) -> list[tuple[int, list[Line]]]:
    """Returns the lines of each step, as an index has them in order of steps."""
    return [(step, [*own]) for step, own in groupby(lines, itemgetter("step"))]


def _interest(line: Line) -> tuple[int, float]:
    return sum(line["failures"].values()), _spread(line["rewards"]) or 0.0


def _details(run_dir: Path, chosen: Iterable[Line]) -> Iterator[tuple[str, str]]:
    """Yields the name of each group and its record as text; one whose file is damaged is left
    out."""
    for line in chosen:
        with contextlib.suppress(OSError, ValueError):
            yield _name(line), base64.b64encode(read_bytes(run_dir, line)).decode()


def _name(line: Line) -> str:
    return f"{line['step']}.{line['episode']}"


def _listed(line: Line) -> Line:
    """Returns what lists show of a group. A rollout that left the batch counts as failed."""
    return {k: v for k, v in line.items() if k not in ("at", "size")} | {
        "name": _name(line),
        "reward": _mean(line["rewards"]),
        "spread": _spread(line["rewards"]),
        "length": _mean(line["lengths"]),
        "staleness": line["step"] - 1 - line["versions"][0] if line["versions"] else None,
    }


def _steps(groups: Sequence[Line], run: Run) -> Iterator[Line]:
    """Yields a line for each step, of its recorded groups; figures that stats.jsonl has of the
    whole step are taken from there."""
    stats = {row["step"]: row for row in run.rows}
    for step, own in _by_step(groups):
        failures: Counter[str] = Counter()
        for g in own:
            failures.update(g["failures"])
        line = {
            "step": step,
            "groups": len(own),
            "reward": _mean([r for g in own for r in g["rewards"]]),
            "spread": _mean([g["spread"] for g in own if g["spread"] is not None]),
            "length": _mean([n for g in own for n in g["lengths"]]),
            "failures": dict(failures),
            "forks": sum(g["forks"] for g in own),
            "cut": sum(g["cut"] for g in own),
            "staleness": max((g["staleness"] or 0 for g in own), default=None),
            "gap": None,
        }
        row = stats.get(step, {})
        yield line | {k: row[key] for k, key in _STATS.items() if row.get(key) is not None}


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _spread(rewards: Sequence[float]) -> float | None:
    """Returns the standard deviation of a group's rewards."""
    return statistics.pstdev(rewards) if rewards else None


def _inert(about: Mapping[str, Any]) -> Markup:
    """Returns JSON for a script element, which nothing in it can end."""
    text = json.dumps(about, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _hash(script: str) -> str:
    """Returns how the page's security policy names the one script that may run."""
    digest = hashlib.sha256(script.encode()).digest()
    return "sha256-" + base64.b64encode(digest).decode()
