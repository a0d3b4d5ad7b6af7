"""Chooses which metrics of a run are drawn, and how: METRICS is the list, in reading order."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from megarl.observability.report import held_out
from megarl.observability.report.bands import REWARD, band
from megarl.observability.report.formats import percent, plain
from megarl.observability.report.held_out import COLORS
from megarl.observability.report.phases import step_time
from megarl.observability.report.runs import Run
from megarl.observability.report.svg import GREY, Format, Line, LineChart, line_chart
from megarl.observability.report.turns import memory_by_turn

GAP = "train_rollout_logprob_abs_diff"
STALE = "staleness/max"  # above 0 in an asynchronous run, and only there
# what of reward/... is no part of a reward
OF_THE_WHOLE = (
    *("mean", "std", "mean_failed_as_zero"),
    *("pass_rate", "pass_at_group", "groups_all_equal", "groups_all_right"),
)


@dataclass(frozen=True)
class Metric:
    """Describes the chart of one quantity. `keys` are those of stats.jsonl, the main one first;
    where there are several, their last parts name the lines. In the place of keys a `*` stands for
    any one part of a name, which then names the line, but for `less`. It is drawn only if `where`,
    another key, is above 0 somewhere."""

    title: str
    keys: tuple[str, ...]
    note: str = ""
    smooth: bool = False
    log: bool = False
    format: Format = plain
    y_from: float | None = None
    where: str | None = None
    less: tuple[str, ...] = ()


METRICS = (
    Metric("Reward", ("reward/mean",), "mean over the training batch", smooth=True),
    Metric(
        "Parts of the reward",
        ("reward/*",),
        "mean over the training batch",
        smooth=True,
        less=OF_THE_WHOLE,
    ),
    Metric("Reward by data set", ("dataset/*/reward",), smooth=True),
    Metric(
        "Pass rate by difficulty",
        ("difficulty/*/pass_rate",),
        "of the training prompts, by their column `difficulty`",
        smooth=True,
        format=percent,
        y_from=0.0,
    ),
    Metric(
        "Groups that teach nothing",
        ("reward/groups_all_equal", "reward/groups_all_right"),
        "all rewards alike, and those of them that are all right",
        smooth=True,
        format=percent,
        y_from=0.0,
    ),
    Metric(
        "Response length",
        ("response_len/mean", "response_len/max"),
        "tokens written by the policy",
    ),
    Metric(
        "Length by outcome",
        ("response_len/right", "response_len/wrong", "response_len/cut"),
        "mean tokens of answers that are right, wrong, cut at the limit",
        smooth=True,
    ),
    Metric(
        "Answers cut",
        ("response_len/truncated",),
        "at gconfig.max_new_tokens",
        smooth=True,
        format=percent,
        where="response_len/truncated",
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
    Metric(
        "Logprob gap by age",
        ("mismatch/*/mean",),
        "mean |difference| of tokens that are so many versions old, nats",
        log=True,
        where=STALE,
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
    Metric("Advantages", ("advantage_std", "advantage_min", "advantage_max"), smooth=True),
    Metric(
        "Importance ratio",
        ("ratio_rms_dev", "ratio_abs_dev"),
        "how far from 1: root mean square, and mean",
        smooth=True,
    ),
    Metric(
        "Clipped tokens",
        ("clip_frac", "clip_frac_low", "clip_frac_high"),
        "fraction whose gradient the clip removes: in all, below and above",
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
        "Age of the trained tokens",
        ("staleness/*",),
        "share of the tokens that are so many versions old",
        format=percent,
        y_from=0.0,
        where=STALE,
        less=("mean", "max"),
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
    Metric(
        "Tokens per second", ("perf/tokens_per_s",), "of the batch, over whole steps", smooth=True
    ),
    Metric(
        "Model FLOP/s utilization",
        ("perf/mfu",),
        "of the update, beside the peak of the device",
        smooth=True,
        format=percent,
        y_from=0.0,
    ),
    Metric(
        "Memory",
        ("memory/gpu_reserved_gib", "memory/gpu_gib", "memory/host_gib"),
        "GiB of the trainer process that needs most",
        y_from=0.0,
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


def all_charts(runs: list[Run], earlier: Sequence[Run] = ()) -> Markup:
    """Draws every chart that has data, in reading order, each before the band of `earlier` runs.

    Steps of RL and of supervised training are not the same thing: a run of the other kind than the
    first one stands beside it by time alone.
    """
    peers = [run for run in runs if _is_rl(run) == _is_rl(runs[0])]
    main = held_out.headline(runs[0])
    measures = [main] if main else []
    if main is held_out.ACCURACY and held_out.graded(runs[0]):
        measures.append(held_out.REWARD)
    charts = [held_out.curve(runs, m, by_time=True) for m in measures[:1] if len(runs) > 1]
    charts += [held_out.curve(peers, m, by_time=False, earlier=earlier) for m in measures]
    charts += [held_out.by_dataset(runs[0], measure) for measure in measures]
    charts += [_metric(peers, metric, earlier) for metric in METRICS]
    charts += [step_time(run, several=len(runs) > 1) for run in peers]
    charts.append(memory_by_turn(runs[0]))
    return Markup().join(charts)


def _is_rl(run: Run) -> bool:
    return bool(run.values(REWARD))


def _metric(runs: list[Run], metric: Metric, earlier: Sequence[Run]) -> Markup:
    """Draws one metric. Colour tells runs apart, or series where there is one run; dashes tell
    series apart. Every series has its band, beside other runs the first alone."""
    if metric.where and not any(value > 0 for run in runs for value in run.values(metric.where)):
        return Markup()
    several, lines = len(runs) > 1, []
    named = _keys(runs[0], metric)
    for r, run in enumerate(runs):
        # beside other runs only the first shows its second series
        for s, (key, name) in enumerate(named if r == 0 else named[:1]):
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
    bands = _bands(earlier, named[:1] if several else named) if lines else []
    lines += [replace(line, color=GREY) for line in bands] if len(bands) == 1 else bands
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


def _bands(earlier: Sequence[Run], named: Sequence[tuple[str, str]]) -> list[Line]:
    """Returns the bands behind the lines of a chart, in their colours."""
    found = (band(earlier, key, of=name, color=s % COLORS) for s, (key, name) in enumerate(named))
    return [line for line in found if line is not None]


def _keys(run: Run, metric: Metric) -> list[tuple[str, str]]:
    """Returns the keys of the chart, each with the name of its line; "" where there is one line."""
    if "*" not in metric.keys[0]:
        several = len(metric.keys) > 1
        return [(key, key.rpartition("/")[2] if several else "") for key in metric.keys]
    pattern = re.compile(re.escape(metric.keys[0]).replace(r"\*", "([^/]+)"))
    found = {m[0]: m[1] for row in run.rows for key in row if (m := pattern.fullmatch(key))}
    return sorted((key, name) for key, name in found.items() if name not in metric.less)


def _spans_decades(lines: list[Line]) -> bool:
    values = [y for line in lines for _, y in line.points if y > 0 and math.isfinite(y)]
    return bool(values) and max(values) > 30 * min(values)
