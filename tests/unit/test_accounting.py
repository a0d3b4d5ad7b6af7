"""Every prompt and every sample is accounted for: at each step, after kills, at the end.

The executor runs over a real StatefulDataLoader and workflows that succeed, are rejected, fail or
come back too stale at random.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections import Counter

import pytest
import torch

from megarl.config.dataset import DatasetConfig
from megarl.config.rollout import RolloutConfig
from megarl.data.dataset import RowDataset, build_dataloader
from megarl.rollout.episodes import AccountingError, Episode, Episodes, State
from megarl.rollout.executor import RolloutExecutor
from megarl.rollout.loop_thread import LoopThread
from megarl.utils import stopping
from megarl.utils.stopping import StopRequested
from tests.unit.rollout_fakes import FakeEngine, Scripted, prepare_batch, row_ids, trajectory

SIZE = 23
FIRST = 10  # version, so that there are older ones
COUNTERS = ("submitted", "running", "accepted", "rejected", "failed", "dropped", "handed_out",
            "trained", "trained_samples", "failed_samples")  # fmt: skip


class Boom(Exception):
    pass


class Chance(Scripted):
    """Rows of `rejected` and `failing` always are; the rest succeed, after a while, and are too
    stale with probability `stale`. What an episode meets depends on its number only.
    """

    def __init__(self, *, rejected=(), failing=(), stale=0.0):
        super().__init__()
        self.rejected, self.failing, self.stale = set(rejected), set(failing), stale

    async def arun_episode(self, engine, data):
        number, version, row = data["episode_id"], engine.get_version(), data["row_id"]
        self.started.append((row, version, number))
        luck = random.Random(number)
        await asyncio.sleep(luck.choice([0.0, 0.0005, 0.002]))
        if row in self.failing:
            raise Boom(row)
        if row in self.rejected:
            return None
        age = 9 if luck.random() < self.stale else 0
        return trajectory([row], version=version - age, n=2)


class Slow(Chance):
    """Rows of `seconds` take so long."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    async def arun_episode(self, engine, data):
        await asyncio.sleep(self.seconds.get(data["row_id"], 0.0))
        return await super().arun_episode(engine, data)


class Rig:
    """An executor, its loader and its trainer; `kill` and go on from a `checkpoint`."""

    def __init__(self, *, batch_size=4, drop_last=False, shuffle=True, flow=None, **config):
        self.flow = flow or Chance()
        self.config = RolloutConfig(max_concurrent_rollouts=64, **config)
        self.data = DatasetConfig(
            type="arithmetic", batch_size=batch_size, drop_last=drop_last, shuffle=shuffle
        )
        self.loop: LoopThread | None = None
        self.handed: list[int] = []  # row ids, one per prompt trained
        self.failed: list[int] = []
        self.ids: list[int] = []
        self.version = FIRST
        self._open()

    def _open(self):
        self.close()
        self.loop = LoopThread("test-accounting")
        self.engine = FakeEngine(FIRST)
        self.ex = RolloutExecutor(self.config, engine=self.engine, loop=self.loop)
        self.loader = self.new_loader()

    def new_loader(self):
        return build_dataloader(RowDataset([{"row_id": i} for i in range(SIZE)]), self.data, seed=3)

    def close(self):
        if self.loop is not None:
            self.loop.close()

    def step(self):
        try:
            batch = prepare_batch(self.ex, self.loader, self.flow)
        except Boom as error:
            self.failed.append(error.args[0])
            return
        ids = batch["episode_ids"]
        self.check()
        self.handed += row_ids(batch)[::2]
        self.ids += ids.tolist()[::2]
        self.ex.trained(ids)
        self.check()
        self.bump()

    def bump(self):
        self.version += 1
        self.engine.version = self.version
        self.ex.version_changed(self.version)

    def check(self):
        s = self.ex.stats()
        ended = s["accepted"] + s["rejected"] + s["failed"] + s["dropped"]
        assert s["submitted"] == s["running"] + ended
        assert s["trained_samples"] == 2 * s["trained"]

    def checkpoint(self):
        state = {"executor": self.ex.state_dict(), "loader": self.loader.state_dict()}
        book = (self.version, list(self.handed), list(self.failed), list(self.ids))
        return copy.deepcopy((state, book))

    def kill_and_resume(self, checkpoint, *, batch_size=None):
        state, book = copy.deepcopy(checkpoint)
        if batch_size:
            self.data.batch_size = batch_size
        self._open()
        self.ex.load_state_dict(json.loads(json.dumps(state["executor"])))
        self.loader.load_state_dict(state["loader"])
        self.version, self.handed, self.failed, self.ids = book
        self.engine.version = self.version
        self.ex.version_changed(self.version)
        self.check()

    def counters(self):
        return {name: self.ex.stats()[name] for name in COUNTERS}

    def stream(self, count):
        """The first rows of all epochs, as nobody's business ever disturbs them."""
        loader, out = self.new_loader(), []
        while len(out) < count:
            out += [row["row_id"] for rows in loader for row in rows]
        return out[:count]


