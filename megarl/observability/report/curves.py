"""Chooses the curves of a report. CHARTS have a title and a place; every other metric stands in the
chart of its group, the first part of its name, where the reader chooses one. What never changes is
listed with its value: a flat line teaches nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from megarl.observability.report.charts import (
    GREY,
    Chart,
    Line,
    bin_size,
    binned,
    line_chart,
    one_of,
    percent,
    plain,
    seconds,
    stacked_chart,
)
from megarl.observability.report.runs import MEASURES, Measure, Run, measures

COLORS = 7  # c0..c6 tell runs apart
GAP = "gap"  # with /mean and /max: train_rollout_logprob_abs_diff of what the same weights wrote
_GAP = "train_rollout_logprob_abs_diff"
_RL = "reward/mean"  # of RL, and of RL alone
# names of metrics that are shares
_SHARE = re.compile(
    r".*(_rate|_frac\w*|_ess|/mfu|/groups_all_\w+|/pass_at_\w+|/truncated|/failed|accuracy)"
    r"|staleness/age_\w+|moe/.*"
)
_ELSEWHERE = re.compile(r"step|time|elapsed_s|epoch|timing/.*|memory/.+/.*|eval/.*(_lo|_hi)")


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Describes a chart: of the metrics whose names match `keys`, where a group of the pattern
    names the line. log: the axis is logarithmic where the values span decades; from_zero: it
    reaches 0."""

    title: str
    keys: str
    note: str = ""
    log: bool = False
    from_zero: bool = False


CHARTS = (
    Curves(title="Reward", keys="reward/(mean)", note="training batch", from_zero=True),
    Curves(title="Parts of the reward", keys="reward/(?!mean|std|pass_|groups_|.+/std$)(.+)"),
    Curves(title="Reward by data set", keys="dataset/(.+)/reward"),
    Curves(title="Pass rate by difficulty", keys="difficulty/(.+)/pass_rate"),
    Curves(title="Groups that teach nothing", keys="reward/groups_(all_.+)"),
    Curves(title="Response length", keys="response_len/(mean|right|wrong|cut)", note="tokens"),
    Curves(title="Loss", keys="(loss)"),
    Curves(title="Held-out loss", keys="eval/(loss)"),
    Curves(title="Entropy", keys="(entropy)", note="nats"),
    Curves(title="KL to the reference", keys="(kl_ref)", note="k3, nats per token"),
    Curves(title="KL to the behaviour policy", keys="(approx_kl)", note="k3, nats per token"),
    Curves(
        title="Trainer / server gap",
        keys=f"{GAP}/(max|mean)",
        note="|difference of logprobs| of tokens that the trained weights wrote, nats",
        log=True,
    ),
    Curves(
        title="Gap by age",
        keys="mismatch/(age_.+)/mean",
        note="mean |difference of logprobs| of tokens so many versions old, nats",
        log=True,
    ),
    Curves(title="Age of the trained tokens", keys="staleness/(age_.+)", note="in versions"),
    Curves(title="Gradient norm", keys="(grad_norm)", note="before clipping"),
    Curves(title="Advantages", keys="advantage_(std|min|max)"),
    Curves(title="Importance ratio", keys="ratio_(.+)_dev", note="distance from 1"),
    Curves(title="Clipped tokens", keys="(clip_frac.*)"),
    Curves(title="Margin", keys="(margin)", note="reward of chosen less rejected answers"),
    Curves(title="Logprob of the answers", keys="logp_(chosen|rejected)", note="nats per token"),
    Curves(title="Tokens per second", keys="perf/(tokens_per_s)"),
    Curves(title="Memory", keys="memory/(.+)_gib", note="GiB of the process that needs most"),
)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Holds the charts with a place of their own, the other groups', and the (name, value) of what
    did not change."""

    charts: Markup
    more: Markup
    constant: list[tuple[str, str]]


def smoothing_window(n: int) -> int:
    """Returns how many points to average over: none for short runs, about a twentieth of
    long ones."""
    return 0 if n < 24 else max(5, n // 20)


def end_window(n: int) -> int:
    """Returns how many of n noisy values to average at either end; the two windows do not
    overlap."""
    return max(1, min(5, n // 2))


def moves(values: Sequence[float], *, fine: bool = False) -> bool:
    """Returns whether values differ by more than rounding does. fine: they are small by nature."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return False
    low, high = min(finite), max(finite)
    return high - low > max(1e-12 if fine else 1e-6, 1e-6 * max(abs(low), abs(high)))


