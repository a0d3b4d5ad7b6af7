"""Admission and consumption bounds with plain numbers."""

import random

import pytest

from megarl.rollout.staleness import StalenessManager


def manager(**kw):
    return StalenessManager(**({"max_concurrent": 100, "max_head_offpolicyness": 0} | kw))


def run(m, outcomes):
    for outcome in outcomes:
        m.start()
        getattr(m, outcome)()


def test_synchronous_admits_one_batch_per_version():
    m = manager(consumer_batch=4)
    assert m.capacity(0) == 4
    run(m, ["accept"] * 4)
    assert m.capacity(0) == 0
    assert m.capacity(1) == 4


@pytest.mark.parametrize(
    "eta, version, accepted, running, room",
    [(0, 0, 0, 0, 4), (2, 0, 0, 0, 12), (2, 0, 5, 3, 4), (2, 3, 12, 0, 12), (1, 0, 8, 2, -2)],
)
def test_room_is_eta_plus_version_plus_one_batches(eta, version, accepted, running, room):
    m = manager(max_head_offpolicyness=eta, consumer_batch=4)
    run(m, ["accept"] * accepted)
    for _ in range(running):
        m.start()
    assert m.room(version) == room == (eta + version + 1) * 4 - accepted - running


def test_concurrency_bounds_capacity():
    m = manager(max_concurrent=3, max_head_offpolicyness=5, consumer_batch=4)
    m.start()
    assert m.room(0) == 23
    assert m.capacity(0) == 2


def test_rejected_and_failed_give_their_room_back():
    m = manager(consumer_batch=4)
    run(m, ["accept", "reject", "fail", "accept"])
    assert m.capacity(0) == 2


def test_dropped_gives_its_room_back():
    m = manager(consumer_batch=2)
    run(m, ["accept", "accept"])
    m.drop()
    assert m.capacity(0) == 1
    assert m.counters() == {
        "submitted": 2,
        "running": 0,
        "accepted": 1,
        "rejected": 0,
        "failed": 0,
        "dropped": 1,
    }


def test_resumed_run_gets_no_capacity_for_its_past():
    m = manager(consumer_batch=4, max_head_offpolicyness=1, start_version=100)
    assert m.room(100) == 8


def test_without_a_consumer_only_concurrency_counts():
    m = manager(max_concurrent=3)
    run(m, ["accept"] * 50)
    assert m.capacity(0) == 3


def test_consumption_bound():
    m = manager(max_head_offpolicyness=2)
    assert not m.is_stale(5, 7)
    assert m.is_stale(4, 7)
    assert not m.is_stale(None, 7)


def test_every_episode_is_in_exactly_one_place():
    m, rng, version = manager(max_concurrent=5, max_head_offpolicyness=2, consumer_batch=3), None, 0
    rng = random.Random(0)
    for _ in range(2000):
        moves = ["accept", "reject", "fail"] if m.running else []
        moves += ["start"] if m.capacity(version) > 0 else []
        moves += ["drop"] if m.accepted else []
        move = rng.choice(moves or ["version"])
        if move == "version":
            version += 1
        else:
            getattr(m, move)()
        settled = m.accepted + m.rejected + m.failed + m.dropped
        assert m.submitted == m.running + settled
        assert 0 <= m.running <= 5
        assert m.accepted + m.running <= (2 + version + 1) * 3
    assert m.submitted > 500


@pytest.mark.parametrize("bad", [{"max_concurrent": 0}, {"max_head_offpolicyness": -1}])
def test_bad_bounds_are_named(bad):
    with pytest.raises(ValueError, match=str(next(iter(bad.values())))):
        manager(**bad)