@pytest.fixture
def rig():
    rigs = []

    def build(**kw):
        rigs.append(Rig(**kw))
        return rigs[-1]

    yield build
    for r in rigs:
        r.close()


def check_books(r: Rig) -> None:
    """Every row that was drawn ended in exactly one place, or waits."""
    state = r.ex.state_dict()
    count, left = state["counters"], [row["row_id"] for row in state["rows"]]
    assert (count["accepted"], count["failed"]) == (len(r.handed), len(r.failed))
    told = r.handed + r.failed + left
    missing = Counter(r.stream(len(told) + count["rejected"])) - Counter(told)
    assert sum(missing.values()) == count["rejected"] and set(missing) <= r.flow.rejected
    assert not set(r.handed) & (r.flow.rejected | r.flow.failing)
    in_order = r.ids == sorted(r.ids)  # over the whole run, kills or not
    assert len(set(r.ids)) == len(r.ids) and (in_order or r.config.order == "completion")
    assert count["submitted"] == sum(
        count[k] for k in ("accepted", "rejected", "failed", "dropped")
    )


@pytest.mark.parametrize(
    "seed, order",
    [*((seed, "submission") for seed in range(8)), (4, "completion"), (5, "completion")],
)
def test_random_runs_with_kills_balance_at_every_step(rig, seed, order):
    rng = random.Random(seed)
    eta = seed % 3
    flow = Chance(
        rejected=rng.sample(range(SIZE), 3),
        failing=rng.sample(range(SIZE), 2),
        stale=rng.choice([0.0, 0.15]),
    )
    r = rig(
        flow=flow,
        order=order,
        max_head_offpolicyness=eta,
        batch_size=rng.choice([3, 4, 5]),
        drop_last=rng.random() < 0.5,
    )
    saved = r.checkpoint()
    for step in range(40):
        r.step()
        if rng.random() < 0.4:
            saved = r.checkpoint()
        if step % 7 == 6:
            r.kill_and_resume(saved)
        check_books(r)
    assert len(r.handed) > 30 and r.failed and r.ex.stats()["rejected"] > 0


def test_a_wait_that_a_signal_ends_leaves_nothing_half_done(rig, monkeypatch):
    """A checkpoint taken then continues with all rows, the first batch's first."""
    r = rig()
    r.step()
    with monkeypatch.context() as m, pytest.raises(StopRequested):
        m.setattr(stopping, "wish", lambda: 15)
        prepare_batch(r.ex, r.loader, r.flow)
    r.check()
    r.kill_and_resume(r.checkpoint())
    while len(r.handed) < SIZE:
        r.step()
    assert sorted(r.handed[:SIZE]) == list(range(SIZE))


def test_both_orders_make_the_same_batches_of_a_synchronous_run(rig):
    runs = [rig(flow=Chance(rejected=[1, 5]), order=o) for o in ("submission", "completion")]
    for _ in range(6):
        for r in runs:
            r.step()
    assert runs[0].ids == runs[1].ids and runs[0].handed == runs[1].handed


def test_a_resume_under_completion_keeps_the_numbers_of_those_in_flight(rig):
    """Episode 0 is passed by others; after a kill it goes on as episode 0, and no number of those
    is given again."""
    r = rig(order="completion", max_head_offpolicyness=2, shuffle=False, flow=Slow({0: 0.5}))
    r.step()
    assert 0 not in r.ids and len(r.ids) == 4
    saved = r.checkpoint()
    assert saved[0]["executor"]["numbers"][0] == 0
    r.kill_and_resume(saved)
    for _ in range(4):
        r.step()
        check_books(r)
    assert r.ids.count(0) == 1 and len(set(r.ids)) == 20