def with_gap(run: Run) -> Run:
    """Returns the run with the gap between trainer and server apart from staleness: gap/mean and
    gap/max, of the tokens that the trained weights wrote, where a step has some."""
    rows = []
    for row in run.rows:
        fresh = {}
        for end in ("mean", "max"):
            value = row.get(f"mismatch/age_0/{end}")
            if value is None and not row.get("staleness/max"):
                value = row.get(f"{_GAP}/{end}")
            if value is not None:
                fresh[f"{GAP}/{end}"] = value
        rows.append(row | fresh)
    return replace(run, rows=rows)


def all_charts(runs: list[Run]) -> Drawn:
    """Draws the metrics of the first run, beside them those of other runs of its kind: steps of RL
    and of supervised training are not the same thing. Runs are those of `with_gap`."""
    peers = [run for run in runs if _is_rl(run) == _is_rl(runs[0])]
    drawn = [_held_out(peers, measure) for measure in measures(runs[0])]
    keys, constant = _metrics(peers)
    taken: set[str] = {measure.key for measure in MEASURES}
    elsewhere = [f"eval/{name}/" for name in runs[0].datasets]
    elsewhere += [] if any(runs[0].values("staleness/max")) else [f"{_GAP}/"]
    taken |= {key for key in keys if key.startswith(tuple(elsewhere))}
    for curves in CHARTS:
        matches = [m for key in keys if key not in taken and (m := re.fullmatch(curves.keys, key))]
        taken |= {m[0] for m in matches}
        drawn.append(_chart(peers, curves, {m[0]: m[1] for m in matches}))
    drawn += [step_time(run, several=len(peers) > 1) for run in peers]
    groups: dict[str, list[str]] = {}
    for key in keys:
        if key not in taken:
            groups.setdefault(key.partition("/")[0] if "/" in key else "update", []).append(key)
    more = [_group(peers, name, group) for name, group in sorted(groups.items())]
    return Drawn(charts=Markup().join(drawn), more=Markup().join(more), constant=constant)


def _is_rl(run: Run) -> bool:
    return bool(run.values(_RL))


def _metrics(runs: list[Run]) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns the names of the first run's metrics that move in one of the runs, and (name, value)
    of the others."""
    names = dict.fromkeys(
        key
        for row in runs[0].rows
        for key, value in row.items()
        if isinstance(value, int | float) and not _ELSEWHERE.fullmatch(key)
    )
    moving, constant = [], []
    for key in names:
        fine = key.endswith("lr") or key.startswith((GAP, _GAP, "mismatch/"))
        if any(moves(run.values(key), fine=fine) for run in runs):
            moving.append(key)
        elif not key.startswith(f"{GAP}/"):
            constant.append((key, plain(runs[0].values(key)[-1])))
    return moving, sorted(constant)


def _group(runs: list[Run], name: str, keys: Iterable[str]) -> Markup:
    """Draws one chart of a group's metrics that no other chart has; the reader picks the metric."""
    title = name.replace("_", " ").capitalize()
    return one_of([_lines(runs, Curves(title=title, keys=key), {key: key}) for key in sorted(keys)])


def _chart(runs: list[Run], curves: Curves, names: dict[str, str]) -> Markup:
    """Draws metrics, each with the name of its line: in one chart, or of several runs one metric at
    a time."""
    if len(runs) == 1:
        return _lines(runs, curves, names)
    return one_of([_lines(runs, curves, {key: name}) for key, name in names.items()])


def _lines(
    runs: list[Run], curves: Curves, names: dict[str, str], choice: str | None = None
) -> Markup:
    """Draws one chart. Colour tells runs apart, or metrics where there is one run. choice: its name
    among others in its place, that of a lone metric by default."""
    lines = []
    for r, run in enumerate(runs):
        for k, (key, name) in enumerate(names.items()):
            points, evaluated = run.points(key), key.startswith("eval/")
            low, high = (dict(run.points(f"{key}_{end}")) for end in ("lo", "hi"))
            line = Line(
                label=run.label if len(runs) > 1 else name,
                points=points,
                color=(r + k) % COLORS,
                smooth=0 if curves.log or evaluated else smoothing_window(len(points)),
                markers=evaluated and len(points) <= 30,
                whiskers=[(x, low[x], high[x]) for x in low if x in high],
            )
            lines += [line] if points else []
    log = curves.log and _spans_decades(lines)
    shares = all(map(_SHARE.fullmatch, names))
    notes = [curves.note] if curves.note else []
    notes += ["log axis"] if log else []
    notes += ["bars: 95% confidence interval"] if any(line.whiskers for line in lines) else []
    chart = Chart(
        title=curves.title,
        note=", ".join(notes),
        choice=("".join(names) if len(names) == 1 else "") if choice is None else choice,
        format=percent if shares else plain,
    )
    y_from = 0.0 if shares or curves.from_zero else None
    return line_chart(chart, lines, log=log, y_from=y_from, named=len(runs) > 1)


