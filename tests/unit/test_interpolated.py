"""The proximal policy taken to lie between the behaviour policy and the one that trains (A-3PO)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megarl.algos import Actor, PolicyLoss
from megarl.algos.policy_loss import Correction
from megarl.algos.surrogates import Clip
from megarl.config.check_parts import actor_problems
from megarl.config.loader import load_config
from tests.unit.bigram import BigramEngine, rollout
from tests.unit.test_losses import make_batch

LOW, HIGH, CAP = 0.1, 0.15, 1.3


def stale(versions: torch.Tensor, now: int) -> torch.Tensor:
    """alpha of the published formula, (v_prox - v_behave) / (v_theta - v_behave), token by token,
    where the policy that trains goes from version `now`, the proximal one, to the next."""
    return torch.tensor(
        [
            [max(0.0, (now - v) / (now + 1 - v)) if v >= 0 else 0.0 for v in row]
            for row in versions.tolist()
        ],
        dtype=torch.float64,
    )


def test_value_and_gradient_equal_the_loop():
    """Decoupled PPO: exp(prox - behave) min(u A, clip(u) A), u = pi / sg[prox]."""
    logp, batch = make_batch()
    g = torch.Generator().manual_seed(1)
    versions = torch.where(batch["loss_mask"], torch.randint(0, 6, logp.shape, generator=g), -1)
    batch["prox_share"] = stale(versions, 5)
    total, slopes = 0.0, torch.zeros_like(logp)
    clipped = 0
    for i, t in batch["loss_mask"].nonzero().tolist():
        x, behave, a = (float(v[i, t]) for v in (logp, batch["logprobs"], batch["advantages"]))
        v = int(versions[i, t])
        prox = behave + (5 - v) / (6 - v) * (x - behave)
        u, w = math.exp(x - prox), min(CAP, math.exp(prox - behave))
        bound = min(max(u, 1 - LOW), 1 + HIGH)
        total -= w * min(u * a, bound * a)
        slopes[i, t] = -w * u * a if u * a <= bound * a else 0.0
        clipped += u * a > bound * a
    assert clipped > 5, "the data must exercise the bound"
    logp.requires_grad_()
    loss, stats = PolicyLoss(
        old_logp="logprobs",
        interpolates=True,
        surrogate=Clip(eps_low=LOW, eps_high=HIGH),
        correction=Correction(weight="token", weight_cap=CAP),
    )({"logprobs": logp}, batch)
    loss.backward()
    assert loss.item() == pytest.approx(total, abs=1e-9)
    torch.testing.assert_close(logp.grad, slopes, rtol=0, atol=1e-9)
    assert stats["clip_frac"][0] == clipped


def prepared(*words: str, version: int = 3) -> tuple[Any, dict[str, torch.Tensor]]:
    config = load_config(None, ["actor.path=nowhere", *words]).actor
    actor: Any = Actor(config, BigramEngine(), temperature=1.0)
    batch = rollout(actor.engine)  # of version 0
    actor.engine.set_version(version)
    with torch.no_grad():
        actor.engine.table += 0.2 * torch.randn(11, 11, generator=torch.Generator().manual_seed(2))
    actor.compute_prox_logp(batch)
    actor.compute_advantages(batch)
    return actor, batch


def test_an_update_makes_no_pass_of_its_own_and_starts_by_the_tokens_staleness():
    passes = []
    forward = BigramEngine.forward
    with pytest.MonkeyPatch.context() as m:
        m.setattr(BigramEngine, "forward", lambda *a, **k: passes.append(k) or forward(*a, **k))
        actor, batch = prepared("algorithm=a3po")
        assert len(passes) == 1 and "prox_logp" not in batch  # it was the rollout's
        now = forward(actor.engine, {k: batch[k] for k in ("input_ids", "attention_mask")})
        stats = actor.ppo_update(batch)
        assert len(passes) == 1
    mask = batch["loss_mask"]
    assert torch.equal(batch["prox_share"], 0.75 * mask)
    gap = (now - batch["logprobs"])[mask].double()
    assert stats["ratio"] == pytest.approx(float((0.25 * gap).exp().mean()), rel=1e-6)
    assert stats["behav_imp_weight"] == pytest.approx(float((0.75 * gap).exp().mean()), rel=1e-6)
    # of its own version, a token's proximal policy is the one that wrote it
    actor, batch = prepared("algorithm=a3po", version=0)
    stats = actor.ppo_update(batch)
    assert not batch["prox_share"].any() and stats["behav_imp_weight"] == 1.0


def test_an_old_batch_without_versions_is_refused():
    actor, batch = prepared("algorithm=a3po")
    del batch["versions"]
    with pytest.raises(ValueError, match="ppo_update: the batch has no 'versions'"):
        actor.ppo_update(batch)


def test_what_needs_a_pass_refuses_to_go_without():
    config = load_config(None, ["algorithm=a3po", "actor.path=nowhere"]).actor
    assert list(actor_problems(config)) == []
    config.router_replay = "trainer"
    (problem,) = actor_problems(config)
    assert "router_replay=trainer: needs actor.recompute_logprob=true" in problem
