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

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algos.kl import kl_estimate
from megarl.cli.gap.passes import Passed, differing
from megarl.engine.probe import HEAD, MLP, ORDER, ROUTER, Part

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
class LogpGaps:
    """Holds the gap of log-probabilities, in nats, over `tokens` that the policy wrote: mean and
    largest |difference|, and k3, the estimate of KL(server || trainer)."""

    tokens: int
    mean: float
    largest: float
    k3: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Holds what was found: `gaps` in the order of computation; `logp` with each program choosing
    its experts, `logp_same_experts` with the same experts (None without experts). `sides`: of the
    first bug, how far each program is from the exact run, as Gap.times. `experts`: those whose
    tokens all differ, where the first bug is an MLP with experts."""

    gaps: Sequence[Gap]
    logp: LogpGaps
    logp_same_experts: LogpGaps | None
    tokens: int
    sides: tuple[float, float] | None = None
    experts: tuple[int, ...] = ()

    @property
    def first(self) -> Gap | None:
        """Returns the first gap that is a bug, None where all is rounding."""
        return next((gap for gap in self.gaps if gap.is_bug), None)


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Holds the runs that are compared. `first` is the trainer's, `second` the server's (or
    transformers') with the trainer's experts, `second_free` with its own; `rounded` and `exact` are
    transformers', with the trainer's experts. unit: half the distance of 1 to the next number of
    the coarser dtype."""

    first: Passed
    second: Passed
    second_free: Passed
    rounded: Passed
    exact: Passed
    unit: float


def compare(runs: Runs) -> Comparison:
    """Compares the runs, part by part."""
    parts = set(runs.exact.parts).intersection(runs.first.parts, runs.second.parts)
    gaps = [gap_at(part, runs.first.parts[part], runs.second.parts[part], runs) for part in parts]
    gaps += _choices(runs)
    gaps.sort(key=lambda gap: (gap.part.layer, _STAGE[gap.part.name]))
    head = next(part for part in parts if part.name == HEAD)
    bug = next((gap for gap in gaps if gap.is_bug), None)
    continuous = None if bug is None or bug.part.name == CHOICE else bug
    return Comparison(
        gaps=gaps,
        logp=logp_gaps(runs.first.parts[head], runs.second_free.parts[head]),
        logp_same_experts=None
        if runs.first.routes is None
        else logp_gaps(runs.first.parts[head], runs.second.parts[head]),
        tokens=len(runs.exact.parts[Part(0, MLP)]),
        sides=_sides(continuous.part, runs) if continuous else None,
        experts=_experts(continuous, runs) if continuous else (),
    )


def logp_gaps(trainer: Tensor, server: Tensor) -> LogpGaps:
    """Returns the gap between two programs' log-probabilities [n,1] of the same tokens."""
    ours, theirs = trainer.double(), server.double()
    apart = (ours - theirs).abs()
    return LogpGaps(
        tokens=len(ours),
        mean=float(apart.mean()),
        largest=float(apart.max()),
        k3=float(kl_estimate(theirs, ours, "k3").mean()),
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
    found = _flips(given, runs.second.routes)
    return [
        Gap(
            part=Part(i, CHOICE),
            mean=int(found[:, i].sum()),
            rounding=max(int(moved[:, i].sum()), usual),
            worst=0,
            worst_rounding=1,
            token=int(found[:, i].int().argmax()),
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


def _experts(bug: Gap, runs: Runs) -> tuple[int, ...]:
    """Returns the experts of an MLP all of whose tokens differ, none where every token does."""
    routes, parts = runs.first.routes, runs.exact.parts
    if routes is None or bug.part.name != MLP or Part(bug.part.layer, ROUTER) not in parts:
        return ()
    apart = runs.first.parts[bug.part] - runs.second.parts[bug.part]
    off = _relative(bug.part, apart, runs) > TOKEN_FACTOR * bug.worst_rounding
    sent = routes[:, bug.part.layer]
    met = {e: (sent == e).any(-1) for e in sent.unique().tolist()}
    return () if bool(off.all()) else tuple(e for e, mine in met.items() if bool(off[mine].all()))
