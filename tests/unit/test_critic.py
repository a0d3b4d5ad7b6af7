"""GAE, the critic's loss and its update, against plain Python loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megarl.algos import (
    Actor,
    Critic,
    RewardModel,
    critic_loss,
    explained_variance,
    gae,
    kl_estimate,
    place_rewards,
    token_weight,
    whiten,
)
from megarl.config.algo import PPOActorConfig, PPOCriticConfig
from tests.unit.bigram import BigramEngine, whole

ROWS, WIDTH = 7, 19


def episodes(seed: int = 0) -> dict[str, torch.Tensor]:
    """Ragged episodes with gaps in loss_mask; one without a trained token, one with one."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([19, 5, 12, 1, 9, 17, 8])
    attention = torch.arange(WIDTH)[None] < lengths[:, None]
    mask = attention & (torch.rand(ROWS, WIDTH, generator=g) < 0.6)
    mask[:, 0] = False
    mask[4] = False
    mask[4, 6] = True
    mask[0, 1:4] = mask[0, 8:] = True  # several turns
    mask[0, 4:8] = False
    return {
        "input_ids": torch.randint(3, 11, (ROWS, WIDTH), generator=g) * attention,
        "attention_mask": attention,
        "loss_mask": mask,
        "token_rewards": torch.randn(ROWS, WIDTH, generator=g) * attention,
        "values": torch.randn(ROWS, WIDTH, generator=g) * attention,
        "last_value": torch.randn(ROWS, generator=g) * torch.tensor([1, 0, 1, 1, 0, 0, 1.0]),
    }


def naive_gae(b, discount, lam):
    """One episode at a time, one step at a time, from its end."""
    advantages = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for i in range(ROWS):
        steps = [t for t in range(WIDTH) if b["loss_mask"][i, t]]
        ahead, value = 0.0, float(b["last_value"][i])
        for k in reversed(range(len(steps))):
            t = steps[k]
            until = steps[k + 1] if k + 1 < len(steps) else WIDTH
            reward = float(b.get("earned", b.get("token_rewards"))[i, t:until].double().sum())
            delta = reward + discount * value - float(b["values"][i, t])
            ahead = delta + discount * lam * ahead
            advantages[i, t], value = ahead, float(b["values"][i, t])
    return advantages


def run_gae(b, discount, lam):
    kw = dict(last_value=b["last_value"], discount=discount, gae_lambda=lam)
    return gae(b["token_rewards"], b["values"], b["loss_mask"], **kw)


