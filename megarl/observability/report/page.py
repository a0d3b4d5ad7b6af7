"""The page: headline, key figures, charts, runs side by side, summary, samples, configuration."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from datetime import datetime
from html import escape
from typing import Any

from megarl.observability.console import duration, number
from megarl.observability.report.assets import CSS, JS
from megarl.observability.report.figures import (
    ACCURACY,
    GAP,
    all_charts,
    end_window,
    percent,
    plain,
)
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
        _accuracy_tile(run),
        _reward_tile(run),
        _steps_tile(run),
        _speed_tile(run),
        _gap_tile(run),
        _kl_tile(run),
    ]
    return f'<section class="tiles">{"".join(tiles)}</section>'


def _tile(name: str, value: str, more: str) -> str:
    """`value` and `more` are HTML."""
    return (
        f'<div class="tile"><div class="name">{escape(name)}</div>'
        f'<div class="value">{value}</div><div class="more">{more}</div></div>'
    )


def _accuracy_tile(run: Run) -> str:
    values = run.values(*ACCURACY)
    if not values:
        return ""
    first, last = values[0], values[-1]
    if len(values) == 1:
        return _tile("Held-out accuracy", percent(first), _interval(run))
    more = " ".join(p for p in (_gain(first, last), _interval(run)) if p)
    return _tile("Held-out accuracy", percent(first) + _ARROW + percent(last), more)


def _gain(first: float, last: float) -> str:
    points = 100 * (last - first)
    return f'<span class="{"up" if points >= 0 else "down"}">{points:+.1f} points</span>'


def _interval(run: Run) -> str:
    """The confidence interval of the last evaluation."""
    evaluated = [row for row in run.rows if any(row.get(k) is not None for k in ACCURACY)]
    if not evaluated or evaluated[-1].get("eval/accuracy_lo") is None:
        return ""
    low, high = (100 * evaluated[-1][f"eval/accuracy_{b}"] for b in ("lo", "hi"))
    return f"(95% CI {low:.1f} to {high:.1f})"


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
    head = "".join(
        f'<th class="{css}">{name}</th>'
        for name, css in (
            ("Run", ""),
            ("Steps", "num"),
            ("Wall time", "num"),
            ("Accuracy before", "num"),
            ("Accuracy after", "num"),
            ("95% CI", "num"),
            ("Gain", "num"),
        )
    )
    return (
        f'<h2>Runs</h2><div class="panel"><table><thead><tr>{head}</tr></thead><tbody>'
        + "".join(_comparison_row(i, run) for i, run in enumerate(runs))
        + "</tbody></table></div>"
    )


def _comparison_row(i: int, run: Run) -> str:
    values = run.values(*ACCURACY)
    cells = [
        number(max((row["step"] for row in run.rows), default=0)),
        duration(run.elapsed) if run.elapsed is not None else "–",
        percent(values[0]) if len(values) > 1 else "–",
        percent(values[-1]) if values else "–",
        _interval(run).removeprefix("(95% CI ").removesuffix(")") or "–",
        _gain(values[0], values[-1]) if len(values) > 1 else "–",
    ]
    label = f'<td><i class="key c{i % 7}"></i>{escape(run.label)}</td>'
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


def _samples(samples: list[dict[str, Any]], limit: int) -> str:
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
    chip = ""
    if sample.get("reward") is not None:
        reward = float(sample["reward"])
        right = reward >= 1
        chip = (
            f'<span class="chip {"right" if right else "wrong"}">'
            f"{'✓' if right else '✗'} reward {plain(reward)}</span>"
        )
    return f"{chip}<pre>{escape(str(sample.get('completion', '')))}</pre>"


def _config(config: str) -> str:
    if not config.strip():
        return ""
    return (
        '<h2>Configuration</h2><div class="panel"><details><summary>config.yaml</summary>'
        f"<pre>{escape(config)}</pre></details></div>"
    )
