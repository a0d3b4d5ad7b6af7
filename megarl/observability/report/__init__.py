"""One self-contained HTML file about one run, or several beside each other: `megarl report`.

runs.py        reads run directories; what a run reached on held-out prompts, and its interval
curves.py      which metrics are drawn, and where the time of a step goes
charts.py      draws; figure.html.jinja: one chart
summary.py     adds up what the run did, also for the console and summary.json

What stands on the page is chosen here, and laid out by page.html.jinja, report.css, report.js. It
needs no network; charts are inline SVG. A page that is served (live.js) renews itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from megarl.config.secrets import masked_yaml
from megarl.observability.report.charts import fill, percent, plain
from megarl.observability.report.curves import COLORS, GAP, all_charts, end_window, moves, with_gap
from megarl.observability.report.runs import (
    ACCURACY,
    Gain,
    Measure,
    Run,
    gain,
    last_interval,
    load_run,
    measures,
    pair_samples,
)
from megarl.observability.report.summary import summary_lines
from megarl.observability.stats_logger import duration, number

__all__ = ["Run", "load_run", "render_report", "write_report"]


SAMPLES = 12  # prompts with their answers that a report shows


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Holds one key figure: `value`, and what it was `before`. Below it stands `gain`, or `more`
    where there is none."""

    name: str
    value: str
    before: str = ""
    unit: str = ""
    more: str = ""
    gain: Gain | None = None


def write_report(
    path: str | Path, runs: Sequence[Run | str | Path], *, title: str | None = None
) -> Path:
    """Writes the report of `runs` to `path` and returns it.

    runs: run directories (stats.jsonl, samples.jsonl, config.yaml), "label=directory", or `Run`s;
    the first is the one the report is about, the others stand beside it (a control, other seeds).
    title: None is the first run's label. Secrets in the configuration are masked. Raises ValueError
    where no run is named.
    """
    html = render_report(runs, title=title, live="")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html, encoding="utf-8")
    return path


def render_report(sources: Sequence[Run | str | Path], *, title: str | None, live: str) -> str:
    """Returns the page of write_report. live: how the runs stand, of a page that renews itself; ""
    for a file."""
    if not sources:
        raise ValueError("a report needs at least one run directory")
    runs = [with_gap(run if isinstance(run, Run) else load_run(run)) for run in sources]
    run, title = runs[0], title or runs[0].label
    measure = next(iter(measures(run)), ACCURACY)
    pairs = pair_samples(run.samples)[:SAMPLES]
    return fill(
        "page.html.jinja",
        title=title,
        below=list(_below_title(run, title)),
        tiles=list(_tiles(run)),
        measure=measure.name.capitalize(),
        compared=[_compared(i, r, measure) for i, r in enumerate(runs)] if runs[1:] else [],
        drawn=all_charts(runs),
        summary=[*summary_lines(run.summary), *run.summary["paths"].items()] if run.summary else [],
        samples=pairs,
        shown=[w for w in ("before", "after") if any(p[w] for p in pairs)],
        config=masked_yaml(run.config) if run.config.strip() else "",
        live=live,
    )


def _below_title(run: Run, title: str) -> Iterator[str]:
    if title != run.label:
        yield run.label
    ends = [row["time"] for row in run.rows if row.get("time")]
    if ends:
        yield datetime.fromtimestamp(max(ends)).strftime("%-d %B %Y, %H:%M")


def _tiles(run: Run) -> Iterator[Tile]:
    yield from (_held_out_tile(run, measure) for measure in measures(run))
    if any(failed := run.values("eval/failed")):
        more = f"of the answers of one evaluation, at most; last {percent(failed[-1])}"
        yield Tile(name="Held-out failures", value=percent(max(failed)), more=more)
    if values := run.values("reward/mean"):
        n = end_window(len(values))
        yield Tile(
            name="Training reward",
            before=plain(statistics.fmean(values[:n])),
            value=plain(statistics.fmean(values[-n:])),
            more=f"mean of the first and the last {n} steps" if n > 1 else "first and last step",
        )
    if run.rows:
        seconds = run.summary.get("seconds", run.elapsed)
        took = f"in {duration(seconds)}" if seconds is not None else ""
        yield Tile(name="Steps", value=number(max(row["step"] for row in run.rows)), more=took)
    if times := run.values("timing/step_s"):
        value = f"{statistics.median(times):.2f}"
        yield Tile(name="Step time", value=value, unit="s", more=_speed(run))
    if means := run.values(f"{GAP}/mean"):
        worst = plain(max(run.values(f"{GAP}/max"), default=math.nan))
        more = f"nats, mean of tokens by the same weights; largest {worst}"
        value = plain(statistics.fmean(means))
        yield Tile(name="Trainer / server gap", value=value, more=more)
    for key, name in (("kl_ref", "KL to reference"), ("approx_kl", "KL to behaviour")):
        if moves(values := run.values(key)):
            yield Tile(name=name, value=plain(values[-1]), more="nats per token, last step")
            break


def _held_out_tile(run: Run, measure: Measure) -> Tile:
    name, change = f"Held-out {measure.name}", gain(run, measure)
    last = measure.format(run.values(measure.key)[-1])
    if change is None:
        interval = _interval(run, measure)
        return Tile(name=name, value=last, more=interval and f"95% CI {interval}")
    return Tile(name=name, before=measure.format(change.first), value=last, gain=change)


def _interval(run: Run, measure: Measure) -> str:
    bounds = last_interval(run, measure)
    return "" if bounds is None else measure.interval(bounds)


def _speed(run: Run) -> str:
    tokens = run.values("perf/tokens_per_s")
    return f"{number(round(statistics.median(tokens)))} tokens/s, medians" if tokens else "median"


def _compared(i: int, run: Run, measure: Measure) -> dict[str, Any]:
    """Returns one row of the table of runs."""
    values = run.values(measure.key)
    cells = [
        number(max((row["step"] for row in run.rows), default=0)),
        duration(run.elapsed) if run.elapsed is not None else "–",
        measure.format(values[0]) if len(values) > 1 else "–",
        measure.format(values[-1]) if values else "–",
        _interval(run, measure) or "–",
    ]
    color = i % COLORS
    return {"label": run.label, "color": color, "cells": cells, "gain": gain(run, measure)}