@pytest.mark.parametrize("discount", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("lam", [1.0, 0.95, 0.0])
def test_gae_is_the_loop_over_every_episode(discount, lam):
    for seed in range(5):
        b = episodes(seed)
        advantages, returns = run_gae(b, discount, lam)
        want = naive_gae(b, discount, lam).float()
        torch.testing.assert_close(advantages, want, rtol=0, atol=1e-5)
        mask = b["loss_mask"]
        torch.testing.assert_close(returns, (want + b["values"]) * mask, rtol=0, atol=1e-5)
        assert not advantages[~mask].any() and advantages.dtype == torch.float32


def test_gae_with_lambda_1_is_the_return_minus_the_value():
    """Closed form: what is still to come, discounted, and the value of the last state."""
    b, discount = episodes(), 0.9
    b["token_rewards"] *= b["loss_mask"]
    _, returns = run_gae(b, discount, 1.0)
    for i in range(ROWS):
        steps = b["loss_mask"][i].nonzero().flatten()
        for k, t in enumerate(steps):
            left = b["token_rewards"][i, steps[k:]]
            powers = discount ** torch.arange(len(left) + 1)
            want = (left * powers[:-1]).sum() + powers[-1] * b["last_value"][i]
            assert float(returns[i, t]) == pytest.approx(float(want), abs=1e-5)


def test_gae_of_a_long_episode_keeps_its_digits():
    n = 5000
    ones, zeros = torch.ones(1, n), torch.zeros(1, n)
    advantages, _ = gae(ones, zeros, ones, last_value=torch.zeros(1), discount=1.0, gae_lambda=1.0)
    assert torch.equal(advantages[0], torch.arange(n, 0, -1.0))


def test_outcomes_stand_at_the_last_trained_token():
    b = episodes()
    rewards = torch.arange(1.0, ROWS + 1)
    placed = place_rewards(rewards, b["loss_mask"])
    for i in range(ROWS):
        steps = b["loss_mask"][i].nonzero().flatten()
        assert placed[i].count_nonzero() == min(1, len(steps))
        if len(steps):
            assert placed[i, steps[-1]] == rewards[i]


def white_of(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return whiten(whole(x=values, loss_mask=mask), "x").padded()


def test_whitening_sees_trained_tokens_of_the_whole_batch():
    b = episodes()
    white = white_of(b["values"], b["loss_mask"])
    chosen = white[b["loss_mask"]]
    assert float(chosen.mean()) == pytest.approx(0, abs=1e-6)
    assert float(chosen.std()) == pytest.approx(1, abs=1e-5)
    assert not white[~b["loss_mask"]].any()
    assert not white_of(torch.ones(2, 3), torch.ones(2, 3)).any()
    assert not white_of(torch.ones(1, 1), torch.ones(1, 1)).any()


def test_explained_variance():
    mask = torch.ones(1, 4)
    returns = torch.tensor([[1.0, 2, 3, 4]])

    def explained(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
        return explained_variance(whole(values=values, returns=returns, loss_mask=mask))

    assert explained(returns, returns, mask) == 1
    assert explained(torch.full((1, 4), 9.0), returns, mask) == 0
    assert explained(-returns, returns, mask) == pytest.approx(-3)
    assert explained(returns, torch.ones(1, 4), mask) == 0
    assert explained(returns, returns, 0 * mask) == 0


@pytest.mark.parametrize("huber", [None, 0.7])
@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("agg", ["token-mean", "sequence-mean"])
def test_critic_loss_is_the_loop_over_tokens(clip, agg, huber):
    def cost(e):
        linear = huber is not None and abs(e) > huber
        return huber * (2 * abs(e) - huber) if linear else e * e

    b = episodes()
    g = torch.Generator().manual_seed(1)
    b["returns"] = torch.randn(ROWS, WIDTH, generator=g)
    values = (b["values"] + torch.randn(ROWS, WIDTH, generator=g)).requires_grad_()
    loss, stats = critic_loss({"values": values}, b, value_clip=clip, huber=huber, loss_agg=agg)
    total, clipped = 0.0, 0
    for i in range(ROWS):
        row = []
        for t in b["loss_mask"][i].nonzero().flatten():
            v, old, goal = (float(x[i, t]) for x in (values, b["values"], b["returns"]))
            error = cost(v - goal)
            if clip is not None:
                near = cost(min(max(v, old - clip), old + clip) - goal)
                clipped += near > error
                error = max(error, near)
            row.append(0.5 * error)
        if row:
            total += sum(row) / (len(row) if agg == "sequence-mean" else 1)
    assert float(loss.detach()) == pytest.approx(total, rel=1e-5)
    assert float(stats["value_clip_frac"][0]) == clipped
    (grad,) = torch.autograd.grad(loss, values)
    assert not grad[~b["loss_mask"]].any() and grad.any()
    if clip is not None:  # where the clipped error is larger there is nothing to gain
        far = (values - b["values"]).abs() > clip
        worse = ((b["values"] + (values - b["values"]).clamp(-clip, clip)) - b["returns"]).abs() > (
            values - b["returns"]
        ).abs()
        assert not grad[far & worse].any() and (far & worse & b["loss_mask"]).any()


class ValueEngine(BigramEngine):
    """v(state) is a number for its last token; row 0 of the bigram table holds them."""

    def _outputs(self, batch, outputs, temperature):
        assert outputs == ("values",)
        values = self.table[0][batch["input_ids"][:, :-1]] * batch["attention_mask"][:, 1:]
        return {"values": torch.nn.functional.pad(values, (1, 0))}


def test_values_stand_before_their_token_and_the_last_after_all():
    b, engine = episodes(), ValueEngine()
    critic = Critic(PPOCriticConfig(), engine)
    critic.compute_values(b)
    table = engine.table[0].detach()
    for i in range(ROWS):
        n = int(b["attention_mask"][i].sum())
        ids = b["input_ids"][i]
        assert torch.equal(b["values"][i, 1:n], table[ids[: n - 1]])
        assert b["values"][i, 0] == 0 and not b["values"][i, n:].any()
        assert b["last_value"][i] == table[ids[n - 1]]
    assert b["values"].shape == b["input_ids"].shape
    scores = RewardModel(PPOCriticConfig(), engine).compute_rewards(b)
    assert torch.equal(scores, b["last_value"])


def ready(norm: str = "none", *, turns: bool = False, **kw: Any) -> dict[str, torch.Tensor]:
    """A batch that went through compute_values and compute_gae. turns: with token_rewards."""
    b = episodes()
    if not turns:
        del b["token_rewards"]
    b["rewards"] = torch.linspace(-1, 1, ROWS)
    b["truncated"] = torch.arange(ROWS) % 2 == 0
    b["prox_logp"], b["ref_logp"] = -torch.rand(ROWS, WIDTH), -torch.rand(ROWS, WIDTH)
    Critic(PPOCriticConfig(), ValueEngine()).compute_values(b)
    actor = Actor(PPOActorConfig(adv_norm=norm), BigramEngine(), temperature=1.0)
    actor.compute_gae(
        b, **{"discount": 1.0, "gae_lambda": 0.9, "kl_ctl": 0.0, "bootstrap": False, **kw}
    )
    return b


def test_compute_gae_puts_rewards_kl_and_the_last_value_in_their_places():
    plain, kl, cut = ready(), ready(kl_ctl=0.1), ready(bootstrap=True)
    mask = plain["loss_mask"]
    assert torch.equal(plain["earned"], place_rewards(plain["rewards"], mask))
    penalty = 0.1 * kl_estimate(kl["prox_logp"], kl["ref_logp"], "k1") * mask
    torch.testing.assert_close(kl["earned"], plain["earned"] - penalty)
    ends = {False: plain, True: cut}
    for truncated, b in ends.items():
        b["last_value"] = b["last_value"] * b["truncated"] * truncated
        torch.testing.assert_close(b["advantages"], naive_gae(b, 1.0, 0.9).float())
    assert not torch.equal(plain["advantages"], cut["advantages"])
    white = ready("batch")["advantages"]
    torch.testing.assert_close(white, white_of(plain["advantages"], mask))
    with pytest.raises(ValueError, match=r"compute_gae: the batch has no 'values': call critic"):
        actor = Actor(PPOActorConfig(), BigramEngine(), temperature=1.0)
        b = {k: v for k, v in plain.items() if k != "values"}
        actor.compute_gae(b, discount=1.0, gae_lambda=1.0, kl_ctl=0.0, bootstrap=False)


def test_with_values_advantages_and_returns_are_those_of_gae():
    settings = {"discount": 0.9, "gae_lambda": 0.8, "kl_ctl": 0.1, "bootstrap": True}
    want, actor = ready(**settings), Actor(PPOActorConfig(), BigramEngine(), temperature=1.0)
    actor.config.adv_norm = "none"
    batch = {k: v for k, v in want.items() if k not in ("advantages", "returns", "earned")}
    made = actor.compute_advantages_and_returns(batch, **settings)
    for name in ("advantages", "returns"):
        assert torch.equal(made[name], want[name]) and made[name] is batch[name]
    assert not torch.equal(made["advantages"], made["returns"])
    with pytest.raises(TypeError, match="discount"):  # no second default beside the recipe's
        actor.compute_advantages_and_returns(batch)


def test_lambda_by_length_and_one_for_the_critic():
    """VAPO's 1 - 1 / (alpha l) for the advantages, a lambda of their own for the returns."""
    alpha = 0.4
    b = ready(length_alpha=alpha, critic_lambda=1.0)
    own = naive_gae(b | {"last_value": torch.zeros(ROWS)}, 1.0, 1.0)
    for i in range(ROWS):
        n = int(b["loss_mask"][i].sum())
        lam = max(0.0, 1 - 1 / (alpha * n)) if n else 0.0
        alone = naive_gae(b | {"last_value": torch.zeros(ROWS)}, 1.0, lam)
        torch.testing.assert_close(b["advantages"][i].double(), alone[i], rtol=0, atol=1e-5)
    want = (own + b["values"]) * b["loss_mask"]
    torch.testing.assert_close(b["returns"].double(), want, rtol=0, atol=1e-5)
    assert torch.equal(ready()["advantages"], ready(critic_lambda=0.5)["advantages"])


def test_rewards_of_turns_are_earned_early_and_the_rest_at_the_end():
    b, plain = ready(turns=True), ready()
    late = b["earned"] - b["token_rewards"]
    mask = b["loss_mask"]
    rest = place_rewards(b["rewards"] - b["token_rewards"].sum(1), mask)
    torch.testing.assert_close(late, rest)
    torch.testing.assert_close(b["earned"].sum(1)[mask.any(1)], b["rewards"][mask.any(1)])
    b["last_value"] = torch.zeros(ROWS)  # nothing is bootstrapped
    torch.testing.assert_close(b["advantages"], naive_gae(b, 1.0, 0.9).float())
    assert not torch.equal(b["advantages"], plain["advantages"])


def test_rollouts_that_forked_are_refused():
    b = episodes() | {"rollout_ids": torch.tensor([4, 4, 4, 0, 1, 2, 3])}
    with pytest.raises(ValueError, match=r"compute_values: 1 of 5 rollouts .* row 0, into 3"):
        Critic(PPOCriticConfig(), ValueEngine()).compute_values(b)
    b["rewards"] = torch.zeros(ROWS)
    with pytest.raises(ValueError, match="compute_gae: 1 of 5 rollouts forked"):
        actor = Actor(PPOActorConfig(), BigramEngine(), temperature=1.0)
        actor.compute_gae(b, discount=1.0, gae_lambda=1.0, kl_ctl=0.0, bootstrap=False)


def test_the_critic_learns_its_returns_and_steps_do_not_depend_on_cuts():
    b, engine = ready(), ValueEngine(lr=0.5)
    critic = Critic(PPOCriticConfig(value_clip=None, ppo_n_minibatches=2), engine)
    errors = []
    for _ in range(30):
        stats = critic.ppo_update(b)
        errors.append(stats["value_error"])
        assert stats["n_updates"] == 2 and stats["skipped_updates"] == 0
        assert math.isfinite(stats["explained_variance"])
    assert errors[-1] < 0.7 * errors[0]
    assert set(engine.calls[0]) == {
        "input_ids", "attention_mask", "loss_mask", "values", "returns"
    }  # fmt: skip
    whole, _ = critic_loss({"values": b["values"] + 1}, b)
    parts = 0.0
    for rows in ([0, 5, 6], [1, 2, 3, 4]):
        part = {k: v[rows] for k, v in b.items()}
        parts += float(critic_loss({"values": part["values"] + 1}, part)[0])
    assert parts == pytest.approx(float(whole), rel=1e-6) and token_weight(b) > 0
    b["loss_mask"] = torch.zeros_like(b["loss_mask"])
    with pytest.raises(ValueError, match="marks no token"):
        critic.ppo_update(b)
    del b["returns"]
    with pytest.raises(ValueError, match="no 'returns': call critic"):
        critic.ppo_update(b)
