"""Which figures of a run are drawn, and how."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from megarl.observability.report.runs import Run
from megarl.observability.report.svg import (
    Format,
    Line,
    LineChart,
    StackedChart,
    line_chart,
    stacked_chart,
)

ACCURACY = ("eval/accuracy", "eval/exact_match")
GAP = "train_rollout_logprob_abs_diff"
COLORS = 7  # c0..c6; c7 is grey, for what is left over

_PHASE = re.compile(r"timing/([^/]+)_s")
_PHASE_ORDER = ("rollout", "logp", "ref", "train", "update_weights")
OUTSIDE_STEP = ("eval", "save", "recover")  # timed beside the step, not inside it
_MAX_BARS = 70


def percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def plain(value: float) -> str:
    """Short enough for an axis, three digits that matter."""
    if value == 0:
        return "0"
    if abs(value) >= 100_000 or abs(value) < 1e-3:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def seconds(value: float) -> str:
    return "0" if value == 0 else f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A chart of one quantity: `series` are (name, key of stats.jsonl), the main one first."""

    title: str
    note: str = ""
    series: tuple[tuple[str, str], ...]
    smooth: bool = False
    log: bool = False
    format: Format = plain


METRICS = (
    Metric(
        title="Reward",
        note="mean over the training batch",
        series=(("", "reward/mean"),),
        smooth=True,
    ),
    Metric(
        title="Response length",
        note="tokens written by the policy",
        series=(("mean", "response_len/mean"), ("max", "response_len/max")),
    ),
    Metric(
        title="KL to the behaviour policy",
        note="during the update, k3, nats per token",
        series=(("", "approx_kl"),),
        smooth=True,
    ),
    Metric(
        title="KL to the reference",
        note="k3, nats per token",
        series=(("", "kl_ref"),),
    ),
    Metric(
        title="Entropy",
        note="of the next-token distribution, nats",
        series=(("", "entropy"),),
        smooth=True,
    ),
    Metric(
        title="Trainer / server logprob gap",
        note="|difference| for the same tokens, nats",
        series=(("max", f"{GAP}/max"), ("mean", f"{GAP}/mean")),
        log=True,
    ),
    Metric(title="Loss", series=(("", "loss"),), smooth=True),
    Metric(
        title="Gradient norm",
        note="before clipping",
        series=(("", "grad_norm"),),
        smooth=True,
    ),
    Metric(
        title="Clipped tokens",
        note="fraction whose gradient the clip removes",
        series=(("", "clip_frac"),),
        smooth=True,
        format=percent,
    ),
)


