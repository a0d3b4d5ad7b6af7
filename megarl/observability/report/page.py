"""The page: headline, key metrics, charts, runs side by side, summary, samples, configuration."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from datetime import datetime
from html import escape
from typing import Any

from megarl.config.secrets import masked_yaml
from megarl.observability.console import duration, number
from megarl.observability.report.assets import CSS, JS
from megarl.observability.report.formats import plain
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

_ARROW = " <small>→</small> "


def render_page(
    runs: list[Run],
    *,
    title: str,
    subtitle: str,
    samples: list[Mapping[str, Any]],
    config: str,
    max_samples: int,
) -> str:
    """Returns the report as one HTML page. The first run is the one it is about; `samples` are
    records as in samples.jsonl, of which it shows `max_samples` prompts."""
    sections = [
        _header(runs[0], title, subtitle),
        _tiles(runs[0]),
        _comparison(runs) if len(runs) > 1 else "",
        _charts(runs),
        _summary(runs[0]),
        _samples([dict(s) for s in samples], max_samples),
        _config(config),
        "<footer>Written by megarl. One file, no network.</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body><main>\n"
        + "\n".join(s for s in sections if s)
        + f"\n</main><script>{JS}</script></body></html>\n"
    )


def _header(run: Run, title: str, subtitle: str) -> str:
    parts = [subtitle] if subtitle else []
    if title != run.label:
        parts.append(run.label)
    ends = [row["time"] for row in run.rows if row.get("time")]
    if ends:
        parts.append(datetime.fromtimestamp(max(ends)).strftime("%-d %B %Y, %H:%M"))
    return f"<header><h1>{escape(title)}</h1><p>{escape(' · '.join(parts))}</p></header>"


def _tiles(run: Run) -> str:
    tiles = [
        *_held_out_tiles(run),
        _reward_tile(run),
        _steps_tile(run),
        _speed_tile(run),
        _gap_tile(run),
        _kl_tile(run),
    ]
    return f'<section class="tiles">{"".join(tiles)}</section>'


def _tile(name: str, value: str, more: str) -> str:
    """Returns one tile; `value` and `more` are HTML."""
    return (
        f'<div class="tile"><div class="name">{escape(name)}</div>'
        f'<div class="value">{value}</div><div class="more">{more}</div></div>'
    )


def _held_out_tiles(run: Run) -> list[str]:
    main = headline(run)
    if main is None:
        return []
    also = [REWARD] if main is ACCURACY and graded(run) else []
    return [_held_out_tile(run, measure) for measure in [main, *also]]


def _held_out_tile(run: Run, measure: Measure) -> str:
    name, change = f"Held-out {measure.name}", gain(run, measure)
    if change is None:
        value = measure.format(run.values(*measure.keys)[-1])
        return _tile(name, value, _interval(run, measure, "95% CI "))
    value = measure.format(change.first) + _ARROW + measure.format(change.last)
    return _tile(name, value, _gain(change))


def _gain(change: Gain) -> str:
    """Writes a gain, in green or red only where it is more than chance."""
    css = "up" if change.up else "down" if change.down else ""
    difference = f'<span class="{css}">{change.difference}</span>' if css else change.difference
    return difference + change.bounds


def _interval(run: Run, measure: Measure, prefix: str = "") -> str:
    bounds = last_interval(run, measure)
    return "" if bounds is None else prefix + measure.interval(bounds)


def _reward_tile(run: Run) -> str:
    values = run.values("reward/mean")
    if not values:
        return ""
    n = end_window(len(values))
    first, last = statistics.fmean(values[:n]), statistics.fmean(values[-n:])
    return _tile(
        "Training reward",
        plain(first) + _ARROW + plain(last),
        f"mean of the first and the last {n} steps" if n > 1 else "first and last step",
    )


def _steps_tile(run: Run) -> str:
    if not run.rows:
        return ""
    took = f"in {duration(run.elapsed)}" if run.elapsed is not None else ""
    return _tile("Steps", number(max(row["step"] for row in run.rows)), took)


def _speed_tile(run: Run) -> str:
    times = run.values("timing/step_s")
    if not times:
        return ""
    tokens = [
        row["tokens/total"] / row["timing/step_s"]
        for row in run.rows
        if row.get("tokens/total") and row.get("timing/step_s")
    ]
    more = f"{number(round(statistics.median(tokens)))} tokens/s, medians" if tokens else "median"
    return _tile("Step time", f"{statistics.median(times):.2f} <small>s</small>", more)


def _gap_tile(run: Run) -> str:
    worst = run.values(f"{GAP}/max")
    if not worst:
        return ""
    means = run.values(f"{GAP}/mean")
    more = f"largest of any token; mean {plain(statistics.fmean(means))}" if means else "largest"
    return _tile("Trainer / server gap", plain(max(worst)), more + " (nats)")


def _kl_tile(run: Run) -> str:
    reference = run.values("kl_ref")
    if reference:
        return _tile("KL to reference", plain(reference[-1]), "nats per token, last step")
    step = run.values("approx_kl")
    if not step:
        return ""
    return _tile("KL to behaviour", plain(statistics.median(step)), "nats per token, median")


def _comparison(runs: list[Run]) -> str:
    measure = headline(runs[0]) or ACCURACY
    what = measure.name.capitalize()
    head = "".join(
        f'<th class="{css}">{name}</th>'
        for name, css in (
            ("Run", ""),
            ("Steps", "num"),
            ("Wall time", "num"),
            (f"{what} before", "num"),
            (f"{what} after", "num"),
            ("95% CI", "num"),
            ("Gain", "num"),
        )
    )
    return (
        f'<h2>Runs</h2><div class="panel"><table><thead><tr>{head}</tr></thead><tbody>'
        + "".join(_comparison_row(i, run, measure) for i, run in enumerate(runs))
        + "</tbody></table></div>"
    )


def _comparison_row(i: int, run: Run, measure: Measure) -> str:
    values, change = run.values(*measure.keys), gain(run, measure)
    cells = [
        number(max((row["step"] for row in run.rows), default=0)),
        duration(run.elapsed) if run.elapsed is not None else "–",
        measure.format(values[0]) if len(values) > 1 else "–",
        measure.format(values[-1]) if values else "–",
        _interval(run, measure) or "–",
        _gain(change) if change is not None else "–",
    ]
    label = f'<td><i class="key c{i % COLORS}"></i>{escape(run.label)}</td>'
    return f"<tr>{label}" + "".join(f'<td class="num">{c}</td>' for c in cells) + "</tr>"


def _charts(runs: list[Run]) -> str:
    charts = all_charts(runs)
    return f'<h2>Curves</h2><section class="charts">{charts}</section>' if charts else ""


def _summary(run: Run) -> str:
    if not run.summary:
        return ""
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>"
        for name, text in summary_lines(run.summary)
    )
    return f'<h2>Summary</h2><div class="panel"><table>{rows}</table></div>'


def _config(config: str) -> str:
    if not config.strip():
        return ""
    return (
        '<h2>Configuration</h2><div class="panel"><details><summary>config.yaml</summary>'
        f"<pre>{escape(masked_yaml(config))}</pre></details></div>"
    )


def _samples(samples: list[dict[str, Any]], limit: int) -> str:
    """Shows completions of the same prompts before and after, turn by turn."""
    pairs = pair_samples(samples)[:limit]
    if not pairs:
        return ""
    shown = [w for w in ("before", "after") if any(p[w] for p in pairs)]
    head = "".join(f"<th>{w.capitalize()}</th>" for w in shown)
    rows = "".join(
        f"<tr><td><pre>{escape(p['prompt'])}</pre>"
        f'<div class="answer">answer: {escape(str(p["answer"]))}</div></td>'
        + "".join(f"<td>{_completion(p[w])}</td>" for w in shown)
        + "</tr>"
        for p in pairs
    )
    return (
        '<h2>Samples</h2><div class="panel"><table class="samples"><thead><tr><th>Prompt</th>'
        f"{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _completion(sample: dict[str, Any] | None) -> str:
    if sample is None:
        return "–"
    return _chip(sample.get("reward")) + _text(sample)


def _chip(reward: float | None) -> str:
    if reward is None:
        return ""
    css, mark = ("right", "✓") if reward >= 1 else ("part", "◐") if reward > 0 else ("wrong", "✗")
    return f'<span class="chip {css}">{mark} reward {plain(float(reward))}</span>'


def _text(sample: dict[str, Any]) -> str:
    """Shows the completion, or turn by turn what the model wrote and what it was told."""
    turns = sample.get("turns")
    if not turns:
        return f"<pre>{escape(str(sample.get('completion', '')))}</pre>"
    return "".join(
        f'<div class="turn {"" if turn["who"] == "model" else "told"}">'
        f"<b>{escape(turn['who'])}</b><pre>{escape(turn['text'].strip())}</pre></div>"
        for turn in turns
    )