def _spans_decades(lines: list[Line]) -> bool:
    values = [y for line in lines for _, y in line.points if y > 0 and math.isfinite(y)]
    return bool(values) and max(values) > 30 * min(values)


def _held_out(runs: list[Run], measure: Measure) -> Markup:
    """Draws the measure with its confidence intervals; of several validation sets the reader
    chooses one."""
    curves = Curves(title=f"Held-out {measure.name}", keys=measure.key)
    sets = dict.fromkeys(name for run in runs for name in run.datasets)
    keys = {measure.key: "all sets" if sets else ""}
    keys |= {measure.key.replace("eval/", f"eval/{name}/"): name for name in sets}
    return one_of([_lines(runs, curves, {k: measure.name}, name) for k, name in keys.items()])


# ---- where the time of a step goes

_PHASE = re.compile(r"timing/([^/]+)_s")
# in the order of a step, each with its colour class in every report
PHASES = {
    "rollout": 0,
    "reward_model": 8,
    "logp": 1,
    "ref": 3,
    "renew_ref": 9,
    "teacher": 10,
    "values": 6,
    "train_critic": 4,
    "train": 2,
    "update_weights": 5,
    "episodes": 11,
    "record": 12,
}
OUTSIDE_STEP = ("eval", "save", "recover")  # timed beside the step, not inside it
_MAX_BARS = 70


def phase_colors(names: Iterable[str]) -> dict[str, int]:
    """Returns the colour class of each phase. One that is not listed has a colour that no other
    phase of the chart has, as long as there are some."""
    colors = {name: PHASES[name] for name in names if name in PHASES}
    free = [color for color in PHASES.values() if color not in colors.values()]
    others = sorted(name for name in names if name not in PHASES and name != "other")
    for i, name in enumerate(others):
        colors[name] = free[i] if i < len(free) else i % (GREY + 1)
    return colors | {"other": GREY}


def step_phases(run: Run) -> tuple[list[float], list[tuple[str, list[float]]]]:
    """Returns (steps, [(phase, seconds per step)]): the phases inside a step, and "other" for the
    rest."""
    rows = [row for row in run.rows if row.get("timing/step_s") is not None]
    names = {m[1] for row in rows for key in row if (m := _PHASE.fullmatch(key))}
    names -= {"step", *OUTSIDE_STEP}
    listed = [n for n in PHASES if n in names]
    ordered = listed + sorted(names - set(listed))
    phases = [(n, [float(row.get(f"timing/{n}_s") or 0.0) for row in rows]) for n in ordered]
    inside = [sum(parts) for parts in zip(*(s for _, s in phases), strict=True)]
    other = [
        max(0.0, float(row["timing/step_s"]) - (inside[i] if inside else 0.0))
        for i, row in enumerate(rows)
    ]
    return [float(row["step"]) for row in rows], [*phases, ("other", other)]


def step_time(run: Run, *, several: bool = False) -> Markup:
    """Draws the stacked seconds per step; long runs are averaged over neighbouring steps."""
    steps, phases = step_phases(run)
    if not steps:
        return Markup()
    total = sum(sum(s) for _, s in phases) or 1.0
    phases = [(name, values) for name, values in phases if sum(values) >= 0.001 * total]
    colors, size = phase_colors([name for name, _ in phases]), bin_size(len(steps), _MAX_BARS)
    layers = [
        (
            f"{name.replace('_', ' ')} {100 * sum(values) / total:.0f}%",
            colors[name],
            binned(values, size),
        )
        for name, values in phases
    ]
    # the last bin may be short: its bar stands where a full one would, as far from its neighbour
    xs = [steps[i] + (size - 1) / 2 for i in range(0, len(steps), size)]
    notes = [run.label] if several else []
    notes += ["shares of the steps' seconds, without start, evaluations and saves"]
    notes += [f"mean of {size} steps per bar"] if size > 1 else []
    return stacked_chart(
        Chart(title="Step time", note="; ".join(notes), format=seconds), xs, layers
    )