def smoothing_window(n: int) -> int:
    """Points to average over: none for short runs, about a twentieth of long ones."""
    return 0 if n < 24 else max(5, n // 20)


def end_window(n: int) -> int:
    """How many of n noisy values to average at either end; the two windows do not overlap."""
    return max(1, min(5, n // 2))


def all_charts(runs: list[Run]) -> str:
    """Every chart that has data, in reading order.

    Steps of RL and of supervised training are not the same thing: a run of the other kind than the
    first one stands beside it by wall time only.
    """
    peers = [run for run in runs if _is_rl(run) == _is_rl(runs[0])]
    charts = [_accuracy(runs, by_time=True)] if len(runs) > 1 else []
    charts.append(_accuracy(peers, by_time=False))
    charts += [_metric(peers, metric) for metric in METRICS]
    charts.append(step_time(runs[0], several=len(runs) > 1))
    return "".join(charts)


def _is_rl(run: Run) -> bool:
    return bool(run.values("reward/mean"))


def _metric(runs: list[Run], metric: Metric) -> str:
    """Colour tells runs apart, or series where there is one run; dashes tell series apart."""
    several, lines = len(runs) > 1, []
    for r, run in enumerate(runs):
        # beside other runs only the first shows its second series
        for s, (name, key) in enumerate(metric.series if r == 0 else metric.series[:1]):
            points = run.points(key)
            if not points:
                continue
            label = " ".join(p for p in (run.label if several else "", name) if p)
            lines.append(
                Line(
                    label=label or metric.title,
                    points=points,
                    color=(r if several else s) % COLORS,
                    dashed=s > 0 and several,
                    smooth=smoothing_window(len(points)) if metric.smooth else 0,
                )
            )
    log = metric.log and _spans_decades(lines)
    return line_chart(
        LineChart(title=metric.title, note=metric.note, lines=lines, format=metric.format, log=log)
    )


def _spans_decades(lines: list[Line]) -> bool:
    values = [y for line in lines for _, y in line.points if y > 0 and math.isfinite(y)]
    return bool(values) and max(values) > 30 * min(values)


def _accuracy(runs: list[Run], *, by_time: bool) -> str:
    """Held-out accuracy with its confidence interval, by step or by minutes of the run."""
    x, scale = ("elapsed_s", 1 / 60) if by_time else ("step", 1.0)

    def at(value: float) -> float:
        return value * scale

    lines = []
    for r, run in enumerate(runs):
        points = [(at(px), v) for px, v in run.points(*ACCURACY, x=x)]
        if not points:
            continue
        low, high = (dict(run.points(f"eval/accuracy_{b}", x=x)) for b in ("lo", "hi"))
        lines.append(
            Line(
                label=run.label if len(runs) > 1 else "accuracy",
                points=points,
                color=r % COLORS,
                markers=len(points) <= 30,
                whiskers=[(at(px), low[px], high[px]) for px in low if px in high],
            )
        )
    whiskers = any(line.whiskers for line in lines)
    return line_chart(
        LineChart(
            title="Held-out accuracy" + (" by wall time" if by_time else ""),
            note="bars: 95% bootstrap confidence interval" if whiskers else "",
            lines=lines,
            format=percent,
            y_from=0.0,
            x_label="minutes" if by_time else "step",
        )
    )


def step_phases(run: Run) -> tuple[list[float], list[tuple[str, list[float]]]]:
    """(steps, [(phase, seconds per step)]): the phases inside a step, and "other" for the rest."""
    rows = [row for row in run.rows if row.get("timing/step_s") is not None]
    names = {m[1] for row in rows for key in row if (m := _PHASE.fullmatch(key))}
    names -= {"step", *OUTSIDE_STEP}
    known = [n for n in _PHASE_ORDER if n in names]
    ordered = known + sorted(names - set(known))
    phases = [(n, [float(row.get(f"timing/{n}_s") or 0.0) for row in rows]) for n in ordered]
    inside = [sum(parts) for parts in zip(*(s for _, s in phases), strict=True)]
    other = [
        max(0.0, float(row["timing/step_s"]) - (inside[i] if inside else 0.0))
        for i, row in enumerate(rows)
    ]
    return [float(row["step"]) for row in rows], [*phases, ("other", other)]


def step_time(run: Run, *, several: bool = False) -> str:
    """Stacked seconds per step; long runs are averaged over neighbouring steps."""
    steps, phases = step_phases(run)
    if not steps:
        return ""
    total = sum(sum(s) for _, s in phases) or 1.0
    size = math.ceil(len(steps) / _MAX_BARS)
    layers = []
    for i, (name, values) in enumerate(phases):
        if sum(values) < 0.001 * total:
            continue
        label = f"{name.replace('_', ' ')} {100 * sum(values) / total:.0f}%"
        layers.append((label, COLORS if name == "other" else i % COLORS, _bins(values, size)))
    # the last bin may be short: its bar stands where a full one would, as far from its neighbour
    xs = [steps[i] + (size - 1) / 2 for i in range(0, len(steps), size)]
    note = run.label if several else ""
    if size > 1:
        note = ", ".join(p for p in (note, f"mean of {size} steps per bar") if p)
    return stacked_chart(
        StackedChart(title="Step time", note=note, xs=xs, layers=layers, format=seconds)
    )


def _bins(values: list[float], size: int) -> list[float]:
    parts = [values[i : i + size] for i in range(0, len(values), size)]
    return [sum(p) / len(p) for p in parts]
