"""Computes 95 % confidence intervals of what an evaluation measures. No torch.

Samples of one prompt are not independent, prompts are: every function takes `groups`, the prompt of
each sample, and lets whole prompts vary.

proportion_ci   of an accuracy: Wilson's score interval, which is right at 0 and 100 % too
bootstrap_ci    of a mean of any scores: bootstrap over prompts
score_ci        of a mean, by the one of these that fits
difference_ci   of a gain, from the intervals of both sides
mean_ci         of the mean over several data sets, from the interval of each
correlation     how far both sides move together, where they answered the same prompts
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Scores = Sequence[float] | Sequence[bool]
LEVEL = 0.95
_CHUNK = 1 << 22  # drawn indices at a time: 32 MiB


class Estimate(NamedTuple):
    """Holds a measured value and the ends of its interval."""

    value: float
    low: float
    high: float


def proportion_ci(
    right: Scores, *, groups: Sequence[Hashable] | None = None
) -> tuple[float, float]:
    """Returns (low, high) of the share of True in `right` [n].

    It is Wilson's score interval (JASA 22, 1927) of n independent samples, or of as many as the
    spread between prompts says that these are worth: the effective sample size of E. Korn and B.
    Graubard (Survey Methodology 24, 1998). Where all samples are right or all wrong there is no
    spread to go by, and a prompt counts once. Raises ValueError for no samples, or groups of
    another number.
    """
    sums, counts = _by_group(right, groups, "proportion_ci")
    n, p = counts.sum(), sums.sum() / counts.sum()
    if p in (0.0, 1.0):
        return wilson(p, len(counts))
    variance = float(np.square(sums - p * counts).sum()) / n**2
    return wilson(p, min(n, p * (1 - p) / variance) if variance else n)


def wilson(p: float, n: float) -> tuple[float, float]:
    """Returns the score interval of a share `p` of `n` independent samples."""
    z2 = NormalDist().inv_cdf(0.5 + LEVEL / 2) ** 2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (p * (1 - p) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    return (0.0 if p == 0 else float(low)), (1.0 if p == 1 else float(high))


def bootstrap_ci(
    scores: Scores,
    n_boot: int = 2000,
    seed: int = 0,
    *,
    groups: Sequence[Hashable] | None = None,
) -> tuple[float, float]:
    """Returns (low, high) of the mean of `scores` [n], by the percentile bootstrap (B. Efron, 1979)
    over whole groups, deterministic in `seed`.

    Scores that are all alike give an interval of no width: for accuracies there is proportion_ci.
    Raises ValueError for no scores, or groups of another number.
    """
    sums, counts = _by_group(scores, groups, "bootstrap_ci")
    tail = 50.0 * (1.0 - LEVEL)
    rng = np.random.default_rng(seed)
    means = np.empty(n_boot)
    rows = max(1, _CHUNK // len(sums))
    for start in range(0, n_boot, rows):
        stop = min(n_boot, start + rows)
        index = rng.integers(0, len(sums), size=(stop - start, len(sums)))
        means[start:stop] = sums[index].sum(axis=1) / counts[index].sum(axis=1)
    low, high = np.percentile(means, [tail, 100.0 - tail])
    return float(low), float(high)


def score_ci(
    scores: Scores, seed: int = 0, *, groups: Sequence[Hashable] | None = None
) -> tuple[float, float]:
    """Returns (low, high) of the mean of `scores` [n]: by proportion_ci where all are 0 or 1, so
    that equal numbers have equal intervals whatever they are called, else by bootstrap_ci."""
    if set(scores) <= {0, 1}:
        return proportion_ci(scores, groups=groups)
    return bootstrap_ci(scores, seed=seed, groups=groups)


def difference_ci(
    before: Estimate, after: Estimate, *, correlation: float = 0.0
) -> tuple[float, float]:
    """Returns (low, high) of after - before, from the two intervals (R. Newcombe, Statistics in
    Medicine 17, 1998, method 10, for proportions; G. Zou and A. Donner, ibid. 27, 2008, for any
    estimates).

    `correlation` of the two estimates is 0 where they were measured on different prompts.
    """
    gain = after.value - before.value

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a + b * b - 2 * correlation * a * b))

    low = gain - reach(after.value - after.low, before.high - before.value)
    high = gain + reach(after.high - after.value, before.value - before.low)
    return low, high


def mean_ci(estimates: Sequence[Estimate]) -> tuple[float, float]:
    """Returns (low, high) of the mean of independent estimates, each with the same weight, from
    their intervals (G. Zou and A. Donner, Statistics in Medicine 27, 2008)."""
    mean = sum(e.value for e in estimates) / len(estimates)
    below = math.sqrt(sum((e.value - e.low) ** 2 for e in estimates)) / len(estimates)
    above = math.sqrt(sum((e.high - e.value) ** 2 for e in estimates)) / len(estimates)
    return mean - below, mean + above


def correlation(before: Sequence[Scores], after: Sequence[Scores]) -> float:
    """Returns the correlation of the means of two measurements of the same prompts, 0 where one of
    them does not vary.

    Each has the scores of every prompt, in the same order. Raises ValueError where the numbers of
    prompts differ.
    """
    if len(before) != len(after):
        raise ValueError(
            f"correlation: {len(before)} prompts before, {len(after)} after; pair them by prompt"
        )
    a, b = (_deviations(side) for side in (before, after))
    size = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / size if size else 0.0


def _deviations(prompts: Sequence[Scores]) -> NDArray[np.float64]:
    """Returns by how much each prompt moves the mean of all samples."""
    sums = np.array([float(sum(p)) for p in prompts])
    counts = np.array([len(p) for p in prompts], dtype=np.float64)
    return (sums - sums.sum() / counts.sum() * counts) / counts.sum()


def _by_group(
    scores: Scores, groups: Sequence[Hashable] | None, caller: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns (sum of scores, number of samples) of every group; without groups each sample is its
    own."""
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"{caller}: needs a list of at least one score, got {values.shape}")
    if groups is None:
        return values, np.ones(len(values))
    if len(groups) != len(values):
        raise ValueError(f"{caller}: {len(values)} scores and {len(groups)} groups")
    names = {name: i for i, name in enumerate(dict.fromkeys(groups))}
    index = [names[g] for g in groups]
    sums = np.bincount(index, weights=values).astype(np.float64)
    return sums, np.bincount(index).astype(np.float64)
