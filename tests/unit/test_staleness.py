"""Admission and consumption bounds with plain numbers."""

import random
from collections import Counter

import pytest

from megarl.rollout.episodes import State
from megarl.rollout.staleness import Admission


def admission(**kw):
    return Admission(**({"max_concurrent": 100, "max_head_offpolicyness": 0} | kw))


def counts(**by_state):
    return Counter({State[name.upper()]: n for name, n in by_state.items()})


def test_synchronous_admits_one_batch_per_version():
    a = admission(batch=4)
    assert a.capacity(0, counts()) == 4
    assert a.capacity(0, counts(ready=4)) == 0
    assert a.capacity(1, counts(taken=4)) == 4


@pytest.mark.parametrize(
    "eta, version, accepted, running, room",
    [(0, 0, 0, 0, 4), (2, 0, 0, 0, 12), (2, 0, 5, 3, 4), (2, 3, 12, 0, 12), (1, 0, 8, 2, -2)],
)
def test_room_is_eta_plus_version_plus_one_batches(eta, version, accepted, running, room):
    a = admission(max_head_offpolicyness=eta, batch=4)
    taken = accepted // 2
    now = counts(taken=taken, ready=accepted - taken, running=running)
    assert a.room(version, now) == room == (eta + version + 1) * 4 - accepted - running


def test_concurrency_bounds_capacity():
    a = admission(max_concurrent=3, max_head_offpolicyness=5, batch=4)
    assert a.room(0, counts(running=1)) == 23
    assert a.capacity(0, counts(running=1)) == 2


def test_what_no_batch_takes_gives_its_room_back():
    a = admission(batch=4)
    assert a.capacity(0, counts(ready=2, rejected=1, broken=1, failed=3, dropped=5)) == 2


def test_resumed_run_gets_no_capacity_for_its_past():
    a = admission(max_head_offpolicyness=1)
    a.serve(4, 100, counts(taken=70))
    assert a.room(100, counts(taken=70)) == 8


def test_without_a_consumer_only_concurrency_counts():
    a = admission(max_concurrent=3)
    assert a.capacity(0, counts(taken=50)) == 3


def test_what_no_batch_will_take_is_not_wanted():
    a = admission(max_head_offpolicyness=2, batch=4)
    assert a.wanted(0, counts(waiting=3)) == 4 * 3 + 4 - 3
    a.batches_left = 2
    assert a.wanted(0, counts(running=1, ready=2)) == 2 * 4 - 3
    a.batches_left = 0
    with pytest.raises(RuntimeError, match=r"expect\(\)"):
        a.check_room(0, counts())


def test_consumption_bound():
    a = admission(max_head_offpolicyness=2)
    assert not a.is_stale(5, 7)
    assert a.is_stale(4, 7)
    assert not a.is_stale(None, 7)


def test_the_bound_holds_in_random_runs():
    a, rng, version = admission(max_concurrent=5, max_head_offpolicyness=2, batch=3), None, 0
    rng, now = random.Random(0), Counter()
    ends = {"ready": "running", "rejected": "running", "broken": "running", "dropped": "ready"}
    for _ in range(2000):
        moves = [to for to, at in ends.items() if now[State[at.upper()]]]
        moves += ["running"] if a.capacity(version, now) > 0 else []
        move = rng.choice(moves or ["version"])
        if move == "version":
            version += 1
            continue
        if move in ends:
            now[State[ends[move].upper()]] -= 1
        now[State[move.upper()]] += 1
        assert 0 <= now[State.RUNNING] <= 5
        assert now[State.READY] + now[State.RUNNING] <= (2 + version + 1) * 3
    assert now.total() > 500


@pytest.mark.parametrize("bad", [{"max_concurrent": 0}, {"max_head_offpolicyness": -1}])
def test_bad_bounds_are_named(bad):
    with pytest.raises(ValueError, match=str(next(iter(bad.values())))):
        admission(**bad)
