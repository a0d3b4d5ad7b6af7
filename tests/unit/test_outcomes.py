"""What answers earned, as the next rows are chosen by it: told in order, and kept over a resume."""

from __future__ import annotations

import random
import time

import pytest

from megarl.config.dataset import DatasetConfig, PartConfig
from megarl.config.rollout import RolloutConfig
from megarl.data.dataset import RowDataset, build_dataloader, go_on
from megarl.rollout.chat import MixedWorkflow
from megarl.rollout.episodes import Outcome
from megarl.rollout.executor import RolloutExecutor
from megarl.rollout.loop_thread import LoopThread
from megarl.trainer.session import Results
from tests.unit.rollout_fakes import FakeEngine, Scripted, prepare_batch, row_ids, trajectory

BATCH = 4


class Graded(Scripted):
    """Each row earns by a fixed rule, after a random wait, so that none ends in its turn."""

    async def arun_episode(self, engine, data):
        data = data | {"sleep": random.random() / 200}
        batch = await super().arun_episode(engine, data)
        batch["rewards"][:] = data["row_id"] % 4 / 3
        return batch


class Run:
    """A trainer's side of a curriculum: batches, results, checkpoints."""

    def __init__(self, eta: int, state=None) -> None:
        self.loop, self.engine = LoopThread("test-rollout"), FakeEngine(0)
        self.executor = RolloutExecutor(
            RolloutConfig(max_head_offpolicyness=eta), engine=self.engine, loop=self.loop
        )
        cfg = DatasetConfig(batch_size=BATCH, curriculum={"low": 0.3, "high": 0.7})
        rows = [{"row_id": i, "dataset": ""} for i in range(24)]
        self.loader = build_dataloader(RowDataset(rows), cfg, seed=5)
        self.flow = Graded()
        if state is not None:
            self.engine.version = state["version"]
            self.executor.version_changed(state["version"])
            go_on(self.loader, state["loader"])
            self.executor.load_state_dict(state["rollout"])

    def step(self, accept):
        batch = prepare_batch(self.executor, self.loader, self.flow, should_accept=accept)
        told = [(o.row["row_id"], list(o.rewards)) for o in self.executor.outcomes]
        self.loader.sampler.observe((row, rewards[0]) for row, rewards in told)
        self.executor.trained(batch["episode_ids"])
        self.engine.version += 1
        self.executor.version_changed(self.engine.version)
        return row_ids(batch), told

    def state(self):
        return {
            "loader": self.loader.state_dict(),
            "rollout": self.executor.state_dict(),
            "version": self.engine.version,
        }


@pytest.fixture
def run():
    made = []

    def make(*args):
        made.append(Run(*args))
        return made[-1]

    yield make
    for each in made:
        each.loop.close()


def some(batch):
    """Rejects what earned all or nothing, as dynamic sampling does."""
    return 0 < float(batch["rewards"][0]) < 1


@pytest.mark.parametrize(("eta", "accept"), [(0, None), (0, some), (2, None)])
def test_draws_are_the_same_whichever_episode_ends_first_and_after_a_resume(run, eta, accept):
    whole = run(eta)
    steps = [whole.step(accept) for _ in range(8)]
    again = run(eta)
    assert [again.step(accept) for _ in range(3)] == steps[:3]
    resumed = run(eta, again.state())
    assert [resumed.step(accept) for _ in range(5)] == steps[3:]
    drawn = [row for _, told in steps for row, _ in told]
    in_band = sum(row % 4 in (1, 2) for row in drawn[24:])
    assert in_band > len(drawn[24:]) / 2  # of all rows they are a half
    if accept is some:
        told = [row for _, told in steps for row, rewards in told if not 0 < rewards[0] < 1]
        assert told  # rejected ones are told, too


def test_a_rejected_episode_is_told_with_the_batch_that_passes_it_and_kept_until_then(run):
    first = run(2)
    ids, told = first.step(some)
    assert sorted(row for row, rewards in told if 0 < rewards[0] < 1) == sorted(ids)
    deadline = time.monotonic() + 10.0
    while any(e.batch is None for e in first.executor.episodes.live.values()):
        assert time.monotonic() < deadline  # until all has ended
        time.sleep(0.01)
    state = first.state()
    untold = {row["row_id"] for row, _ in state["rollout"]["outcomes"]}
    assert untold and all(row % 4 in (0, 3) for row in untold)
    second = run(2, state)
    assert untold <= {row for row, _ in second.step(some)[1]}


def test_each_row_goes_to_the_workflow_of_its_part(run):
    class Named(Scripted):
        def __init__(self, reward):
            super().__init__()
            self.reward = reward

        async def arun_episode(self, engine, data):
            return trajectory([data["row_id"]], version=0, reward=self.reward)

    mixed = MixedWorkflow({"a": Named(1.0), "b": Named(2.0)}, gconfig=None)
    rows = [{"row_id": i, "dataset": "ab"[i % 2]} for i in range(6)]
    batch = run(0).executor.rollout_batch(rows, mixed)
    assert batch["rewards"].tolist() == [1.0, 2.0] * 3


def test_figures_are_by_part_and_rates_are_of_answers():
    parts = {"a": range(2), "b": range(2, 4)}
    cfg = DatasetConfig(
        type="mix", batch_size=2, parts={"a": PartConfig(), "b": PartConfig()},
        curriculum={"passes_at": 0.5, "low": 0.4, "high": 0.6},
    )  # fmt: skip
    rows = [{"row_id": i, "dataset": "aabb"[i]} for i in range(4)]
    loader = build_dataloader(RowDataset(rows, parts=parts), cfg, seed=1)
    results = Results(cfg, loader.sampler)
    results.take([Outcome(rows[0], [1.0, 0.2]), Outcome(rows[1], []), Outcome(rows[3], [0.1])])
    assert results.figures == {
        "dataset/a/prompts": 2.0, "dataset/a/reward": pytest.approx(0.6),
        "dataset/b/prompts": 1.0, "dataset/b/reward": pytest.approx(0.1),
        "curriculum/in_band": 1.0, "curriculum/answered": 2.0, "curriculum/explored": 0.0,
    }  # fmt: skip
    untouched = Results(DatasetConfig(), object())
    untouched.take([Outcome(rows[0], [1.0])])
    assert untouched.figures == {}
