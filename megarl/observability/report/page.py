"""Chooses what stands on the page; page.html.jinja lays it out."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from megarl.config.secrets import masked_yaml
from megarl.observability.console import duration, number
from megarl.observability.report.formats import percent, plain
from megarl.observability.report.held_out import (
    ACCURACY,
    COLORS,
    REWARD,
    Gain,
    Measure,
    gain,
    graded,
    headline,
    last_interval,
)
from megarl.observability.report.metrics import GAP, all_charts, end_window
from megarl.observability.report.runs import Run, pair_samples
from megarl.observability.report.summary import summary_lines
from megarl.observability.report.templates import fill


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


def render_page(
    runs: list[Run],
    *,
    earlier: Sequence[Run] = (),
    title: str,
    subtitle: str,
    samples: Sequence[Mapping[str, Any]],
    config: str,
    max_samples: int,
) -> str:
    """Returns the report as one HTML page. The first run is the one it is about; `earlier` runs are
    drawn as a band behind its curves; `samples` are records as in samples.jsonl, of which it shows
    `max_samples` prompts."""
    run = runs[0]
    measure = headline(run) or ACCURACY
    pairs = pair_samples([dict(s) for s in samples])[:max_samples]
    return fill(
        "page.html.jinja",
        title=title,
        below=list(_below_title(run, title, subtitle)),
        tiles=list(_tiles(run)),
        measure=measure.name.capitalize(),
        compared=[_compared(i, r, measure) for i, r in enumerate(runs)] if runs[1:] else [],
        charts=all_charts(runs, earlier),
        summary=summary_lines(run.summary) if run.summary else [],
        samples=pairs,
        shown=[w for w in ("before", "after") if any(p[w] for p in pairs)],
        config=masked_yaml(config) if config.strip() else "",
    )


def _below_title(run: Run, title: str, subtitle: str) -> Iterator[str]:
    if subtitle:
        yield subtitle
    if title != run.label:
        yield run.label
    ends = [row["time"] for row in run.rows if row.get("time")]
    if ends:
        yield datetime.fromtimestamp(max(ends)).strftime("%-d %B %Y, %H:%M")


def _tiles(run: Run) -> Iterator[Tile]:
    main = headline(run)
    if main is not None:
        yield _held_out_tile(run, main)
    if main is ACCURACY and graded(run):
        yield _held_out_tile(run, REWARD)
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
        took = f"in {duration(run.elapsed)}" if run.elapsed is not None else ""
        yield Tile(name="Steps", value=number(max(row["step"] for row in run.rows)), more=took)
    if times := run.values("timing/step_s"):
        value = f"{statistics.median(times):.2f}"
        yield Tile(name="Step time", value=value, unit="s", more=_speed(run))
    if worst := run.values(f"{GAP}/max"):
        means = run.values(f"{GAP}/mean")
        mean = f"largest of any token; mean {plain(statistics.fmean(means))}"
        more = (mean if means else "largest") + " (nats)"
        yield Tile(name="Trainer / server gap", value=plain(max(worst)), more=more)
    if reference := run.values("kl_ref"):
        more = "nats per token, last step"
        yield Tile(name="KL to reference", value=plain(reference[-1]), more=more)
    elif moved := run.values("approx_kl"):
        value = plain(statistics.median(moved))
        yield Tile(name="KL to behaviour", value=value, more="nats per token, median")


def _held_out_tile(run: Run, measure: Measure) -> Tile:
    name, change = f"Held-out {measure.name}", gain(run, measure)
    last = measure.format(run.values(*measure.keys)[-1])
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
    values = run.values(*measure.keys)
    cells = [
        number(max((row["step"] for row in run.rows), default=0)),
        duration(run.elapsed) if run.elapsed is not None else "–",
        measure.format(values[0]) if len(values) > 1 else "–",
        measure.format(values[-1]) if values else "–",
        _interval(run, measure) or "–",
    ]
    color = i % COLORS
    return {"label": run.label, "color": color, "cells": cells, "gain": gain(run, measure)}
