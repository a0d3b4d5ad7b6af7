"""Samples that failed leave the batch: what is computed of the others knows nothing of them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algos import Actor, Critic
from megarl.algos.specs import NAMES as ESTIMATORS
from megarl.api.batch import Batch
from megarl.api.inference import FAILURES, SAMPLES_MISSING, RolloutFailed
from megarl.config.algo import PPOActorConfig, PPOCriticConfig
from megarl.config.base import SeamConfig
from megarl.config.recipes import GRPOConfig
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig
from megarl.rollout.episode import batch_parts, without_failed
from megarl.rollout.episode_context import attempt_key
from megarl.rollout.episodes import AccountingError, Episode
from megarl.rollout.executor import RolloutExecutor
from megarl.rollout.loop_thread import LoopThread
from megarl.rollout.rewards.results import RewardUnavailable
from megarl.trainer.rl import RLTrainer
from megarl.trainer.rollout_metrics import rollout_metrics
from megarl.trainer.session import RolloutDriver, RolloutSession
from tests.unit.bigram import BigramEngine
from tests.unit.presets import NAMES, preset
from tests.unit.rollout_fakes import FakeEngine, Scripted, prepare_batch, rows, trajectory
from tests.unit.test_critic import ValueEngine

GARBAGE = torch.nan


def an_episode(
    seed: int, valid: list[bool], *, with_failed: bool, forks: int = 0
) -> dict[str, torch.Tensor]:
    """Rollouts of a prompt of one token, of up to 1 + `forks` rows; those that failed hold garbage,
    or are not there."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.randint(1, 2 + forks, (len(valid),), generator=g)
    ids = torch.arange(len(valid)).repeat_interleave(rows)
    n, width = len(ids), 9
    lengths = torch.randint(2, width + 1, (n,), generator=g)
    mask = torch.arange(width)[None] < lengths[:, None]
    loss_mask = mask & (torch.arange(width) > 0)
    batch = {
        "input_ids": torch.randint(11, (n, width), generator=g) * mask,
        "attention_mask": mask,
        "loss_mask": loss_mask,
        "logprobs": -torch.rand(n, width, generator=g) * loss_mask,
        "versions": torch.where(loss_mask, 0, -1).int(),
        "rewards": torch.randn(len(valid), generator=g)[ids],
        "baseline": torch.full((n,), 0.5),
        "reward_part/right": torch.randn(len(valid), generator=g)[ids],
        "reward_part/short": torch.randn(len(valid), generator=g)[ids],
        "truncated": torch.arange(n) % 3 == 0,
        "rollout_ids": ids,
    }
    good = torch.tensor(valid)[ids]
    if not with_failed:
        return {k: v[good] for k, v in batch.items()}
    for value in batch.values():
        if value.is_floating_point():
            value[~good] = GARBAGE
    batch["input_ids"][~good] = 10**6
    batch["attention_mask"][~good] = batch["loss_mask"][~good] = False
    return batch | {"valid": good}


def joined(parts: list[dict[str, torch.Tensor]]) -> Batch:
    episodes = []
    for number, part in enumerate(parts):
        kept, failed = without_failed(part)
        if kept is not None:
            episode: Any = SimpleNamespace(number=number, batch=kept, failed=failed)
            episodes.append(episode)
    numbers = [e.number for e in episodes]
    return Batch.from_local(batch_parts(episodes, group_ids=numbers))


def everything(batch: Batch, config: PPOActorConfig, size: int, *, gae: bool) -> dict[str, Any]:
    """All that a step makes of the batch in micro-batches of `size` rows; gae: with a critic."""
    actor = Actor(config, BigramEngine(rows=size), temperature=1.0)
    actor.compute_prox_logp(batch)
    if gae:
        critic = Critic(PPOCriticConfig(), ValueEngine(rows=size))
        critic.compute_values(batch)
        actor.compute_gae(batch, discount=0.9, gae_lambda=0.8, kl_ctl=0.0, bootstrap=True)
        made = {"critic": critic.ppo_update(batch), "value_table": critic.engine.table.detach()}
    else:
        actor.compute_advantages(batch)
        made = {"critic": {}}
    stats = rollout_metrics(batch, version=1) | actor.ppo_update(batch)
    return made | {"stats": stats, "table": actor.engine.table.detach(), **batch.padded()}


MODES = ("group", "group_mean", "group_batch", "batch", "none")


def levels(mean: str, std: str) -> PPOActorConfig:
    return PPOActorConfig(advantages=SeamConfig(type="levels", options={"mean": mean, "std": std}))


