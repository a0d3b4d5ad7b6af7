"""The executor over scripted episodes: order, admission, staleness, rejection, errors, shutdown."""

import asyncio
import threading
import time

import pytest
import torch

from megarl.api.inference import RolloutFailed
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig
from megarl.rollout.episodes import MAX_DROPS, MAX_REJECTED_BATCHES, RowStream, State
from megarl.rollout.executor import RolloutExecutor
from megarl.rollout.loop_thread import LoopThread
from megarl.rollout.rewards import RewardError
from tests.unit.rollout_fakes import FakeEngine, Scripted, prepare_batch, row_ids, rows, trajectory


class Loader:
    """A dataloader of consecutive rows."""

    def __init__(self, data, batch_size):
        self.data, self.batch_size, self.epochs, self.drawn = data, batch_size, 0, 0

    def __iter__(self):
        self.epochs += 1
        for i in range(0, len(self.data) - self.batch_size + 1, self.batch_size):
            self.drawn += self.batch_size
            yield self.data[i : i + self.batch_size]


@pytest.fixture
def make():
    loops = []

    def build(version=0, **config):
        loops.append(LoopThread("test-rollout"))
        engine = FakeEngine(version)
        executor = RolloutExecutor(RolloutConfig(**config), engine=engine, loop=loops[-1])

        def bump(v):
            engine.version = v
            executor.version_changed(v)

        executor.bump, executor.version = bump, engine.get_version
        return executor

    yield build
    for loop in loops:
        loop.close()


