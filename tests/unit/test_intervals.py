"""Confidence intervals against closed forms, published examples and simulated coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megarl.observability.intervals import (
    Estimate,
    bootstrap_ci,
    correlation,
    difference_ci,
    proportion_ci,
    score_ci,
    wilson,
)


def width(interval: tuple[float, float]) -> float:
    return interval[1] - interval[0]


def test_bootstrap_interval_of_a_proportion():
    """Against the normal approximation, p +- 1.96 sqrt(p (1 - p) / n)."""
    successes = [True] * 200 + [False] * 300
    low, high = bootstrap_ci(successes, 4000, seed=1)
    half = 1.96 * math.sqrt(0.4 * 0.6 / 500)
    assert low == pytest.approx(0.4 - half, abs=0.006)
    assert high == pytest.approx(0.4 + half, abs=0.006)
    assert (low, high) == bootstrap_ci(successes, 4000, seed=1)


def test_samples_that_agree_within_a_prompt_are_worth_one():
    """Eight equal samples of each of 100 prompts say what 100 samples say."""
    prompts = [True] * 30 + [False] * 70
    samples = [right for right in prompts for _ in range(8)]
    groups = [i for i in range(100) for _ in range(8)]
    for interval in (bootstrap_ci, proportion_ci):
        assert interval(samples, groups=groups) == pytest.approx(interval(prompts), abs=1e-12)
        # by the normal approximation the naive interval is sqrt(8) too narrow
        assert width(interval(samples)) == pytest.approx(
            width(interval(prompts)) / math.sqrt(8), rel=0.1
        )


def test_samples_that_do_not_agree_are_worth_more_than_one():
    """Half of the four samples of every prompt are right: prompts do not differ at all."""
    samples, groups = [True, True, False, False] * 50, [i for i in range(50) for _ in range(4)]
    assert proportion_ci(samples, groups=groups) == proportion_ci(samples)
    assert width(bootstrap_ci(samples, groups=groups)) == 0.0


def test_prompts_of_unequal_numbers_of_samples():
    scores, groups = [1.0, 0.0, 0.0, 0.0], ["a", "b", "b", "b"]
    low, high = bootstrap_ci(scores, groups=groups)
    assert (low, high) == (0.0, 1.0)  # only a, only b
    # Var of the ratio: ((1 - 1/4)^2 + (0 - 3/4)^2) / 4^2, so 16 * 3/16 / (9/8) samples
    n = 0.25 * 0.75 / ((0.75**2 + 0.75**2) / 16)
    assert proportion_ci(scores, groups=groups) == pytest.approx(wilson(0.25, n))


@pytest.mark.parametrize("n", [1, 12, 512])
def test_all_right_is_not_certain(n):
    """At the edge Wilson's bound is n / (n + z^2); the rule of three says about 1 - 3 / n."""
    low, high = proportion_ci([True] * n)
    assert high == 1.0 and low == pytest.approx(n / (n + 1.959964**2))
    assert proportion_ci([False] * n) == pytest.approx((0.0, 1 - low))
    # eight samples of one prompt that are all right: one prompt
    assert proportion_ci([True] * 8 * n, groups=sorted([*range(n)] * 8)) == (low, high)
    assert bootstrap_ci([True] * n) == (1.0, 1.0)  # which is why accuracies do not use it


def test_one_wrong_of_many_is_below_all_right():
    assert proportion_ci([True] * 511 + [False])[0] < proportion_ci([True] * 512)[0]


def test_wilson_of_a_published_example():
    """Newcombe, Statistics in Medicine 17 (1998) 857, table I: 81 of 263 and 15 of 148."""
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15 / 148, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)


def test_difference_of_a_published_example():
    """Newcombe, Statistics in Medicine 17 (1998) 873, table II, method 10: 56/70 - 48/80."""
    sides = [Estimate(x / n, *wilson(x / n, n)) for x, n in ((48, 80), (56, 70))]
    assert difference_ci(*sides) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_answers_to_the_same_prompts_narrow_the_interval_of_the_gain():
    """By the normal approximation sd^2(gain) = sd1^2 + sd2^2 - 2 r sd1 sd2."""
    rng = np.random.default_rng(0)
    level = rng.normal(size=400)
    before, after = (
        [[float(x)] for x in level + 0.5 * rng.normal(size=400) + shift] for shift in (0, 0.1)
    )
    r = correlation(before, after)
    assert r == pytest.approx(np.corrcoef([p[0] for p in before], [p[0] for p in after])[0, 1])
    sides = []
    for prompts in (before, after):
        values = [p[0] for p in prompts]
        sides.append(Estimate(float(np.mean(values)), *bootstrap_ci(values)))
    gains = [b[0] - a[0] for a, b in zip(before, after, strict=True)]
    half = 1.96 * float(np.std(gains)) / math.sqrt(len(gains))
    low, high = difference_ci(*sides, correlation=r)
    assert (high - low) / 2 == pytest.approx(half, rel=0.06)
    assert width(difference_ci(*sides)) > 1.9 * (high - low)  # as if of different prompts


def test_a_gain_of_every_prompt_is_still_uncertain():
    before, after = ([[v]] * 12 for v in (0.0, 1.0))
    sides = [Estimate(v, *proportion_ci([v] * 12)) for v in (0.0, 1.0)]
    low, high = difference_ci(*sides, correlation=correlation(before, after))
    assert 0.6 < low < 0.7 and high == 1.0


def test_correlation_is_of_prompts_not_of_their_samples():
    """Samples of a prompt come in any order."""
    before, after = [[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]], [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    assert correlation(before, after) == pytest.approx(1.0)
    assert correlation(before, [[1.0]] * 3) == 0.0
    with pytest.raises(ValueError, match="3 prompts before, 1 after"):
        correlation(before, [[1.0]])


def test_intervals_hold_the_truth_as_often_as_they_say():
    """4 samples each of 40 prompts whose difficulties differ: the share of 600 intervals that hold
    the true accuracy (standard error of the share about 0.01). Samples taken for independent ones
    would hold it far less often.
    """
    rng = np.random.default_rng(0)
    groups = [i for i in range(40) for _ in range(4)]
    held = {"clustered": 0, "independent": 0}
    for _ in range(600):
        easy = rng.beta(0.5, 0.2, size=40)
        right = rng.random((40, 4)) < easy[:, None]
        truth = 0.5 / 0.7
        for name, by in (("clustered", groups), ("independent", None)):
            low, high = proportion_ci(right.ravel().tolist(), groups=by)
            held[name] += low <= truth <= high
    assert 0.92 < held["clustered"] / 600 < 0.98
    assert held["independent"] / 600 < 0.82


def test_errors():
    with pytest.raises(ValueError, match="at least one score"):
        bootstrap_ci([])
    with pytest.raises(ValueError, match="3 scores and 2 groups"):
        proportion_ci([1, 0, 1], groups=[1, 2])


def test_equal_numbers_have_equal_intervals():
    right, groups = [True, False, False, False] * 5, [i // 2 for i in range(20)]
    assert score_ci([float(r) for r in right], groups=groups) == proportion_ci(right, groups=groups)
    assert score_ci([0.0] * 80) == proportion_ci([False] * 80)  # not of no width
    scores = [-1.0, 2.0, 0.5, 3.0]
    assert score_ci(scores, 7) == bootstrap_ci(scores, seed=7)