STEPS: dict[str, tuple[PPOActorConfig, bool]] = {
    **{name: (preset(name), False) for name in NAMES},
    **{f"adv_norm={mode}": (PPOActorConfig(adv_norm=mode), False) for mode in MODES},
    **{
        f"loss_agg={agg}": (PPOActorConfig(loss_agg=agg), False)
        for agg in ("rollout-mean", "token-sum")
    },
    **{
        f"levels={mean},{std}": (levels(mean, std), False)
        for mean in ("group", "leave_one_out", "batch", "none")
        for std in ("group", "batch", "none")
    },
    "gae": (PPOActorConfig(adv_norm="batch"), True),
}


@pytest.mark.parametrize("step", STEPS)
@settings(max_examples=3, deadline=None)
@given(
    valid=st.lists(st.lists(st.booleans(), min_size=2, max_size=5), min_size=2, max_size=4).filter(
        lambda groups: any(map(any, groups)) and not all(map(all, groups))
    ),
    forks=st.integers(0, 2),
)
def test_failed_samples_anywhere_change_no_bit(step, valid, forks):
    """Every estimator and every preset, in two ways of cutting the step into micro-batches."""
    config, gae = STEPS[step]

    def run(with_failed: bool, size: int) -> dict[str, Any]:
        parts = [
            an_episode(i, v, with_failed=with_failed, forks=0 if gae else forks)
            for i, v in enumerate(valid)
        ]
        batch = joined([p for p in parts if len(p["input_ids"])])
        return everything(batch, config, size, gae=gae)

    clean = {}
    for size in (2, 5):
        spoilt, clean[size] = run(True, size), run(False, size)
        same_bits(spoilt, clean[size])
        assert all(v == v for v in spoilt["stats"].values())
    for name in ("advantages", "prox_logp", "returns"):  # nor does the cutting change these
        if name in clean[2]:
            assert torch.equal(clean[2][name], clean[5][name]), name


def test_these_steps_are_of_every_estimator():
    made = {config.advantages.type for config, _ in STEPS.values()}
    assert made == ESTIMATORS["advantages"].keys() - {"teacher"}  # see test_distillation.py


def same_bits(got: dict[str, Any], want: dict[str, Any]) -> None:
    """Checks all but the numbers of groups: one whose samples all failed keeps its number."""
    assert got.keys() == want.keys()
    assert got["stats"] == want["stats"] and got["critic"] == want["critic"]
    for name in got.keys() - {"stats", "critic", "episode_ids", "group_ids"}:
        assert torch.equal(got[name], want[name]), name