def settle(executor, timeout=5.0):
    """Until nothing runs and nothing can start."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        with executor.changed:
            counts = executor.episodes.counts
            capacity = executor.admission.capacity(executor.version(), counts)
            if not counts[State.RUNNING] and not (counts[State.WAITING] and capacity > 0):
                return
        time.sleep(0.005)
    raise AssertionError("did not settle")


def test_results_come_in_order_of_submission(make):
    ex, flow = make(), Scripted()
    for row in rows(4, r0={"sleep": 0.2, "n": 2}, r2={"sleep": 0.05}):
        ex.submit(row, flow)
    batch = ex.wait(3, timeout=10)
    assert row_ids(batch) == [0, 0, 1, 2]
    assert batch["group_ids"].tolist() == [0, 0, 1, 2]
    assert row_ids(ex.wait(1, timeout=10)) == [3]


def test_who_waits_may_reject_what_was_accepted(make):
    ex, flow, asked, seen = make(), Scripted(), [], []
    ex.observer = lambda episode: seen.append(episode.row["row_id"])

    def odd(batch):
        asked.extend(row_ids(batch))
        return row_ids(batch)[0] % 2 == 1

    for row in rows(6, r1={"sleep": 0.1}):
        ex.submit(row, flow)
    assert row_ids(ex.wait(2, timeout=10, should_accept=odd)) == [1, 3]
    assert asked == [0, 1, 2, 3] and ex.stats()["rejected"] == 2
    assert sorted(seen) == [0, 1, 2, 3]  # those that were turned down, too
    with pytest.raises(RuntimeError, match="waiting for 2 episodes, but only 1 are left"):
        ex.wait(2, timeout=10, should_accept=odd)
    assert row_ids(ex.wait(1, timeout=10)) == [5]
    counters = ex.stats()
    assert (counters["accepted"], counters["rejected"], counters["handed_out"]) == (3, 3, 3)


def test_should_accept(make):
    ex = make()
    for row in rows(4):
        ex.submit(row, Scripted(), should_accept=lambda b: int(b["input_ids"][0, 1]) != 1)
    assert row_ids(ex.wait(3, timeout=10)) == [0, 2, 3]
    assert ex.stats()["rejected"] == 1


def test_concurrency_is_bounded(make):
    ex, flow = make(max_concurrent_rollouts=3), Scripted()
    for row in rows(10):
        ex.submit(row | {"sleep": 0.02}, flow)
    ex.wait(10, timeout=10)
    assert flow.peak == 3


def test_workflow_error_reaches_wait_with_its_row(make):
    ex, flow = make(), Scripted()
    for row in rows(3, r1={"error": KeyError("boom")}):
        ex.submit(row, flow)
    with pytest.raises(KeyError, match="boom") as info:
        ex.wait(3, timeout=10)
    assert "row 1" in info.value.__notes__[0]
    assert ex.stats()["failed"] == 1


@pytest.mark.parametrize("end", [SystemExit(0), asyncio.CancelledError()])
def test_a_workflow_that_ends_itself_is_an_error_at_once(make, end):
    ex = make()
    ex.submit({"row_id": 7, "error": end}, Scripted())
    with pytest.raises(RuntimeError, match="Scripted ended with") as info:
        ex.wait(1)
    assert "in the episode of row 7" in info.value.__notes__
    ex.submit({"row_id": 8}, Scripted())
    assert row_ids(ex.wait(1)) == [8]


def test_episode_timeout_names_the_row(make):
    ex = make(episode_timeout=0.05)
    ex.submit({"row_id": 7, "sleep": 30.0}, Scripted())
    with pytest.raises(TimeoutError, match=r"row 7 took longer than rollout.episode_timeout=0.05"):
        ex.wait(1, timeout=10)


def test_an_episode_of_a_batch_that_takes_too_long_is_a_failure_of_its_length(make):
    ex = make(episode_timeout=0.2)
    ex.episodes.keeps_answers = True
    batch = prepare_batch(ex, Loader(rows(4, r1={"sleep": 30.0}), 2), Scripted())
    assert row_ids(batch) == [0, 2]
    stats = ex.stats()
    assert stats["failed_samples/timeout"] == stats["failed_samples"] == 1
    assert (stats["accepted"], stats["rejected"], stats["failed"]) == (2, 1, 0)


def test_a_workflow_that_never_ends_stops_the_run(make):
    ex, flow = make(episode_timeout=0.05), Scripted()
    flow.gconfig = GenerationHyperparameters(n_samples=16)
    data = [row | {"sleep": 30.0} for row in rows(40)]
    with pytest.raises(RuntimeError, match=r"rollouts failed \(\d+ timeout\)"):
        prepare_batch(ex, Loader(data, 2), flow)


def test_a_workflow_that_blocks_the_loop_is_an_error_with_its_line(make, monkeypatch):
    monkeypatch.setattr("megarl.rollout.loop_thread.BLOCKED_AFTER", 0.2)
    monkeypatch.setattr("megarl.rollout.executor.GRACE", 1.0)
    end = threading.Event()

    class Blocking(Scripted):
        async def arun_episode(self, engine, data):
            end.wait(60)  # as time.sleep would

    ex = make(episode_timeout=0.1)
    ex.submit({"row_id": 3}, Blocking())
    words = r"(?s)1 episodes: .*1 running.*none ended for rollout.episode_timeout.*end\.wait\(60\)"
    with pytest.raises(TimeoutError, match=words):
        ex.wait(1)
    end.set()


def test_a_workflows_own_timeout_is_not_taken_for_the_episodes(make):
    ex = make()
    ex.submit({"row_id": 7, "error": TimeoutError("the tool was slow")}, Scripted())
    with pytest.raises(TimeoutError, match="the tool was slow"):
        ex.wait(1, timeout=10)


class Wrong(Scripted):
    def __init__(self, returned):
        super().__init__()
        self.returned = returned

    async def arun_episode(self, engine, data):
        return self.returned


@pytest.mark.parametrize("returned", [[1], {"rewards": 1}])
def test_a_result_that_is_no_batch_is_an_error(make, returned):
    ex = make()
    ex.submit({"row_id": 0}, Wrong(returned))
    with pytest.raises(TypeError, match="Wrong returned for row 0: "):
        ex.wait(1, timeout=10)


def test_a_batch_that_breaks_a_rule_is_an_error_that_names_workflow_and_row(make):
    """A trained token that no weights wrote would be redrawn for ever."""
    ex, bad = make(), trajectory([1, 2], version=0, n=2)
    bad["versions"][1, 2] = -1
    words = r"Wrong returned for row 4: versions of sample 1, position 2 is -1: loss_mask marks"
    with pytest.raises(ValueError, match=words):
        prepare_batch(ex, Loader(rows(6)[4:], 2), Wrong(bad))
    with pytest.raises(ValueError, match=words.replace("row 4", "row 9")):
        make().rollout_batch([{"row_id": 9}], Wrong(bad))
    ex = make()
    ex.vocab_size = 9
    with pytest.raises(ValueError, match=r"input_ids of sample 0, position 0 is 9: .*9 tokens"):
        ex.rollout_batch(rows(1), Scripted())


def test_wait_times_out_and_keeps_what_is_there(make):
    ex = make()
    for row in rows(2, r1={"sleep": 0.5}):
        ex.submit(row, Scripted())
    with pytest.raises(TimeoutError, match="2 episodes: 2 submitted, 1 running"):
        ex.wait(2, timeout=0.1)
    assert row_ids(ex.wait(2, timeout=10)) == [0, 1]


def test_waiting_for_more_than_was_submitted_is_an_error(make):
    ex = make()
    ex.submit({"row_id": 0}, Scripted())
    with pytest.raises(RuntimeError, match="waiting for 2 episodes, but only 1"):
        ex.wait(2)


def test_reward_errors_stop_the_run_or_reject(make):
    data = rows(3, r1={"error": RewardError("row 1 has no answer")})
    strict, lenient = make(), make(on_reward_error="reject")
    for row in data:
        strict.submit(row, Scripted())
        lenient.submit(row, Scripted())
    with pytest.raises(RewardError, match="row 1 has no answer"):
        strict.wait(3, timeout=10)
    assert row_ids(lenient.wait(2, timeout=10)) == [0, 2]
    stats = lenient.stats()  # it is made anew once, see failure_retries
    assert (stats["failed_samples/reward"], stats["rejected"]) == (2, 1)


def test_the_error_of_an_episode_that_still_runs_hides_no_other(make):
    """An episode has its error before it counts as broken; meanwhile another one breaks."""
    ex, both = make(), asyncio.Barrier(2)
    held = asyncio.Event()

    async def runner(episode):
        episode.error = RewardError(f"row {episode.row['row_id']} has no answer")
        await both.wait()
        if episode.row["row_id"] == 0:
            await held.wait()

    ex.runner = runner
    for row in rows(2):
        ex.submit(row, Scripted())
    with pytest.raises(RewardError, match="row 1 has no answer"):
        ex.wait(2, timeout=10)


def test_synchronous_batches_are_always_on_policy(make):
    ex, flow = make(), Scripted()
    loader = Loader(rows(8), 4)
    for version in range(5):
        batch = prepare_batch(ex, loader, flow)
        assert row_ids(batch) == ([0, 1, 2, 3] if version % 2 == 0 else [4, 5, 6, 7])
        assert set(batch["versions"][batch["loss_mask"]].tolist()) == {version}
        settle(ex)
        assert ex.stats()["submitted"] == 4 * (version + 1)  # nothing was started ahead
        ex.bump(version + 1)
    assert loader.epochs == 3


def test_synchronous_without_a_version_bump_is_an_error(make):
    ex, loader = make(), Loader(rows(8), 4)
    prepare_batch(ex, loader, Scripted())
    with pytest.raises(RuntimeError, match="call update_weights or set_version"):
        prepare_batch(ex, loader, Scripted())


def test_asynchronous_runs_ahead_up_to_the_bound(make):
    ex, flow = make(max_head_offpolicyness=2, max_concurrent_rollouts=64), Scripted()
    loader = Loader(rows(400), 4)
    ages = []
    for version in range(8):
        batch = prepare_batch(ex, loader, flow)
        assert row_ids(batch) == list(range(4 * version, 4 * version + 4))
        ages.append(int((version - batch["versions"][batch["loss_mask"]]).max()))
        settle(ex)
        stats = ex.stats()
        assert stats["accepted"] == (2 + version + 1) * 4
        assert stats["pending"] == 4  # the next version starts these before the trainer returns
        ex.bump(version + 1)
    assert max(ages) == 2 and ages[0] == 0
    assert ex.stats()["dropped"] == 0


def test_completion_takes_what_is_done_until_the_bound_calls_for_the_slow(make):
    """Row 0 is passed by the batch of version 0, and waited for at version 1."""
    ex = make(order="completion", max_head_offpolicyness=1, max_concurrent_rollouts=8)
    flow = Scripted()
    loader = Loader(rows(40, r0={"sleep": 1.0}, r4={"sleep": 0.2}), 2)
    assert row_ids(prepare_batch(ex, loader, flow)) == [1, 2]
    ex.bump(1)
    assert row_ids(prepare_batch(ex, loader, flow)) == [0, 3]
    ex.bump(2)
    batch = prepare_batch(ex, loader, flow)
    assert int(2 - batch["versions"][batch["loss_mask"]].min()) <= 1
    assert ex.stats()["dropped"] == 0


def test_completion_orders_what_was_submitted_by_hand_too(make):
    ex, flow = make(order="completion"), Scripted()
    for row in rows(6, r0={"sleep": 0.5}, r1={"sleep": 0.1}):
        ex.submit(row, flow)
    even = ex.wait(2, timeout=10, should_accept=lambda b: row_ids(b)[0] % 2 == 0)
    assert row_ids(even) == [2, 4]
    assert ex.stats()["rejected"] == 1  # 3 was asked about on the way, 5 was not
    assert [row_ids(ex.wait(1, timeout=10)) for _ in range(3)] == [[5], [1], [0]]


def test_a_version_without_a_batch_is_an_error(make):
    ex, loader = make(max_head_offpolicyness=1), Loader(rows(40), 4)
    ex.bump(7)  # before the first episode: where the run begins
    prepare_batch(ex, loader, Scripted())
    ex.bump(8)
    words = (
        "version 9 has no batch of its own: 2 versions since 7, but 1 batches of 4 episodes were "
        "handed out; call update_weights or set_version once for each batch"
    )
    with pytest.raises(ValueError, match=words):
        ex.bump(9)


def test_what_is_too_stale_is_dropped_and_its_row_comes_again(make):
    ex, flow = make(version=5, max_head_offpolicyness=1), Scripted()
    loader = Loader(rows(12, r1={"age": 3}), 4)
    batch = prepare_batch(ex, loader, flow)
    versions = batch["versions"][batch["loss_mask"]]
    assert int(5 - versions.min()) <= 1
    assert row_ids(batch) == [0, 2, 3, 4]  # row 1 went to the end of the order
    assert ex.stats()["dropped"] == 1
    for version in (6, 7):
        settle(ex)
        ex.bump(version)
        batch = prepare_batch(ex, loader, flow)
    assert row_ids(batch) == [9, 10, 11, 1]
    assert int(7 - batch["versions"][batch["loss_mask"]].min()) <= 1


@pytest.mark.parametrize("drawn", (True, False))
def test_a_row_that_is_always_too_stale_is_an_error(make, drawn):
    class Replayed(Scripted):
        async def arun_episode(self, engine, data):
            self.started.append((data["row_id"], engine.get_version(), data["episode_id"]))
            return trajectory([1], version=2)

    ex, flow = make(version=5, max_head_offpolicyness=1), Replayed()
    words = (
        rf"row 0 was dropped {MAX_DROPS} times in a row: at version 5 Replayed returned trained "
        "tokens of version 2, which rollout.max_head_offpolicyness=1 is too low for"
    )
    with pytest.raises(RuntimeError, match=words):
        if drawn:
            prepare_batch(ex, Loader(rows(400), 2), flow)
        else:
            ex.submit({"row_id": 0}, flow)
            ex.wait(1, timeout=10)
    assert sum(row == 0 for row, _, _ in flow.started) == MAX_DROPS


@pytest.mark.parametrize("eta", (0, 1, 3))
def test_nothing_is_started_that_no_batch_will_take(make, eta):
    """Five batches of 4, two rejected rows and one dropped one, which are replaced."""
    ex, flow = make(version=7, max_head_offpolicyness=eta, max_concurrent_rollouts=64), Scripted()
    special = dict(r2={"reject": True}, r17={"reject": True}, r5={"age": 5})
    loader = Loader(rows(400, **special), 4)
    ex.expect(5)
    for version in range(7, 12):
        prepare_batch(ex, loader, flow)
        settle(ex)
        ex.bump(version + 1)
    settle(ex)
    stats = ex.stats()
    assert (stats["rejected"], stats["dropped"]) == (2, 1)
    assert stats["submitted"] == len(flow.started) == 5 * 4 + 3
    assert stats["running"] == stats["pending"] == 0 and stats["handed_out"] == 20
    with pytest.raises(RuntimeError, match=r"all batches that expect\(\) allows were taken"):
        prepare_batch(ex, loader, flow)
    ex.expect(1)
    prepare_batch(ex, loader, flow)


def test_rejected_groups_are_replaced_by_new_prompts(make):
    ex, flow = make(), Scripted()
    loader = Loader(rows(16, r1={"reject": True}, r2={"reject": True}, r4={"reject": True}), 4)
    assert row_ids(prepare_batch(ex, loader, flow)) == [0, 3, 5, 6]
    ex.bump(1)
    assert row_ids(prepare_batch(ex, loader, flow)) == [7, 8, 9, 10]


def test_rejecting_everything_is_an_error(make):
    ex, loader = make(), Loader(rows(4), 2)
    with pytest.raises(RuntimeError, match="groups in a row were rejected"):
        prepare_batch(ex, loader, Scripted(), should_accept=lambda b: False)
    assert ex.stats()["rejected"] >= 2 * MAX_REJECTED_BATCHES


def test_a_row_that_comes_again_under_the_same_weights_is_another_episode(make):
    ex, flow, seen = make(), Scripted(), []

    def third_time(batch):
        seen.append(0)
        return len(seen) > 4

    prepare_batch(ex, Loader(rows(2), 2), flow, should_accept=third_time)
    assert flow.started == [(0, 0, 0), (1, 0, 1), (0, 0, 2), (1, 0, 3), (0, 0, 4), (1, 0, 5)]


def test_rollout_batch_ignores_staleness_and_keeps_row_numbers(make):
    ex, flow = make(), Scripted()
    prepare_batch(ex, Loader(rows(4), 2), flow)  # synchronous: no capacity left
    batch = ex.rollout_batch(rows(9, r0={"sleep": 0.1}, r4={"reject": True}), flow)
    assert row_ids(batch) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert batch["group_ids"].tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
    assert ex.stats()["submitted"] == 2


def test_rollout_batch_raises_the_first_error_and_cancels_the_rest(make):
    ex, flow = make(), Scripted()
    data = rows(3, r0={"sleep": 60.0}, r1={"error": ValueError("bad row")}, r2={"sleep": 60.0})
    with pytest.raises(ValueError, match="bad row"):
        ex.rollout_batch(data, flow)
    assert flow.running == 0
    with pytest.raises(RuntimeError, match="all 1 rows were rejected"):
        ex.rollout_batch(rows(1, r0={"reject": True}), flow)


def test_a_held_out_row_that_fails_is_counted_and_the_others_are_measured(make):
    """Rows that overrun the time, fail in every run, or fail at first; one is rejected."""
    ex = make(episode_timeout=0.3)
    flow = Stubborn({1: 2, 2: 1})
    flow.gconfig = GenerationHyperparameters(n_samples=4)
    data = rows(5, r0={"sleep": 60.0}, r1={"n": 4}, r2={"n": 4}, r3={"reject": True}, r4={"n": 4})
    batch, failed = ex.answer(data, flow)
    assert row_ids(batch) == [2] * 4 + [4] * 4 and failed == [4, 4, 0, 0, 0]
    assert batch["group_ids"].tolist() == [2] * 4 + [4] * 4
    assert row_ids(ex.rollout_batch(data, Stubborn({}))) == [1] * 4 + [2] * 4 + [4] * 4
    assert ex.answer(rows(2, r0={"sleep": 60.0}, r1={"sleep": 60.0}), flow) == (None, [4, 4])
    with pytest.raises(RuntimeError, match="all 1 rows"):
        ex.rollout_batch(rows(1, r0={"sleep": 60.0}), flow)
    with pytest.raises(KeyError, match="broken"):  # a fault in the workflow is no failure
        ex.answer(rows(2, r1={"error": KeyError("broken")}), flow)
    ex.submit({"row_id": 0, "sleep": 60.0}, flow)  # nobody could take the place of a single one
    with pytest.raises(TimeoutError, match="row 0"):
        ex.wait(1, timeout=30)


class Stubborn(Scripted):
    """Row i fails as a whole in its first times[i] runs."""

    def __init__(self, times):
        super().__init__()
        self.times = dict(times)

    async def arun_episode(self, engine, data):
        left = self.times.get(data["row_id"], 0)
        if left:
            self.times[data["row_id"]] = left - 1
            raise RolloutFailed("environment", "no sandbox")
        return await super().arun_episode(engine, data)


def test_held_executor_starts_nothing(make):
    ex, flow = make(), Scripted()
    ex.hold()
    ex.submit({"row_id": 0}, flow)
    with pytest.raises(RuntimeError, match="paused: resume"):
        ex.wait(1, timeout=10)
    assert flow.started == []
    ex.release()
    assert row_ids(ex.wait(1, timeout=10)) == [0]


def test_a_pause_is_not_the_episodes_time(make):
    """Three seconds in all, two of them paused; what runs out of time in the rest still does."""
    ex, flow = make(episode_timeout=2.0), Scripted()
    data = rows(3, r0={"sleep": 3.0}, r1={"sleep": 60.0}, r2={"error": ValueError("in the pause")})
    for row in data:
        ex.submit(row, flow)
    while len(flow.started) < 3:
        time.sleep(0.01)
    ex.hold()
    with pytest.raises(ValueError, match="in the pause"):
        ex.wait(1, timeout=30)
    answers = []  # rows that are asked for in a pause begin to count at its end
    asking = threading.Thread(
        target=lambda: answers.append(
            ex.answer(rows(2, r0={"sleep": 2.5}, r1={"sleep": 60.0}), flow)
        )
    )
    asking.start()
    time.sleep(2.0)
    ex.hold()  # once more is once
    ex.release()
    with pytest.raises(TimeoutError, match="row 1"):
        ex.wait(2, timeout=30)
    assert row_ids(ex.wait(1, timeout=30)) == [0]
    asking.join()
    assert row_ids(answers[0].batch) == [0] and answers[0].failed == [0, 1]


def test_resumed_run_continues_with_the_rows_in_flight(make):
    config = {"max_head_offpolicyness": 1, "max_concurrent_rollouts": 64}
    data = rows(40)
    first, reference = make(**config), make(**config)
    loaders = Loader(data, 4), Loader(data, 4)
    for ex, loader in zip((first, reference), loaders):
        prepare_batch(ex, loader, Scripted())
    settle(first)
    state = first.state_dict()
    second = make(version=1, **config)
    second.load_state_dict(state)
    resumed = prepare_batch(second, Loader(data[loaders[0].drawn :], 4), Scripted())
    reference.bump(1)
    assert row_ids(resumed) == row_ids(prepare_batch(reference, loaders[1], Scripted()))


def test_a_stale_row_of_a_resumed_run_goes_behind_all_that_were_in_flight(make):
    config = {"max_head_offpolicyness": 1, "max_concurrent_rollouts": 64}
    first = make(version=10, **config)
    prepare_batch(first, Loader(rows(40), 4), Scripted())
    settle(first)
    state = first.state_dict()
    in_flight = [row["row_id"] for row in state["rows"][: len(state["numbers"])]]
    state["rows"][0]["age"] = 9
    second = make(version=11, **config)
    second.load_state_dict(state)
    loader, flow, order = Loader(rows(40), 1), Scripted(), []  # fewer rows at once than are left
    for version in range(12, 12 + len(in_flight)):
        order += row_ids(prepare_batch(second, loader, flow))
        second.bump(version)
    assert order == [*in_flight[1:], in_flight[0]]


class IntegerMasks(Scripted):
    """Returns masks of integers, as AReaL's workflows do; a row's `mask` replaces their ones."""

    async def arun_episode(self, engine, data):
        batch = await super().arun_episode(engine, data)
        return batch | {
            "attention_mask": batch["attention_mask"].long(),
            "loss_mask": batch["loss_mask"].int() * data.get("mask", 1),
        }


def test_masks_of_zeros_and_ones_are_booleans(make):
    batch = prepare_batch(make(), Loader(rows(2), 2), IntegerMasks())
    reference = prepare_batch(make(), Loader(rows(2), 2), Scripted())
    for key in ("attention_mask", "loss_mask"):
        assert batch[key].dtype == torch.bool and torch.equal(batch[key], reference[key])
    with pytest.raises(ValueError, match="loss_mask"):
        prepare_batch(make(), Loader(rows(2, r0={"mask": 2}), 2), IntegerMasks())


def test_another_dataloader_is_refused(make):
    ex = make()
    prepare_batch(ex, Loader(rows(2), 2), Scripted())
    with pytest.raises(ValueError, match="another dataloader"):
        prepare_batch(ex, Loader(rows(2), 2), Scripted())


def test_a_dataloader_that_yielded_nothing_may_be_replaced(make):
    ex = make()
    with pytest.raises(ValueError, match="single rows"):
        prepare_batch(ex, rows(2), Scripted())
    assert len(row_ids(prepare_batch(ex, Loader(rows(2), 2), Scripted()))) == 2


def test_dataloader_without_a_batch_is_an_error(make):
    with pytest.raises(ValueError, match="yields no batch"):
        prepare_batch(make(), Loader(rows(2), 4), Scripted())


def test_closing_the_loop_cancels_episodes_and_ends_the_thread(make):
    loop = LoopThread("short-lived")
    flow = Scripted()
    ex = RolloutExecutor(RolloutConfig(), engine=FakeEngine(), loop=loop)
    ex.submit({"row_id": 0, "sleep": 600.0}, flow)
    while not flow.running:
        time.sleep(0.005)
    loop.close()
    assert flow.running == 0
    assert "short-lived" not in {t.name for t in threading.enumerate()}
    with pytest.raises(RuntimeError, match="rollout thread has ended"):
        ex.wait(1)


def test_rows_in_place_of_batches_of_rows_are_an_error_that_names_the_fix():
    stream = RowStream()
    with pytest.raises(ValueError, match="yields single rows, and a batch of rows is needed"):
        stream.attach([{"row_id": 0}, {"row_id": 1}])


@pytest.mark.parametrize("ends", [asyncio.CancelledError(), SystemExit(3)])
def test_what_ends_should_accept_is_an_error_of_its_row(make, ends):
    def accept(batch):
        raise ends

    ex = make()
    ex.submit(*rows(1), Scripted(), should_accept=accept)
    with pytest.raises(RuntimeError, match=f"should_accept ended with {type(ends).__name__}"):
        ex.wait(1, timeout=10)


def test_a_stream_goes_on_behind_an_error_of_the_dataloader():
    class Loader:
        batch_size = 1

        def __init__(self):
            self.drawn = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.drawn += 1
            if self.drawn == 2:
                raise OSError("for a moment")
            return [{"row_id": self.drawn}]

    stream = RowStream()
    stream.attach(Loader())
    assert stream.next_row() == {"row_id": 1}
    with pytest.raises(OSError, match="for a moment"):
        stream.next_row()
    assert stream.next_row() == {"row_id": 3}
