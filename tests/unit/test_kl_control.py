"""The weights of the KL to the reference, fixed and adapted: in the loss, in the reward, and over a
resume."""

from __future__ import annotations

import doctest
import io
from typing import Any

import pytest
import torch

from megarl.algos import Actor, kl
from megarl.algos.kl import KLController
from megarl.config.algo import PPOActorConfig
from tests.unit.bigram import BigramEngine, rollout

TARGET, HORIZON = 0.05, 64.0  # 16 rollouts a step, so K = 1 / 4


def config(**keys: Any) -> PPOActorConfig:
    how = {"target": TARGET, "horizon": HORIZON, "per": keys.pop("per", "token")}
    return PPOActorConfig(path="nowhere", kl_controller=how, **keys)


def prepared(cfg: PPOActorConfig, kl_ctl: float = 0.0) -> tuple[Any, dict[str, torch.Tensor]]:
    """An actor and its batch, whose reference is the policy off by 0.3 at every other token."""
    actor: Any = Actor(cfg, BigramEngine(), temperature=1.0)
    batch = rollout(actor.engine)
    actor.compute_prox_logp(batch)
    off = 0.3 * (torch.arange(8) % 2) - 0.1
    batch["ref_logp"] = batch["prox_logp"] - off
    actor.compute_advantages(batch, kl_ctl=kl_ctl)
    return actor, batch


def by_hand(batch: dict[str, torch.Tensor], per: str) -> float:
    """The KL of the batch, token by token."""
    found = []
    for row in range(16):
        at = batch["loss_mask"][row].nonzero().flatten().tolist()
        found.append([float(batch["prox_logp"][row, t] - batch["ref_logp"][row, t]) for t in at])
    if per == "rollout":
        return sum(sum(kl) for kl in found) / len(found)
    return sum(sum(kl) for kl in found) / sum(len(kl) for kl in found)


@pytest.mark.parametrize("per", ["token", "rollout"])
def test_the_weights_follow_the_papers_controller(per: str) -> None:
    """beta' = beta (1 + K e), e = clip((KL - target) / target, -0.2, 0.2), in every step."""
    actor, batch = prepared(config(kl_coef=0.1, per=per), kl_ctl=0.02)
    betas = [0.1, 0.02]
    for step in range(3):
        if step == 2:  # far below the target
            batch["ref_logp"] = batch["prox_logp"].clone()
        actor.compute_advantages(batch, kl_ctl=0.02)
        kl = by_hand(batch, per)
        stats = actor.ppo_update(batch)
        assert [stats["kl_coef"], stats["kl_ctl"]] == pytest.approx(betas, rel=1e-12)
        assert stats["kl_observed"] == pytest.approx(kl, rel=1e-6, abs=1e-12)
        error = max(-0.2, min(0.2, (kl - TARGET) / TARGET))
        betas = [beta * (1 + 16 / HORIZON * error) for beta in betas]
    # 0.05 per token is the target to the rounding, 0.3 per rollout far above it; then nothing
    wanted = {"token": 0.95, "rollout": 1.05**2 * 0.95}[per]
    assert actor.kl.scale == pytest.approx(wanted, rel=1e-3)


def test_an_adapted_weight_trains_as_a_fixed_one_of_the_same_size() -> None:
    moved, advantages = [], []
    for adaptive in (True, False):
        cfg = config(kl_coef=0.5) if adaptive else PPOActorConfig(path="nowhere", kl_coef=0.8)
        actor, batch = prepared(cfg)
        if adaptive:
            actor.kl.load_state_dict({"scale": 1.6})
        actor.compute_advantages(batch, kl_ctl=0.25 if adaptive else 0.4)
        advantages.append(batch["advantages"])
        actor.ppo_update(batch)
        moved.append(actor.engine.table.detach())
    torch.testing.assert_close(moved[0], moved[1], rtol=0, atol=1e-6)
    assert torch.equal(advantages[0], advantages[1])
    fixed, batch = prepared(PPOActorConfig(path="nowhere", kl_coef=0.5), kl_ctl=0.25)
    fixed.ppo_update(batch)
    assert not torch.allclose(fixed.engine.table, moved[0], atol=1e-4)
    assert not torch.equal(batch["advantages"], advantages[0])


def test_with_a_critic_the_reward_of_tokens_takes_the_adapted_weight() -> None:
    earned = []
    for scale, kl_ctl in ((1.6, 0.25), (1.0, 0.4)):
        actor, batch = prepared(config(adv_norm="batch"))
        actor.kl.load_state_dict({"scale": scale})
        batch |= {"values": torch.zeros(16, 8), "last_value": torch.zeros(16)}
        actor.compute_gae(batch, discount=1.0, gae_lambda=0.9, kl_ctl=kl_ctl, bootstrap=False)
        earned.append(batch["earned"])
        assert "kl_coef" not in (stats := actor.ppo_update(batch)) and stats["kl_ctl"] == 0.4
    assert torch.equal(*earned)


def test_a_resumed_controller_has_the_very_factor() -> None:
    actor, batch = prepared(config(kl_coef=0.1, per="rollout"))
    for _ in range(5):
        actor.ppo_update(batch)
    saved = io.BytesIO()
    torch.save(actor.kl.state_dict(), saved)
    saved.seek(0)
    again = KLController(config(kl_coef=0.1))
    again.load_state_dict(torch.load(saved, weights_only=True))
    assert again.scale == actor.kl.scale != 1.0
    fixed = KLController(PPOActorConfig(path="nowhere", kl_coef=0.1))
    fixed.load_state_dict(actor.kl.state_dict())  # the controller was taken out meanwhile
    assert fixed.scale == 1.0


def test_the_controller_needs_the_references_logprobs() -> None:
    actor, batch = prepared(config(kl_coef=0.1))
    del batch["ref_logp"]
    with pytest.raises(ValueError, match="ref_logp"):
        actor.ppo_update(batch)


def test_the_example_is_computed() -> None:
    found = doctest.testmod(kl)
    assert found.attempted and not found.failed
