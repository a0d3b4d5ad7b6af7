"""Says by how much two programs differ on the same tokens, and whether that is more than rounding.

What rounding does is measured on the very tokens: transformers runs them once in the dtype of the
two programs (the coarser one, where they differ) and once in a wider one, and the two runs differ
by nothing but rounding. At every part of every layer, with the norms over a token's numbers,

    gap(t)      = |a(t) - b(t)| / |exact(t)|          a, b: the two programs
    rounding(t) = |rounded(t) - exact(t)| / |exact(t)|

A correct program is as far from the exact run as transformers is, so two of them are apart by about
1.4 times as much where their roundings are independent, and less where they are alike; the tests
hold every family, in float32 and bfloat16, to half of the bounds. A gap is a bug where its root
mean square over tokens is MEAN_FACTOR times rounding's, or its largest is TOKEN_FACTOR times
rounding's largest: one wrong token hides in a mean. The head is compared in nats: its sizes are 1.

Rounding grows from layer to layer, and is measured at each. So the first part that has a gap is
where the programs part; parts behind it read what it put out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.cli.gap.passes import Runs, differing
from megarl.engine.probe import EMBEDDING, FINAL_NORM, HEAD, MLP, ORDER, ROUTER, Part

MEAN_FACTOR, TOKEN_FACTOR = 4.0, 8.0
# tokens whose experts may differ: so many times those that rounding moves, and these few
FLIP_FACTOR, FEW_FLIPS = 4.0, 5
CHOICE = "router choice"
_MLP = ORDER.index(MLP)
_STAGE = {name: i for i, name in enumerate((*ORDER[:_MLP], CHOICE, *ORDER[_MLP:]))}


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Compares two programs at one part. mean, rounding: root mean squares over tokens, relative to
    the part's size (of the head nats); worst, worst_rounding: the largest. token: where the worst
    is. Of a router's choice: tokens, and those that rounding moves."""

    part: Part
    mean: float
    rounding: float
    worst: float
    worst_rounding: float
    token: int = 0

    @property
    def times(self) -> float:
        """Returns the gap in multiples of its bound: above 1 it is a bug."""
        if self.part.name == CHOICE:
            return self.mean / (FLIP_FACTOR * self.rounding + FEW_FLIPS)
        return max(
            self.mean / (MEAN_FACTOR * self.rounding),
            self.worst / (TOKEN_FACTOR * self.worst_rounding),
        )

    @property
    def is_bug(self) -> bool:
        """Returns whether the gap is more than rounding; NaN is."""
        return not self.times <= 1


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Holds what was found on so many `tokens`: `gaps` in the order of computation; of the
    `answers` tokens that the policy wrote, the mean and largest |difference| of log-probabilities,
    in nats. `sides`: of the first bug, how far each program is from the exact run, as Gap.times."""

    gaps: Sequence[Gap]
    tokens: int
    answers: int
    logp_mean: float
    logp_largest: float
    sides: tuple[float, float] | None = None

    @property
    def first(self) -> Gap | None:
        """Returns the first gap that is a bug, None where all is rounding."""
        return next((gap for gap in self.gaps if gap.is_bug), None)


def compare(runs: Runs) -> Comparison:
    """Compares the runs, part by part."""
    first, second = runs.first.parts, runs.second.parts
    parts = set(runs.exact.parts).intersection(first, second)
    gaps = [gap_at(part, first[part], second[part], runs) for part in parts]
    gaps += _choices(runs)
    gaps.sort(key=lambda gap: (gap.part.layer, _STAGE[gap.part.name]))
    head = next(part for part in parts if part.name == HEAD)
    apart = (first[head].double() - second[head].double()).abs()
    bug = next((gap for gap in gaps if gap.is_bug), None)
    if bug is not None and bug.part.name == CHOICE:
        bug = None
    return Comparison(
        gaps=gaps,
        tokens=len(runs.exact.parts[Part(0, MLP)]),
        answers=len(apart),
        logp_mean=float(apart.mean()),
        logp_largest=float(apart.max()),
        sides=_sides(bug.part, runs) if bug else None,
    )


def gap_at(part: Part, a: Tensor, b: Tensor, runs: Runs) -> Gap:
    """Compares `a` and `b` [T,...], what two programs put out at `part`."""
    apart, rounding = _relative(part, a - b, runs), _rounding(part, runs)
    return Gap(
        part=part,
        mean=_rms(apart),
        rounding=max(_rms(rounding), runs.unit),
        worst=float(apart.max()),
        worst_rounding=max(float(rounding.max()), runs.unit),
        token=int(apart.argmax()),
    )


def _rounding(part: Part, runs: Runs) -> Tensor:
    return _relative(part, runs.rounded.parts[part] - runs.exact.parts[part], runs)


def _relative(part: Part, difference: Tensor, runs: Runs) -> Tensor:
    """Returns the size [T] of a difference [T,...], over that of what the exact run has there."""
    apart = difference.double().norm(dim=-1)
    if part.name == HEAD:
        return apart
    tiny = torch.finfo(torch.float64).tiny
    return apart / runs.exact.parts[part].double().norm(dim=-1).clamp(min=tiny)


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _choices(runs: Runs) -> list[Gap]:
    """Returns, of every layer with experts, the tokens that the second program would have sent
    elsewhere than the first did, beside those that rounding moves: both had the first's experts in
    the layers before."""
    given = runs.first.routes
    if given is None:
        return []
    layers = [part.layer for part in runs.exact.parts if part.name == ROUTER]
    moved = _flips(runs.rounded.routes, runs.exact.routes)
    usual = sum(int(moved[:, i].sum()) for i in layers) / len(layers)
    flips = _flips(given, runs.second.routes)
    return [
        Gap(
            part=Part(i, CHOICE),
            mean=int(flips[:, i].sum()),
            rounding=max(int(moved[:, i].sum()), usual),
            worst=0,
            worst_rounding=1,
            token=int(flips[:, i].int().argmax()),
        )
        for i in layers
    ]


def _flips(a: Tensor | None, b: Tensor | None) -> Tensor:
    """Returns which tokens have other experts, [T,L]."""
    assert a is not None and b is not None, "both runs are of one model"
    return differing(a, b)


def _sides(part: Part, runs: Runs) -> tuple[float, float]:
    """Returns how far from the exact run the first program is, and the second."""
    exact = runs.exact.parts[part]
    first, second = (
        gap_at(part, run.parts[part], exact, runs).times for run in (runs.first, runs.second)
    )
    return first, second


# what people read


def report(comparison: Comparison, other: str) -> Iterator[str]:
    """Yields the gaps, a line for each layer, and a verdict; `other`: the program beside the
    trainer."""
    yield "Gaps as multiples of what rounding does at the same place:"
    rows: dict[str, list[str]] = {}
    for gap in comparison.gaps:
        row, _, part = place(gap).rpartition(", ")
        rows.setdefault(row or part, []).append(f"{part if row else ''} {_figure(gap)}".strip())
    yield from (f"  {row:12}{', '.join(cells)}" for row, cells in rows.items())
    parts = [gap for gap in comparison.gaps if gap.part.name not in (CHOICE, HEAD)]
    largest = max(parts, key=lambda gap: gap.rounding)
    yield f"Rounding makes at most {largest.rounding:.1g} of a part's size, at {place(largest)}."
    mean, most = comparison.logp_mean, comparison.logp_largest
    yield (
        f"Log-probabilities of {comparison.answers} tokens of answers: a gap of {mean:.2g} nats in "
        f"the mean, {most:.2g} at most."
    )
    yield from verdict(comparison, other)


def _figure(gap: Gap) -> str:
    figure = (
        f"{gap.mean:.0f} tokens" if gap.part.name == CHOICE else f"{gap.mean / gap.rounding:.3g}"
    )
    return f"{figure} (!)" if gap.is_bug else figure


def verdict(comparison: Comparison, other: str) -> list[str]:
    """Returns the lines that say what was found; `other`: the program beside the trainer."""
    bug = comparison.first
    if bug is None:
        return [f"All of it is rounding: trainer and {other} compute the same model."]
    lines = [f"{place(bug)}: the first gap that is more than rounding. {_size(bug)}"]
    if comparison.sides is not None:
        lines += _referee(comparison.sides, other)
    return lines


def place(gap: Gap) -> str:
    """Returns where a gap is: layer and part."""
    single = gap.part.name in (EMBEDDING, FINAL_NORM, HEAD)
    return gap.part.name if single else f"layer {gap.part.layer}, {gap.part.name}"


def _size(bug: Gap) -> str:
    if bug.part.name == CHOICE:
        return (
            f"{bug.mean:.0f} tokens would go to other experts, the first is token {bug.token}; "
            f"rounding moves {bug.rounding:.3g}."
        )
    unit = " nats" if bug.part.name == HEAD else ""
    return (
        f"It is {bug.mean:.2g}{unit} where rounding makes {bug.rounding:.2g}, and at most "
        f"{bug.worst:.2g}, at token {bug.token}, where rounding makes {bug.worst_rounding:.2g}."
    )


def _referee(sides: tuple[float, float], other: str) -> list[str]:
    """Returns whom transformers, in a wider dtype, agrees with."""
    off = [name for name, times in zip(("trainer", other), sides) if not times <= 1]
    if len(off) == 1:
        return [f"transformers, in a wider dtype, disagrees with the {off[0]} alone."]
    both = "both" if off else "neither by itself"
    return [f"transformers, in a wider dtype, disagrees with {both}."]
