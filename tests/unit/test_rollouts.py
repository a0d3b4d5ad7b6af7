"""A rollout that forked has several rows and counts once: in statistics, mini-batches, means."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algos import Actor, AdvantageSpec
from megarl.algos.rows import rollouts_of
from megarl.api.batch import Batch
from megarl.config.algo import PPOActorConfig
from megarl.config.base import SeamConfig
from megarl.rollout.episode import batch_parts, check_episode, without_failed
from megarl.rollout.episodes import Episode
from megarl.rollout.trajectory import Trajectory, to_batch
from megarl.trainer.rollout_metrics import rollout_metrics
from megarl.trainer.session import RolloutSession
from tests.unit.bigram import VOCAB, BigramEngine
from tests.unit.rollout_fakes import Scripted
from tests.unit.test_trajectory import answer

# of every prompt's rollouts: (answers that fork off the first one, its reward)
GROUPS = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4),
    min_size=1,
    max_size=3,
)


def forked(forks: int, reward: float, seed: int) -> Trajectory:
    """Two turns, and `forks` more answers after the first one."""
    g = torch.Generator().manual_seed(seed)

    def some(n: int) -> list[int]:
        return torch.randint(VOCAB, (n,), generator=g).tolist()

    tree = Trajectory(index=seed)
    first = tree.wrote(reply(tree.read(some(2)), some(3)))
    for _ in range(1 + forks):
        tree.read(some(1), after=first)
        tree.wrote(reply(tree.head, some(1 + int(torch.randint(4, (1,), generator=g)))))
    tree.score(reward)
    return tree


def reply(at: Any, tokens: list[int]) -> Any:
    made = answer(at, tokens)
    made.output_versions = [0] * len(tokens)
    return made


def batch_of(groups: list[list[tuple[int, int]]]) -> Batch:
    episodes, seed = [], 0
    for number, rollouts in enumerate(groups):
        trees = []
        for forks, reward in rollouts:
            seed += 1
            trees.append(forked(forks, reward, seed))
        batch = to_batch(trees)
        check_episode(batch, version=0, vocab_size=VOCAB)
        episodes.append(Episode(number=number, row={}, workflow=Scripted(), batch=batch))
    return Batch.from_local(batch_parts(episodes, group_ids=range(len(groups))))


def make_actor(**config: Any) -> Any:
    return Actor(PPOActorConfig(**config), BigramEngine(), temperature=1.0)


def by_hand(groups: list[list[tuple[int, int]]], mode: str) -> list[float]:
    """The advantage of every rollout, one group at a time."""
    found = []
    for rollouts in groups:
        r = [float(reward) for _, reward in rollouts]
        mean = math.fsum(r) / len(r)
        if mode == "none":
            found += r
        elif len(set(r)) == 1:
            found += [0.0] * len(r)
        elif mode == "group_mean":
            found += [x - mean for x in r]
        elif mode == "others":
            found += [x - (sum(r) - x) / (len(r) - 1) for x in r]
        else:
            std = math.sqrt(math.fsum((x - mean) ** 2 for x in r) / (len(r) - 1))
            found += [(x - mean) / (std + 1e-6) for x in r]
    return found


def leave_one_out(config: PPOActorConfig) -> AdvantageSpec:
    """RLOO, as a user writes it: it sees rollouts, and no row twice."""

    def per_sample(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        same = (batch["group_ids"][:, None] == batch["group_ids"]).float()
        others = same @ batch["rewards"] - batch["rewards"]
        return batch["rewards"] - others / (same.sum(1) - 1).clamp(min=1)

    return AdvantageSpec(per_sample=per_sample, needs_groups=True)


@settings(max_examples=60, deadline=None)
@given(groups=GROUPS, mode=st.sampled_from(["group", "group_mean", "none", "others"]))
def test_advantages_are_those_of_rollouts_on_each_of_their_rows(groups, mode):
    if mode == "others":
        groups = [[*g, (0, 1), (2, 5)] for g in groups]
        loop = SeamConfig(type=f"{__name__}:leave_one_out")
        actor = make_actor(advantages=loop)
    else:
        actor = make_actor(adv_norm=mode)
    batch = batch_of(groups)
    actor.compute_advantages(batch)
    want, row = by_hand(groups, mode), 0
    padded = batch.padded()
    rollouts = [r for g in groups for r in g]
    assert rollouts_of(batch).of_row.tolist() == [
        i for i, (forks, _) in enumerate(rollouts) for _ in range(1 + forks)
    ]
    for (forks, _), advantage in zip(rollouts, want, strict=True):
        for k in range(1 + forks):
            mask = padded["loss_mask"][row]
            assert mask[2:5].all() == (k == 0)  # the shared turn is trained once
            got = padded["advantages"][row]
            assert got[mask].tolist() == pytest.approx([advantage] * int(mask.sum()), abs=1e-5)
            assert not got[~mask].any()
            row += 1
    assert row == len(batch)


@settings(max_examples=25, deadline=None)
@given(groups=GROUPS, n=st.integers(1, 3))
def test_rollout_mean_is_the_mean_over_rollouts_and_no_minibatch_splits_one(groups, n):
    rollouts = [r for g in groups for r in g]
    n = min(n, len(rollouts))
    actor = make_actor(loss_agg="rollout-mean", adv_norm="none", ppo_n_minibatches=n)
    batch, table = batch_of(groups), actor.engine.table.detach().clone()
    actor.compute_prox_logp(batch)
    actor.compute_advantages(batch)
    padded, of_row = batch.padded(), rollouts_of(batch).of_row
    parts = batch.minibatches
    assert sorted(r for part in parts for r in part) == list(range(len(batch)))
    for r in range(len(rollouts)):
        assert sum((of_row[part] == r).any().item() for part in map(torch.tensor, parts)) == 1
    stats = actor.ppo_update(batch)
    for part in parts:  # plain torch, one token at a time
        x = table.clone().requires_grad_()
        logp, losses = x.log_softmax(-1), {}
        for row in part:
            r = int(of_row[row])
            for t in padded["loss_mask"][row].nonzero().flatten().tolist():
                ids = padded["input_ids"][row]
                new = logp[ids[t - 1], ids[t]]
                ratio = (new - padded["prox_logp"][row, t]).exp()
                a = padded["advantages"][row, t]
                u = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
                losses.setdefault(r, []).append(-u)
        loss = torch.stack([torch.stack(v).mean() for v in losses.values()]).mean()
        loss.backward()
        table = table - actor.engine.lr * x.grad
    torch.testing.assert_close(actor.engine.table.detach(), table, rtol=1e-4, atol=1e-6)
    if n == 1:
        assert stats["loss"] == pytest.approx(float(loss), abs=1e-5)
        assert stats["pg_loss"] == pytest.approx(float(loss), abs=1e-5)


def test_where_nothing_forks_a_rollout_is_a_row_to_the_bit():
    groups = [[(0, 1), (0, 2), (0, 0)], [(0, 3), (0, 1)]]

    def run(agg: str, *, ids: bool) -> Any:
        actor, batch = make_actor(loss_agg=agg, ppo_n_minibatches=2), batch_of(groups)
        assert "rollout_ids" not in batch  # left out: the batch is what it would be without
        if ids:
            batch["rollout_ids"] = torch.arange(len(batch))
        actor.compute_prox_logp(batch)
        actor.compute_advantages(batch, kl_ctl=0.0)
        metrics = rollout_metrics(batch, version=0)
        return actor.ppo_update(batch), metrics, actor.engine.table.detach()

    for agg in ("token-mean", "sequence-mean"):
        (a, m, x), (b, n, y) = run(agg, ids=False), run(agg, ids=True)
        assert a == b and m == n and torch.equal(x, y)
    (a, _, x), (b, _, y) = run("sequence-mean", ids=False), run("rollout-mean", ids=False)
    assert a == b and torch.equal(x, y)


def test_metrics_count_a_rollout_once():
    batch = batch_of([[(3, 1), (0, 0)], [(1, 2), (0, 2)]])
    found = rollout_metrics(batch, version=0)
    assert found["reward/mean"] == 1.25 and found["reward/groups_all_equal"] == 0.5
    assert found["forks/count"] == 4 and found["forks/rows_max"] == 4
    assert found["forks/rows_per_rollout"] == 2 and found["tokens/sequences"] == 8
    assert found["response_len/mean"] * 4 == found["tokens/trained"]


def test_the_penalty_of_the_kl_is_summed_over_the_rows():
    actor, batch = make_actor(adv_norm="none"), batch_of([[(2, 1), (0, 1)]])
    actor.compute_prox_logp(batch)
    batch["ref_logp"] = batch["logprobs"]
    actor.compute_advantages(batch, kl_ctl=0.5)
    padded = batch.padded()
    mask = padded["loss_mask"]
    kl = ((padded["prox_logp"] - padded["ref_logp"]) * mask).sum(1)
    for rows in ([0, 1, 2], [3]):
        want = 1.0 - 0.5 * float(kl[rows].sum())
        assert padded["advantages"][rows][mask[rows]].tolist() == pytest.approx(
            [want] * int(mask[rows].sum()), rel=1e-4
        )


def test_rows_of_a_rollout_share_its_reward_and_its_unit():
    batch = to_batch([forked(1, 2.0, 1), forked(0, 0.0, 2)])
    batch["rewards"][1] = 1.0
    with pytest.raises(ValueError, match=r"rewards of sample 1 is 1\.0: an earlier row of its"):
        check_episode(batch, version=0)
    with pytest.raises(ValueError, match="rewards of rows 0 and 1 are 2 and 1, and they are bran"):
        make_actor(adv_norm="none").compute_advantages(Batch.from_padded(batch))
    batch = to_batch([forked(1, 2.0, 1), forked(0, 0.0, 2)])
    with pytest.raises(ValueError, match=r"unit_ids of sample 1 is 1: .* a rollout stays in one"):
        check_episode(batch | {"unit_ids": torch.arange(3)}, version=0)
    with pytest.raises(ValueError, match=r"rollout_ids of torch.float32 .*use \[n=3\] integers"):
        check_episode(batch | {"rollout_ids": torch.zeros(3)}, version=0)
    with pytest.raises(ValueError, match=r"valid \[True, False, True\] .* fails as a whole"):
        without_failed(batch | {"valid": torch.tensor([True, False, True])})


def test_a_rollout_fails_and_is_dropped_as_a_whole():
    batch = to_batch([forked(2, 2.0, 1), forked(0, 0.0, 2)])
    batch["valid"] = torch.tensor([False, False, False, True])
    lengths = batch["attention_mask"].sum(1)
    kept, failed = without_failed(batch)
    assert failed == [("other", int(lengths[:3].sum()))] and len(kept["rewards"]) == 1

    whole = batch_of([[(2, 1), (1, 0)]])
    booked: list[torch.Tensor] = []
    client = SimpleNamespace(on_driver=lambda fn, driver, b, mask, kind: booked.append(mask))
    session = RolloutSession.__new__(RolloutSession)
    session.client, session.driver = cast(Any, client), None
    left = session.drop(whole, torch.tensor([False, True, False, False, False]), "reward")
    assert len(left) == 2 and booked[0].tolist() == [True] * 3 + [False] * 2
    lost = whole["episode_ids"][booked[0]]
    assert sorted([*lost.tolist(), *left["episode_ids"].tolist()]) == [0] * 5