@pytest.mark.parametrize("eta", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_resume_gives_exactly_the_remaining_rows(rig, eta, drop_last, shuffle):
    """Over two epoch boundaries, with rejections that leave batches partly buffered."""
    kw = {"drop_last": drop_last, "shuffle": shuffle, "max_head_offpolicyness": eta}
    whole, cut = (rig(flow=Chance(rejected=[2, 9, 10]), **kw) for _ in range(2))
    for _ in range(11):
        whole.step()
    for _ in range(11):
        cut.kill_and_resume(cut.checkpoint())
        cut.step()
    assert cut.handed == whole.handed
    assert len(cut.handed) == 44 and max(Counter(cut.handed).values()) == 3


def test_a_resumed_synchronous_run_is_the_uninterrupted_one(rig):
    """Episode ids, which key the sampling seeds, versions and all counters."""
    flows = [Chance(rejected=[1, 5, 20]) for _ in range(2)]
    whole, cut = (rig(flow=flow) for flow in flows)
    saved = cut.checkpoint()
    for k in range(9):
        whole.step()
        cut.step()
        if k % 3 == 0:
            saved, begun = cut.checkpoint(), list(flows[1].started)
        if k % 3 == 1:  # one step is lost
            cut.kill_and_resume(saved)
            flows[1].started = begun
            cut.step()
    assert cut.ids == whole.ids and cut.handed == whole.handed
    assert sorted(flows[1].started) == sorted(flows[0].started)
    assert cut.counters() == whole.counters()
    assert whole.counters()["rejected"] > 0


@pytest.mark.parametrize("drop_last", [False, True])
def test_each_row_of_an_epoch_is_trained_exactly_once_unless_rejected(rig, drop_last):
    r = rig(flow=Chance(rejected=[7]), drop_last=drop_last, max_head_offpolicyness=1)
    for _ in range(12):
        r.step()
    # 12 batches of 4; row 7 falls away, an epoch has all 23 rows, or 20 when whole batches only
    epoch = 20 if drop_last else SIZE
    rows = r.stream(2 * epoch)
    kept = [i for i in rows if i != 7]
    assert r.handed[: len(kept)] == kept
    assert len(set(rows[:epoch])) == len(set(rows[epoch:])) == epoch


def test_batch_size_may_change_over_a_resume(rig):
    r = rig(max_head_offpolicyness=1)
    for _ in range(3):
        r.step()
    r.kill_and_resume(r.checkpoint(), batch_size=6)
    before = len(r.handed)
    r.step()
    assert len(r.handed) - before == 6
    counts = r.ex.episodes.counts
    used = counts[State.RUNNING] + counts[State.READY] + counts[State.TAKEN]
    assert r.ex.admission.room(FIRST + 3, counts) + used == 12 + 12
    for _ in range(5):
        r.step()
    assert r.handed == r.stream(12 + 36)


def test_what_failed_before_a_checkpoint_comes_again_after_it(rig):
    r = rig(flow=Chance(failing=[0, 1]), shuffle=False)
    r.step()
    assert len(r.failed) == 1
    while r.ex.stats()["running"]:  # the other one fails, too: nobody has been told yet
        asyncio.run(asyncio.sleep(0.002))
    rows = [row["row_id"] for row in r.ex.state_dict()["rows"]]
    assert rows[:3] == [({0, 1} - set(r.failed)).pop(), 2, 3]


def test_the_state_of_a_fresh_and_of_a_used_executor(rig):
    r = rig()
    state = r.ex.state_dict()
    assert state["rows"] == [] and set(state["counters"].values()) == {0}
    r.step()
    with pytest.raises(AssertionError, match="after the first batch"):
        r.ex.load_state_dict(state)


def ids(*episodes: int) -> torch.Tensor:
    return torch.tensor(episodes)


def a_batch(*numbers_of_samples: int) -> tuple[Episodes, torch.Tensor]:
    """The books once a batch took an episode for each number; and the samples' ids."""
    books, batch = Episodes(), []
    for n in numbers_of_samples:
        samples = trajectory([1], version=0, n=n)
        batch.append(Episode(row={}, workflow=Scripted(), batch=samples))
        books.add(batch[-1])
        books.move(batch[-1], State.RUNNING)
        books.move(batch[-1], State.READY)
    books.take(batch)
    return books, torch.repeat_interleave(ids(*(e.number for e in batch)), ids(*numbers_of_samples))


@pytest.mark.parametrize(
    ("trained", "fault"),
    [
        ([0, 0], r"\[\(1, 2\)\]"),
        ([0, 0, 1], r"\[\(1, 1\), \(1, 2\)\]"),
        ([0, 0, 1, 1, 5], r"\[\(5, 1\)\]"),
        ([0, 0, 0, 1, 1], r"\[\(0, 2\), \(0, 3\)\]"),
    ],
)
def test_books_name_the_episode_at_fault(trained, fault):
    books, samples = a_batch(2, 2)
    with pytest.raises(AccountingError, match=fault):
        books.train(Counter(trained), {})
    books.train(Counter(samples.tolist()), {})
    with pytest.raises(AccountingError, match=r"\(0, 2\)"):
        books.train(Counter(samples.tolist()), {})
    assert books.stats()["trained_samples"] == 4


def test_samples_whose_update_was_skipped_are_not_trained():
    books, samples = a_batch(2, 2)
    books.train(Counter(samples.tolist()), Counter([0, 1, 1]))
    stats = books.stats()
    assert (stats["trained"], stats["trained_samples"]) == (1, 1)
    assert (stats["skipped"], stats["skipped_samples"]) == (1, 3)
    again = Episodes()
    again.load_state_dict(books.state_dict())
    assert again.state_dict() == books.state_dict() and again.stats() == stats


def test_samples_that_failed_after_the_hand_out_are_not_trained():
    books, _ = a_batch(3, 2)
    books.lose({0: 1, 1: 2})
    with pytest.raises(AccountingError, match="episode 0: 3 samples failed, it has fewer"):
        books.lose({0: 3})
    books.train({0: 2}, {})
    assert (books.stats()["trained_samples"], books.stats()["skipped"]) == (2, 1)


def test_books_stay_small_and_survive_a_resume():
    books = Episodes()
    for _ in range(1000):
        episode = Episode(row={}, workflow=Scripted(), batch=trajectory([1], version=0, n=2))
        books.add(episode)
        for state in (State.RUNNING, State.READY):
            books.move(episode, state)
        books.take([episode])
        books.train({episode.number: 2}, {})
    state = books.state_dict()
    assert len(json.dumps(state)) < 1000
    again = Episodes()
    again.load_state_dict(json.loads(json.dumps(state)))
    assert again.stats() == books.stats() and again.stats()["trained_samples"] == 2000
    with pytest.raises(AccountingError):
        again.train({999: 2}, {})
    assert again.state_dict() == state


def test_an_untrained_batch_is_an_error_at_the_next(rig):
    r = rig()
    prepare_batch(r.ex, r.loader, r.flow)  # and its trainer forgets it
    r.bump()
    batch = prepare_batch(r.ex, r.loader, r.flow)
    with pytest.raises(AccountingError, match="8 episodes were handed out, but 4 trained"):
        r.ex.trained(batch["episode_ids"])


def test_a_checkpoint_with_an_untrained_batch_is_an_error(rig):
    r = rig()
    r.step()
    prepare_batch(r.ex, r.loader, r.flow)
    with pytest.raises(AccountingError, match="8 episodes were handed out, but 4 trained"):
        r.ex.state_dict()


PATHS = {
    State.WAITING: (),
    State.RUNNING: (State.RUNNING,),
    State.READY: (State.RUNNING, State.READY),
    State.BROKEN: (State.RUNNING, State.BROKEN),
    State.FAILED: (State.RUNNING, State.BROKEN, State.FAILED),
    State.REJECTED: (State.RUNNING, State.REJECTED),
    State.TAKEN: (State.RUNNING, State.READY, State.TAKEN),
    State.DROPPED: (State.RUNNING, State.READY, State.DROPPED),
}
WAYS = {State.WAITING: 1, State.RUNNING: 3, State.READY: 3, State.BROKEN: 1}


@pytest.mark.parametrize("state", PATHS)
def test_an_episode_moves_on_or_an_error_names_it_and_nothing_is_counted(state):
    books, ways = Episodes(), 0
    for to in State:
        episode = Episode(row={}, workflow=Scripted())
        books.add(episode)
        for step in PATHS[state]:
            books.move(episode, step)
        before = dict(books.counts)
        try:
            books.move(episode, to)
            ways += 1
        except AccountingError as error:
            assert f"episode {episode.number} is " in str(error)
            assert dict(books.counts) == before
        assert books.counts.total() == episode.number + 1
    assert ways == WAYS.get(state, 0)
    with pytest.raises(AccountingError):
        books.move(Episode(row={}, workflow=Scripted(), number=99), State.RUNNING)


def test_a_checkpoint_of_before_is_continued(rig):
    """As it was written when every part had books of its own."""
    state = {
        "rows": [{"row_id": 5}, {"row_id": 7}, {"row_id": 8}],
        "numbers": [5, 9],
        "answers": [],
        "next_number": 10,
        "failed_samples": {"samples": {"tool": 2}, "tokens": 9, "retried": 1},
        "outcomes": [({"row_id": 3}, [0.0])],
        "counters": {
            "submitted": 9, "running": 0, "accepted": 4, "rejected": 2, "failed": 1, "dropped": 2
        },
        "accounting": {
            "mark": 4, "episodes": 3, "samples": 6, "skipped_episodes": 1, "skipped_samples": 2,
            "early": [6],
        },
    }  # fmt: skip
    r = rig()
    r.ex.load_state_dict(state)
    stats = r.ex.stats()
    assert [stats[name] for name in COUNTERS] == [9, 0, 4, 2, 1, 2, 4, 3, 6, 2]
    assert (stats["skipped"], stats["skipped_samples"], stats["retried_samples"]) == (1, 2, 1)
    r.bump()
    batch = prepare_batch(r.ex, r.loader, r.flow)
    assert row_ids(batch)[:6:2] == [5, 7, 8]
    assert batch["episode_ids"].tolist()[::2] == [5, 9, 10, 11]
    assert r.ex.outcomes[0].row == {"row_id": 3}
    r.ex.trained(batch["episode_ids"])
    assert r.ex.stats()["trained"] == 7
