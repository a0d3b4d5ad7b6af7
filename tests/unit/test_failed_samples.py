"""Samples that failed leave the batch: what is computed of the others knows nothing of them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algos import Actor
from megarl.api.batch import Batch
from megarl.api.inference import FAILURES
from megarl.config.algo import PPOActorConfig
from megarl.config.rollout import RolloutConfig
from megarl.rollout.accounting import AccountingError
from megarl.rollout.episode import Episode, batch_parts, without_failed
from megarl.rollout.episode_check import check_valid
from megarl.rollout.executor import RolloutExecutor
from megarl.rollout.loop_thread import LoopThread
from megarl.trainer.rl import RLTrainer
from megarl.trainer.rollout_metrics import rollout_metrics
from megarl.trainer.session import RolloutDriver, RolloutSession
from tests.unit.bigram import BigramEngine
from tests.unit.rollout_fakes import FakeEngine, Scripted, prepare_batch, rows, trajectory

GARBAGE = torch.nan


def an_episode(seed: int, valid: list[bool], *, with_failed: bool) -> dict[str, torch.Tensor]:
    """Samples of a prompt of one token; those that failed hold garbage, or are not there."""
    g = torch.Generator().manual_seed(seed)
    n, width = len(valid), 9
    lengths = torch.randint(2, width + 1, (n,), generator=g)
    mask = torch.arange(width)[None] < lengths[:, None]
    loss_mask = mask & (torch.arange(width) > 0)
    batch = {
        "input_ids": torch.randint(11, (n, width), generator=g) * mask,
        "attention_mask": mask,
        "loss_mask": loss_mask,
        "logprobs": -torch.rand(n, width, generator=g) * loss_mask,
        "versions": torch.where(loss_mask, 0, -1).int(),
        "rewards": torch.randn(n, generator=g),
    }
    good = torch.tensor(valid)
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


def everything(batch: Batch, norm: str) -> dict[str, Any]:
    actor = Actor(PPOActorConfig(adv_norm=norm), BigramEngine(), temperature=1.0)
    actor.compute_prox_logp(batch)
    actor.compute_advantages(batch)
    stats = rollout_metrics(batch, version=1) | actor.ppo_update(batch)
    return {"stats": stats, "table": actor.engine.table.detach(), **batch.padded()}


@settings(max_examples=40, deadline=None)
@given(
    valid=st.lists(st.lists(st.booleans(), min_size=1, max_size=5), min_size=1, max_size=4).filter(
        lambda groups: any(map(any, groups))
    ),
    norm=st.sampled_from(["group", "group_mean", "batch", "none"]),
)
def test_failed_samples_anywhere_change_no_bit(valid, norm):
    def run(with_failed: bool) -> dict[str, Any]:
        parts = [an_episode(i, v, with_failed=with_failed) for i, v in enumerate(valid)]
        return everything(joined([p for p in parts if len(p["input_ids"])]), norm)

    spoilt, clean = run(True), run(False)
    numbers = {"episode_ids", "group_ids"}  # a group whose samples all failed keeps its number
    assert spoilt.keys() == clean.keys() and spoilt["stats"] == clean["stats"]
    for name in spoilt.keys() - {"stats", *numbers}:
        assert torch.equal(spoilt[name], clean[name]), name
    assert all(v == v for v in spoilt["stats"].values())


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
        ex = RolloutExecutor(RolloutConfig(), engine=FakeEngine(), loop=loop)
        data = rows(12, r1=dict(broken=4, why="server"), r2=dict(broken=0))
        batch = prepare_batch(ex, Loader(data, 3), HalfFailed(), should_accept=all_are_numbers)
        assert batch["input_ids"][:, 1].tolist() == [0, 0, 2, 2, 2, 2, 3, 3]
        assert batch["group_ids"].tolist() == [0, 0, 1, 1, 1, 1, 2, 2]
        assert "valid" not in batch and "failure" not in batch
        stats = ex.stats()
        assert stats["failed_samples"] == 8 and stats["rejected"] == 1 and stats["failed"] == 0
        assert stats["failed_samples/tool"] == stats["failed_samples/server"] == 4
        assert stats["failed_samples/len_mean"] == 2
        ex.accounting.receive(batch["episode_ids"])
        whole = Batch.from_local(batch)  # a reward model finds two more, all of the first row's
        scores = torch.tensor([math.nan, math.inf, *range(6)])
        kept = scoring_trainer(ex, scores).score(whole)
        assert kept["rewards"].tolist() == list(range(6)) and whole.minibatches is not None
        with pytest.raises(ValueError, match=r"all 6 samples of the batch failed \(reward\)"):
            scoring_trainer(ex, scores[:1].expand(6)).score(kept)
        ex.trained(kept["episode_ids"])
        assert ex.stats()["failed_samples/reward"] == 2 and ex.stats()["skipped"] == 1
        with pytest.raises(AccountingError, match="episode 0: 1 samples failed"):
            ex.accounting.fail(torch.tensor([0]))
        again = RolloutExecutor(RolloutConfig(), engine=FakeEngine(), loop=loop)
        again.load_state_dict(ex.state_dict())
        assert again.stats()["failed_samples/tool"] == 4
        assert again.stats()["trained_samples"] == 6
    finally:
        loop.close()


def scoring_trainer(ex: RolloutExecutor, scores: torch.Tensor) -> RLTrainer:
    """A trainer after set_up, as far as `score` needs it; on one rank."""
    client: Any = SimpleNamespace(executor=ex, on_driver=lambda fn, *args: fn(*args))
    trainer, session = RLTrainer.__new__(RLTrainer), RolloutSession.__new__(RolloutSession)
    trainer.session, session.client, session.driver = session, client, cast(Any, Driver(client))
    trainer.reward_model = cast(Any, SimpleNamespace(compute_rewards=lambda batch: scores.clone()))
    trainer.actor = cast(Any, Actor(PPOActorConfig(), BigramEngine(), temperature=1.0))
    return trainer


class Driver(RolloutDriver):
    def __init__(self, client: Any) -> None:
        self.client = client


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
        check_valid(batch | change)
