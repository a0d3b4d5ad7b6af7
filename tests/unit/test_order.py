"""Which episodes make a batch: the rule beside all subsets, and simulated runs with long tails."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.rollout.episodes import State
from megarl.rollout.staleness import dues, first_come, head
from tests.unit import order_simulator as simulator

VERSION = 10


@dataclass(eq=False)
class Entry:
    began: int | None
    place: int | None


def keeps_rule(left: list[Entry], count: int, bound: int) -> bool:
    """Whether those that a batch leaves can all be trained in time."""
    return all(
        sum(e.began is not None and e.began <= VERSION + j - bound for e in left) <= j * count
        for j in range(bound)
    )


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Entry], int, int]:
    """(live, count, bound) as a run can have them: they could all be trained in time."""
    bound, count = draw(st.integers(0, 4)), draw(st.integers(1, 3))
    n = draw(st.integers(0, min(8, (bound + 1) * count)))
    # the i-th that is due is due by version + i // count at the earliest
    begun = sorted(VERSION - bound + i // count + draw(st.integers(0, bound)) for i in range(n))
    places: list[int | None] = [*draw(st.permutations(range(n)))]
    for i in draw(st.sets(st.integers(0, max(0, n - 1)))) if n else ():
        places[i] = None
    return [Entry(min(b, VERSION), p) for b, p in zip(begun, places)], count, bound


@settings(max_examples=400, deadline=None, derandomize=True)
@given(situations())
def test_a_batch_is_the_first_come_of_all_that_keep_the_rule(
    situation: tuple[list[Entry], int, int],
) -> None:
    live, count, bound = situation
    finished = sorted((e for e in live if e.place is not None), key=lambda e: e.place or 0)
    taken = first_come(live, count, version=VERSION, bound=bound)
    good = [
        batch
        for batch in combinations(finished, count)  # in the order of completion
        if keeps_rule([e for e in live if e not in batch], count, bound)
    ]
    assert tuple(taken) == good[0] if good else len(taken) < count
    if len(finished) == len(live) >= count:
        assert good, "waiting for nothing"


def test_room_is_kept_for_what_later_batches_cannot_take_in_time() -> None:
    slow, other = Entry(began=VERSION - 2, place=None), Entry(began=VERSION - 2, place=None)
    done = [Entry(began=VERSION - 1, place=i) for i in range(2)]
    assert dues([8, 8, 9, 9], 2, version=VERSION, bound=2) == [2, 2]
    assert first_come([slow, other, *done], 2, version=VERSION, bound=2) == []
    slow.place = 2
    assert first_come([slow, other, *done], 2, version=VERSION, bound=2) == [slow]
    assert first_come([slow, other, *done], 2, version=VERSION, bound=3) == done
    assert head([slow, other, *done], 2) == [slow]


def test_a_batch_made_smaller_in_mid_run_gets_nothing_stuck() -> None:
    """Eight episodes that began long ago, and batches of 2 now: the bound cannot be kept."""
    live = [Entry(began=VERSION - 1, place=7 - i) for i in range(8)]
    assert first_come(live, 2, version=VERSION, bound=1) == [live[7], live[6]]
    assert dues([9] * 8, 2, version=VERSION, bound=1) == [2]


def test_no_room_is_kept_for_what_cannot_begin_before_there_is_a_batch() -> None:
    kept = Entry(began=VERSION - 1, place=None)  # with answers of before a resume
    live = [Entry(began=VERSION, place=0), kept]
    assert first_come(live, 1, version=VERSION, bound=1) == []
    assert first_come(live, 1, version=VERSION, bound=1, blocked=1) == live[:1]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    eta=st.integers(0, 4),
    batch=st.integers(1, 6),
    slots=st.integers(1, 30),
    pace=st.sampled_from([1e2, 1e3, 1e4, 1e6]),
    bad=st.sampled_from([0.0, 0.1, 0.5]),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize("policy", ["submission", "completion"])
def test_the_bound_holds_nothing_is_dropped_and_no_run_gets_stuck(
    policy: str, eta: int, batch: int, slots: int, pace: float, bad: float,
    seed: int,
) -> None:  # fmt: skip
    """With rejections and failures, whatever generation's pace beside the trainer's. The run itself
    is stopped by an episode too old for its next batch, and by books that do not balance."""

    def outcome(rng: random.Random) -> State:
        bad_ends = [State.REJECTED, State.BROKEN]
        return rng.choice(bad_ends) if rng.random() < bad else State.READY

    prompts = simulator.Prompts(rng=random.Random(seed), outcome=outcome)
    run = simulator.Run(
        policy, prompts, eta=eta, batch=batch, slots=slots, steps=15, train_rate=pace
    )
    result = run.finish()
    assert max(result.staleness) <= eta and [len(b) for b in result.batches] == [batch] * 15
    counts = result.counts
    assert counts[State.TAKEN] == 15 * batch
    assert counts[State.DROPPED] == counts[State.RUNNING] == counts[State.READY] == 0
    assert sum(counts.values()) == prompts.drawn
    assert bad or prompts.drawn == 15 * batch


def test_episodes_are_really_taken_out_of_order() -> None:
    def batches(policy: str) -> list[list[int]]:
        run = simulator.Run(
            policy, simulator.Prompts(rng=random.Random(0)), eta=2, batch=8, slots=16, steps=20,
            train_rate=800.0,
        )  # fmt: skip
        return run.finish().batches

    first = batches("submission")[0]
    assert sum(first) > sum(batches("completion")[0])


def distance(policy: str, eta: int) -> tuple[float, int]:
    """Kolmogorov and Smirnov's distance between the lengths that are trained in the midst of a long
    run and the distribution that lengths are drawn from, and their number."""
    steps, batch, skip = 250, 32, 20
    run = simulator.Run(
        policy, simulator.Prompts(rng=random.Random(eta)), eta=eta, batch=batch, slots=64,
        steps=steps, train_rate=3200.0, ends=False,
    )  # fmt: skip
    lengths = sorted(n for b in run.finish().batches[skip:] for n in b if n < simulator.LONGEST)
    every = (steps - skip) * batch
    sigma = math.hypot(simulator.PROMPT, simulator.LUCK)
    d = 0.0
    for i, n in enumerate(lengths):
        z = math.log((n + 0.5) / simulator.MEDIAN) / sigma
        d = max(d, abs((i + 1) / every - 0.5 * (1 + math.erf(z / math.sqrt(2)))))
    return d, every


@pytest.mark.parametrize("eta", [1, 4])
def test_the_lengths_that_are_trained_are_those_that_are_sampled(eta: int) -> None:
    """The threshold, 1.95 / sqrt(n), is exceeded by one sample in 1000 of the same distribution.
    Dropping what is stale exceeds it at least twice over."""
    for policy in ("submission", "completion"):
        d, n = distance(policy, eta)
        assert d < 1.95 / math.sqrt(n), policy
    d, n = distance("dropping", eta)
    assert d > 2 * 1.95 / math.sqrt(n)