class HalfFailed(Scripted):
    """Of every row's four samples the first `broken` failed, for the reason `why`."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        batch = trajectory([data["row_id"]], version=engine.get_version(), n=4)
        bad = torch.arange(4) < data.get("broken", 2)
        batch["rewards"][bad] = GARBAGE
        return batch | {
            "valid": ~bad,
            "failure": torch.full((4,), FAILURES.index(data.get("why", "tool"))),
        }


class Loader:
    def __init__(self, data: list[dict[str, Any]], batch_size: int) -> None:
        self.data, self.batch_size = data, batch_size

    def __iter__(self) -> Any:
        n = self.batch_size
        return (self.data[i : i + n] for i in range(0, len(self.data), n))


def test_failed_samples_are_counted_and_an_episode_without_others_is_replaced():
    loop = LoopThread("test-failed")
    try:
        once = RolloutConfig(failure_retries=0)
        ex = RolloutExecutor(once, engine=FakeEngine(), loop=loop)
        data = rows(12, r1=dict(broken=4, why="server"), r2=dict(broken=0))
        batch = prepare_batch(ex, Loader(data, 3), HalfFailed(), should_accept=all_are_numbers)
        assert batch["input_ids"][:, 1].tolist() == [0, 0, 2, 2, 2, 2, 3, 3]
        assert batch["group_ids"].tolist() == [0, 0, 1, 1, 1, 1, 2, 2]
        assert "valid" not in batch and "failure" not in batch
        stats = ex.stats()
        assert stats["failed_samples"] == 8 and stats["rejected"] == 1 and stats["failed"] == 0
        assert stats["failed_samples/tool"] == stats["failed_samples/server"] == 4
        assert stats["failed_samples/len_mean"] == 2
        whole = Batch.from_local(batch)  # a reward model finds two more, all of the first row's
        scores = torch.tensor([math.nan, math.inf, *range(6)])
        kept = scoring_trainer(ex, scores).score(whole)
        assert kept["rewards"].tolist() == list(range(6)) and whole.minibatches is not None
        with pytest.raises(ValueError, match=r"all 6 samples of the batch failed \(reward\)"):
            scoring_trainer(ex, scores[:1].expand(6)).score(kept)
        kept["rewards"] = scores[2:]
        session = scoring_trainer(ex, scores).session
        session.driver.counters = lambda: {f"rollout/{k}": v for k, v in ex.stats().items()}
        booked = session.account(kept)
        assert booked["rollout/failed_in_batch"] == 10
        assert booked["reward/mean_failed_as_zero"] == 15 / (6 + 10)
        assert ex.stats()["failed_samples/reward"] == 2 and ex.stats()["skipped"] == 1
        with pytest.raises(AccountingError, match="1 samples failed, it has fewer"):
            ex.failed(kept, torch.arange(len(kept)) == 0, "reward")
        again = RolloutExecutor(RolloutConfig(), engine=FakeEngine(), loop=loop)
        again.load_state_dict(ex.state_dict())
        assert again.stats()["failed_samples/tool"] == 4
        assert again.stats()["trained_samples"] == 6
    finally:
        loop.close()


def scoring_trainer(ex: RolloutExecutor, scores: torch.Tensor) -> RLTrainer:
    """A trainer after set_up, as far as `score` needs it; on one rank."""
    client: Any = SimpleNamespace(executor=ex, on_driver=lambda fn, *args: fn(*args))
    make = lambda kind, *args: Driver(client) if kind is RolloutDriver else client  # noqa: E731
    cfg = GRPOConfig(episodes={"keep": 0})
    trainer = RLTrainer.__new__(RLTrainer)
    trainer.session = RolloutSession(cfg, None, cast(Any, SimpleNamespace(make=make)))
    trainer.reward_model = cast(Any, SimpleNamespace(compute_rewards=lambda batch: scores.clone()))
    trainer.actor = cast(Any, Actor(PPOActorConfig(), BigramEngine(), temperature=1.0))
    return trainer


class Driver(RolloutDriver):
    def dataset_size(self) -> int:
        return 6

    def __init__(self, client: Any) -> None:
        self.client, self.recorder = client, None
        self.results = cast(Any, SimpleNamespace(figures={}))


def all_are_numbers(batch: dict[str, torch.Tensor]) -> bool:
    return bool(batch["rewards"].isfinite().all())


def test_units_are_numbered_through_all_episodes():
    parts = [trajectory([1], version=0, n=4) | {"unit_ids": torch.tensor([5, 5, 2, 2])}] * 2
    episodes = [
        Episode(number=k, row={}, workflow=Scripted(), batch=part) for k, part in enumerate(parts)
    ]
    made = batch_parts(episodes, group_ids=[0, 1])
    assert [p["unit_ids"].tolist() for p in made] == [[1, 1, 0, 0], [3, 3, 2, 2]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"valid": torch.ones(4)},
            r"valid of torch.float32 and shape \(4,\): use \[n=4\]",
        ),
        ({"valid": torch.ones(3).bool()}, r"shape \(3,\)"),
        ({"failure": torch.full((4,), 9)}, r"failure \[9, 9, 9, 9\]: .* 0 other, 1 environment"),
    ],
)
def test_a_wrong_valid_is_named(change, words):
    batch = trajectory([1], version=0, n=4) | {"valid": torch.ones(4).bool()}
    with pytest.raises(ValueError, match=words):
        without_failed(batch | change)


class Flaky(Scripted):
    """Four rollouts a row, or as many as are missing where it `listens`; in the n-th run of a row
    `fails[n]` of them fail, the first ones. Token 1 tells the run."""

    def __init__(self, *, listens: bool) -> None:
        super().__init__()
        self.listens = listens
        self.asked: list[int | None] = []
        self.seeds: set[tuple[int, ...]] = set()

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        runs = sum(row_id == data["row_id"] for row_id, _, _ in self.started)
        self.started.append((data["row_id"], engine.get_version(), data["episode_id"]))
        self.asked.append(data.get(SAMPLES_MISSING))
        self.seeds.add(attempt_key())
        fails = data.get("fails", ())
        broken = fails[runs] if runs < len(fails) else 0
        if broken == "all":
            raise RolloutFailed("environment", "no sandbox")
        n = data.get(SAMPLES_MISSING, 4) if self.listens else 4
        batch = trajectory([data["row_id"], runs], version=engine.get_version(), n=n)
        valid = torch.arange(n) >= broken
        batch["rewards"] = batch["rewards"].where(valid, torch.nan)
        return batch | {"valid": valid, "failure": torch.full((n,), FAILURES.index("tool"))}


def batch_under(config: RolloutConfig, data: Any, flow: Any, size: int = 2) -> Any:
    """The first batch of `size` rows, and the counters once it is trained."""
    loop = LoopThread("test-retries")
    try:
        ex = RolloutExecutor(config, engine=FakeEngine(), loop=loop)
        batch = prepare_batch(ex, Loader(data, size), flow)
        ex.trained(batch["episode_ids"])
        return batch, ex.stats()
    finally:
        loop.close()


class Late(Flaky):
    """Has a part of its rewards in the first run of row 0 alone, as where an answer was late."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        first = not self.started or data["row_id"] not in {row_id for row_id, _, _ in self.started}
        batch = await super().arun_episode(engine, data)
        late = {"reward_part/late": torch.ones(len(batch["rewards"]))}
        return batch | late if first and data["row_id"] == 0 else batch


