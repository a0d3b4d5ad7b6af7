"""Chooses which metrics of a run are drawn, and how: METRICS is the list, in reading order."""

from __future__ import annotations

import math
from dataclasses import dataclass

from markupsafe import Markup

from megarl.observability.report import held_out
from megarl.observability.report.formats import percent, plain
from megarl.observability.report.held_out import COLORS
from megarl.observability.report.phases import step_time
from megarl.observability.report.runs import Run
from megarl.observability.report.svg import Format, Line, LineChart, line_chart

GAP = "train_rollout_logprob_abs_diff"
STALE = "staleness/max"  # above 0 in an asynchronous run, and only there


@dataclass(frozen=True)
class Metric:
    """Describes the chart of one quantity. `keys` are those of stats.jsonl, the main one first;
    where there are two, their last parts name the lines. It is drawn only if `where`, another key,
    is above 0 somewhere."""

    title: str
    keys: tuple[str, ...]
    note: str = ""
    smooth: bool = False
    log: bool = False
    format: Format = plain
    y_from: float | None = None
    where: str | None = None


METRICS = (
    Metric("Reward", ("reward/mean",), "mean over the training batch", smooth=True),
    Metric(
        "Response length",
        ("response_len/mean", "response_len/max"),
        "tokens written by the policy",
    ),
    Metric(
        "Rows of a rollout",
        ("forks/rows_max", "forks/rows_per_rollout"),
        "a conversation that forks has several",
        where="forks/count",
    ),
    Metric(
        "Rollouts that failed",
        ("rollout/failed_in_batch",),
        "environment, reward, tool, server or time-out; made anew or left out",
        where="rollout/failed_in_batch",
    ),
    Metric(
        "KL to the behaviour policy",
        ("approx_kl",),
        "during the update, k3, nats per token",
        smooth=True,
    ),
    Metric("KL to the reference", ("kl_ref",), "k3, nats per token"),
    Metric("Entropy", ("entropy",), "of the next-token distribution, nats", smooth=True),
    Metric(
        "Trainer / server logprob gap",
        (f"{GAP}/max", f"{GAP}/mean"),
        "|difference| for the same tokens, nats",
        log=True,
    ),
    Metric("Loss", ("loss",), smooth=True),
    Metric(
        "Margin",
        ("margin",),
        "mean reward of the chosen less that of the rejected answers",
        smooth=True,
    ),
    Metric(
        "Logprob of the answers",
        ("logp_chosen", "logp_rejected"),
        "mean of a token, nats",
        smooth=True,
    ),
    Metric("Gradient norm", ("grad_norm",), "before clipping", smooth=True),
    Metric(
        "Clipped tokens",
        ("clip_frac",),
        "fraction whose gradient the clip removes",
        smooth=True,
        format=percent,
    ),
    Metric(
        "Explained variance",
        ("critic/explained_variance",),
        "share of the returns' variance that the critic foresees: 1 is perfect, 0 is none",
        smooth=True,
    ),
    Metric(
        "Value error",
        ("critic/value_error",),
        "mean |value - return| per token, during the critic's update",
        smooth=True,
        y_from=0.0,
    ),
    Metric("Critic loss", ("critic/loss",), smooth=True),
    Metric(
        "Staleness",
        ("staleness/mean", STALE),
        "versions between the weights that wrote a token and those it trains",
        where=STALE,
    ),
    Metric(
        "Effective sample size",
        ("behav_ess",),
        "Kish: what the tokens are worth under their importance weights",
        smooth=True,
        format=percent,
        y_from=0.0,
        where=STALE,
    ),
    Metric(
        "Dropped episodes",
        ("rollout/dropped",),
        "too old to train on when they were done, since the start",
        y_from=0.0,
        where=STALE,
    ),
)


def smoothing_window(n: int) -> int:
    """Returns how many points to average over: none for short runs, about a twentieth of
    long ones."""
    return 0 if n < 24 else max(5, n // 20)


def end_window(n: int) -> int:
    """Returns how many of n noisy values to average at either end; the two windows do not
    overlap."""
    return max(1, min(5, n // 2))


def all_charts(runs: list[Run]) -> Markup:
    """Draws every chart that has data, in reading order.

    Steps of RL and of supervised training are not the same thing: a run of the other kind than the
    first one stands beside it by time alone.
    """
    peers = [run for run in runs if _is_rl(run) == _is_rl(runs[0])]
    main = held_out.headline(runs[0])
    measures = [main] if main else []
    if main is held_out.ACCURACY and held_out.graded(runs[0]):
        measures.append(held_out.REWARD)
    charts = [held_out.curve(runs, m, by_time=True) for m in measures[:1] if len(runs) > 1]
    charts += [held_out.curve(peers, measure, by_time=False) for measure in measures]
    charts += [held_out.by_dataset(runs[0], measure) for measure in measures]
    charts += [_metric(peers, metric) for metric in METRICS]
    charts += [step_time(run, several=len(runs) > 1) for run in peers]
    return Markup().join(charts)


def _is_rl(run: Run) -> bool:
    return bool(run.values("reward/mean"))


def _metric(runs: list[Run], metric: Metric) -> Markup:
    """Draws one metric. Colour tells runs apart, or series where there is one run; dashes tell
    series apart."""
    if metric.where and not any(value > 0 for run in runs for value in run.values(metric.where)):
        return Markup()
    several, lines = len(runs) > 1, []
    for r, run in enumerate(runs):
        # beside other runs only the first shows its second series
        for s, key in enumerate(metric.keys if r == 0 else metric.keys[:1]):
            points = run.points(key)
            if not points:
                continue
            name = key.rpartition("/")[2] if len(metric.keys) > 1 else ""
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
        LineChart(
            title=metric.title,
            note=metric.note,
            lines=lines,
            format=metric.format,
            log=log,
            y_from=metric.y_from,
            named=several,
        )
    )


def _spans_decades(lines: list[Line]) -> bool:
    values = [y for line in lines for _, y in line.points if y > 0 and math.isfinite(y)]
    return bool(values) and max(values) > 30 * min(values)