def test_rewards_of_a_batch_may_have_parts_that_others_lack():
    batch, _ = batch_under(RolloutConfig(), rows(4, r0=dict(fails=[2])), Late(listens=False))
    late = batch["reward_part/late"]
    assert late[:2].tolist() == [1, 1] and late[2:].isnan().all() and len(late) == 8
    assert rollout_metrics(batch, version=0)["reward/late"] == 0.25


@pytest.mark.parametrize("listens", [True, False])
def test_what_failed_is_made_anew_and_every_group_is_whole(listens):
    flow = Flaky(listens=listens)
    data = rows(4, r0=dict(fails=[3, 1, 0]), r1=dict(fails=["all", 1]))
    batch, stats = batch_under(RolloutConfig(failure_retries=2), data, flow)
    made = batch["input_ids"][:, 1:].tolist()
    assert made[:4] == ([[0, 0], [0, 1], [0, 1], [0, 2]] if listens else [[0, 0]] + [[0, 1]] * 3)
    assert made[4:] == [[1, 1], [1, 1], [1, 1], [1, 2]]
    assert batch["group_ids"].tolist() == [0] * 4 + [1] * 4 and batch["rewards"].isfinite().all()
    assert sorted(map(str, flow.asked)) == ["1"] * (2 if listens else 1) + ["3"] + ["None"] * 3
    assert stats["retried_samples"] == 7  # 3, and all 4
    assert stats["failed_samples/tool"] == 5 and stats["failed_samples/environment"] == 1
    assert stats["failed_in_batch"] == stats["failed_samples"] == 6
    assert stats["rejected"] == stats["failed"] == 0 and stats["trained_samples"] == 8
    assert flow.seeds == {(), (1,), (2,)}  # seeded, too, a rollout is not made twice alike


def test_a_group_that_failures_leave_too_small_is_replaced():
    data = rows(6, r0=dict(fails=[3, 3]), r2=dict(fails=[1, 1]))
    config = RolloutConfig(min_rollouts=3)
    batch, stats = batch_under(config, data, Flaky(listens=True))
    assert batch["input_ids"][:, 1].tolist() == [1] * 4 + [2] * 3
    assert stats["rejected"] == 1 and stats["failed_samples"] == 3 + 3 + 1 + 1
    assert stats["retried_samples"] == 0


def test_a_run_whose_rollouts_fail_stops_with_their_kinds():
    data = rows(200) + [{"row_id": i, "fails": [4, 4]} for i in range(200, 400)]
    fine, _ = batch_under(RolloutConfig(max_failure_rate=0.2), data, Flaky(listens=True), size=100)
    assert len(fine["input_ids"]) == 400
    config = RolloutConfig(max_failure_rate=0.2, max_concurrent_rollouts=8)
    with pytest.raises(RuntimeError, match=r"of the latest \d+ rollouts failed \(\d+ tool\)"):
        batch_under(config, data[180:], Flaky(listens=True), size=100)
    with pytest.raises(ValueError, match="RolloutFailed: 'luck' is none of other, environment"):
        RolloutFailed("luck", "none")


@pytest.mark.parametrize(
    "fault", [RolloutFailed("environment", "no sandbox"), RewardUnavailable("no verdict")]
)
def test_a_group_that_fails_as_a_whole_counts_with_all_its_rollouts(fault):
    """Four of five groups of eight fail: that is 80 % of the rollouts, not a third."""

    class Eight(Scripted):
        gconfig = GenerationHyperparameters(n_samples=8)

        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            if data["row_id"] % 5:
                raise fault
            return trajectory([data["row_id"]], version=engine.get_version(), n=8)

    config = RolloutConfig(max_failure_rate=0.5, failure_retries=0, max_concurrent_rollouts=4)
    with pytest.raises(RuntimeError, match=r"max_failure_rate=0.5"):
        batch_under(config, rows(500), Eight(), size=50)
    data = rows(10, **{f"r{i}": {"row_id": 5 * i} for i in range(10)})
    data[3]["row_id"] = 1
    _, stats = batch_under(config, data, Eight(), size=4)
    assert stats["failed_samples"] == 8
