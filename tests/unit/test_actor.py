"""Actor, Ref and SFT over a small TrainEngine: a bigram model on padded tensors, plain autograd."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megarl.algos import SFT, Actor, Ref, sequence_weight, worst_logp_gaps
from megarl.algos.batches import mean_metrics
from megarl.algos.metrics import logp_gap_stats
from megarl.api.batch import Batch
from megarl.api.engine import Metrics
from megarl.api.records import SaveLoadMeta, WeightUpdateMeta
from megarl.config.algo import PPOActorConfig
from megarl.config.engine import TrainEngineConfig
from megarl.parallel.packing import split_minibatches
from tests.unit.bigram import VOCAB, BigramEngine, prepared, rollout, whole


def test_one_update_raises_the_probability_of_what_was_rewarded():
    actor, batch = prepared(PPOActorConfig(), temperature=0.7)
    before = actor.compute_logp(batch)
    stats = actor.ppo_update(batch)
    after = actor.compute_logp(batch)
    gain = ((after - before) * batch["advantages"]).sum()
    assert gain > 0
    assert stats["n_updates"] == 1
    # the weights are the old ones: the ratio is 1 and trainer and "server" agree
    assert stats["first_ratio_abs_dev"] == stats["ratio_rms_dev"] == 0.0
    assert stats["behav_imp_weight"] == pytest.approx(1.0) == stats["behav_ess"]
    assert stats["train_rollout_logprob_abs_diff/max"] < 1e-6
    assert stats["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert 0 < stats["entropy"] < math.log(VOCAB)


def test_gradient_step_is_the_policy_gradient():
    """With one update the ratio is 1: the step is lr / tokens * sum of A * grad log p."""
    actor, batch = prepared(PPOActorConfig())
    table = actor.engine.table.detach().clone().requires_grad_()
    ids, adv = batch["input_ids"], batch["advantages"]
    logp = table[ids[:, :-1]].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    (logp * adv[:, 1:]).sum().div(batch["loss_mask"].sum()).backward()
    actor.ppo_update(batch)
    want = table.detach() + actor.engine.lr * table.grad
    torch.testing.assert_close(actor.engine.table.detach(), want, rtol=0, atol=1e-5)


def test_minibatches_cover_every_sequence_once_and_average_their_figures():
    actor, batch = prepared(PPOActorConfig(ppo_n_minibatches=3))
    batch["marker"] = torch.arange(16)
    stats = actor.ppo_update(batch)
    calls = actor.engine.calls
    assert [len(c["input_ids"]) for c in calls] == [6, 5, 5]
    seen = torch.cat([c["input_ids"] for c in calls]).tolist()
    assert sorted(seen) == sorted(batch["input_ids"].tolist())
    assert "rewards" not in calls[0] and "marker" not in calls[0]  # only what the loss needs
    assert stats["n_updates"] == 3
    assert stats["lr"] == actor.engine.lr / 3  # the last
    assert stats["first_ratio_abs_dev"] == 0.0 < stats["ratio_abs_dev"]  # later ones are off-policy


@pytest.mark.parametrize("as_batch", [False, True])
def test_advantages_and_returns_are_those_of_the_update(as_batch):
    actor, want = prepared(PPOActorConfig())
    batch: Any = rollout(actor.engine)
    batch = Batch.from_padded(batch) if as_batch else batch
    made = actor.compute_advantages_and_returns(batch)
    assert made.keys() == {"advantages", "returns"}
    for values in made.values():  # of one number for each token, without a value function
        values = values.padded() if as_batch else values
        assert values.shape == want["input_ids"].shape
        assert torch.equal(values, want["advantages"])
    assert batch["advantages"] is made["advantages"] and "returns" not in batch


class RoutingEngine(BigramEngine):
    """Every token's expert is its id."""

    def _outputs(self, batch, outputs, temperature):
        made = super()._outputs(batch, [o for o in outputs if o != "routed_experts"], temperature)
        return made | {"routed_experts": batch["input_ids"][..., None, None]}


def test_updates_replay_the_routing_of_the_logp_pass():
    config = PPOActorConfig(ppo_n_minibatches=2, router_replay="trainer")
    actor: Any = Actor(config, RoutingEngine(), temperature=1.0)
    batch = rollout(BigramEngine())
    actor.compute_advantages(batch)
    batch["prox_logp"] = batch["logprobs"]
    with pytest.raises(ValueError, match=r"no 'routed_experts': call actor.compute_prox_logp"):
        actor.ppo_update(batch)
    actor.compute_prox_logp(batch)
    actor.ppo_update(batch)
    for part in actor.engine.calls:
        assert torch.equal(part["routed_experts"][..., 0, 0], part["input_ids"])


def test_minibatch_order_is_seeded_and_changes_with_the_version():
    def rows(seed: int, version: int) -> list:
        actor, batch = prepared(PPOActorConfig(ppo_n_minibatches=4))
        actor.seed = seed
        actor.set_version(version)
        actor.ppo_update(batch)
        return [c["input_ids"].tolist() for c in actor.engine.calls]

    assert rows(0, 3) == rows(0, 3)
    assert rows(0, 3) != rows(0, 4)
    assert rows(0, 3) != rows(1, 3)


def test_minibatches_are_balanced_and_keep_units_whole():
    def split(units: list[int], n: int) -> list[list[int]]:
        return split_minibatches(torch.tensor(units), n, seed=5)

    parts = split(list(range(10)), 4)
    assert sorted(len(p) for p in parts) == [2, 2, 3, 3]
    assert sorted(i for p in parts for i in p) == list(range(10))
    assert split(list(range(5)), 1) == [[0, 1, 2, 3, 4]]
    with pytest.raises(ValueError, match=r"ppo_n_minibatches=4.*3 sequences"):
        split([0, 1, 2], 4)
    pairs = split([7, 7, 1, 1, 3, 3], 3)
    assert sorted(pairs) == [[0, 1], [2, 3], [4, 5]]


def test_minibatch_without_a_trained_token_is_left_out():
    actor, batch = prepared(PPOActorConfig(ppo_n_minibatches=16, loss_agg="sequence-mean"))
    batch["loss_mask"] = batch["loss_mask"].clone()
    batch["loss_mask"][3] = False
    assert actor.ppo_update(batch)["n_updates"] == 15
    assert all(sequence_weight(c) == 1 for c in actor.engine.calls)
    batch["loss_mask"][:] = False
    words = r"no token in the whole batch \(rows 0, 1, 2, 3, 4, 5, 6, 7 \.\.\.\)"
    with pytest.raises(ValueError, match=words):
        actor.ppo_update(batch)


def test_ratio_starts_from_the_logprobs_the_docstring_names():
    """Behaviour 0.1 nats off: it enters the ratio only without recompute_logprob."""

    def figures(**config) -> dict:
        actor, batch = prepared(PPOActorConfig(logp_gap_warn=1.0, **config))
        batch["logprobs"] = batch["logprobs"] - 0.1 * batch["loss_mask"]
        return actor.ppo_update(batch)

    off = math.exp(0.1)
    prox = figures()
    assert prox["ratio"] == pytest.approx(1.0)
    assert prox["train_rollout_logprob_abs_diff/mean"] == pytest.approx(0.1, abs=1e-6)
    behaviour = figures(recompute_logprob=False)
    assert behaviour["ratio"] == pytest.approx(off, rel=1e-5)
    assert "train_rollout_logprob_abs_diff/mean" not in behaviour
    decoupled = figures(correction={"weight": "token"})
    assert decoupled["ratio"] == pytest.approx(1.0)
    assert decoupled["behav_imp_weight"] == pytest.approx(off, rel=1e-5)
    assert decoupled["pg_loss"] == pytest.approx(off * prox["pg_loss"], abs=1e-6)
    capped = figures(correction={"mask": "token", "mask_high": 1.05})
    assert capped["behav_dropped_frac"] == 1.0 and capped["pg_loss"] == 0.0


def test_kl_to_the_reference_pulls_back():
    actor, batch = prepared(PPOActorConfig(kl_coef=1.0, kl_estimator="k2"))
    ref = Ref(TrainEngineConfig(), BigramEngine(), temperature=1.0)
    with pytest.raises(ValueError, match=r"no 'ref_logp'.*ref.compute_logp"):
        actor.ppo_update(batch)
    with torch.no_grad():
        actor.engine.table += torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(9))
    batch["ref_logp"] = ref.compute_logp(batch)
    actor.compute_prox_logp(batch)
    batch["advantages"].zero_()
    actor.config.logp_gap_warn = 100.0
    kls = [actor.ppo_update(batch)["kl_ref"] for _ in range(5)]
    assert kls[0] > 0.05 and kls[-1] < 0.9 * kls[0]


def test_advantages_need_groups_only_where_they_normalise():
    actor, batch = prepared(PPOActorConfig())
    del batch["group_ids"]
    with pytest.raises(ValueError, match="adv_norm='group'"):
        actor.compute_advantages(batch)
    actor = Actor(PPOActorConfig(adv_norm="none"), BigramEngine(), temperature=1.0)
    actor.compute_advantages(batch)
    assert torch.equal(batch["advantages"], batch["rewards"][:, None] * batch["loss_mask"])


def test_kl_in_the_reward_is_summed_over_the_samples_trained_tokens():
    """Before the group's norm, after the reward's shape; by hand, sample by sample."""
    actor, batch = prepared(PPOActorConfig(adv_norm="none", reward_scaling=2.0))
    with pytest.raises(ValueError, match=r"compute_advantages: the batch has no 'ref_logp'"):
        actor.compute_advantages(batch, kl_ctl=0.5)
    batch["ref_logp"] = batch["prox_logp"] - 0.1 * torch.arange(batch["prox_logp"].shape[1])
    actor.compute_advantages(batch, kl_ctl=0.5)
    for i, mask in enumerate(batch["loss_mask"].bool()):
        kl = sum(float(batch["prox_logp"][i, t] - batch["ref_logp"][i, t]) for t in mask.nonzero())
        want = 2.0 * float(batch["rewards"][i]) - 0.5 * kl
        assert batch["advantages"][i][mask].tolist() == pytest.approx([want] * int(mask.sum()))


def test_missing_prox_logp_says_what_to_call():
    for config, why in ((dict(recompute_logprob=True), "is on"), (dict(ppo_n_minibatches=2), "=2")):
        actor, batch = prepared(PPOActorConfig(**config))
        del batch["prox_logp"]
        with pytest.raises(ValueError, match=rf"call actor.compute_prox_logp.* first|{why}"):
            actor.ppo_update(batch)
    actor = Actor(PPOActorConfig(recompute_logprob=False), BigramEngine(), temperature=1.0)
    actor.compute_prox_logp(batch)
    assert "prox_logp" not in batch
    whole = Batch.from_padded(batch)  # no pass, but the ranks that will train on it get it
    actor.compute_prox_logp(whole)
    assert whole.minibatches == [list(range(16))]


def test_gap_shows_text_where_it_can_decode(warnings):
    actor, batch = prepared(PPOActorConfig(logp_gap_warn=0.1))
    actor.decode = lambda ids: "".join(chr(ord("a") + i) for i in ids)
    batch["attention_mask"][2, 7:] = False  # what is padded is no neighbour
    batch["loss_mask"][2, 7:] = False
    batch["logprobs"][2, 5] = math.nan
    actor.ppo_update(batch)
    word = actor.decode(batch["input_ids"][2, :7].tolist())
    assert f"{word[5]!r} in '{word[:5]}»{word[5]}«{word[6]}'" in warnings[0]


def test_gap_warns_with_the_worst_tokens_of_current_weights(warnings):
    actor, batch = prepared(PPOActorConfig(logp_gap_warn=0.1))
    batch["logprobs"] = batch["logprobs"].clone()
    batch["logprobs"][2, 5] -= 0.3
    stats = actor.ppo_update(batch)
    assert stats["train_rollout_logprob_abs_diff/max"] == pytest.approx(0.3, abs=1e-5)
    ids = batch["input_ids"][2].tolist()
    text = f"{' '.join(map(str, ids[:5]))}»{ids[5]}«{' '.join(map(str, ids[6:]))}"
    assert len(warnings) == 1
    line = warnings[0].splitlines()[1]
    ours, theirs = batch["prox_logp"][2, 5], batch["logprobs"][2, 5]
    assert "row 2 position 5" in line and f"token {ids[5]} " in line and text in line
    assert f"trainer {ours:.6g}, server {theirs:.6g}" in line

    # written by older weights: a gap is expected there
    actor, batch = prepared(PPOActorConfig(logp_gap_warn=0.1))
    batch["logprobs"] = batch["logprobs"] - 0.3
    actor.set_version(1)
    actor.ppo_update(batch)
    assert len(warnings) == 1


def test_rewards_that_are_not_finite_are_named():
    actor, batch = prepared(PPOActorConfig())
    batch["rewards"][[3, 9]] = torch.tensor([math.nan, math.inf])
    with pytest.raises(ValueError, match=r"rewards of rows \[3, 9\] are \[nan, inf\]"):
        actor.compute_advantages(batch)


def test_a_reward_beyond_the_limit_is_named_once(warnings):
    actor, batch = prepared(PPOActorConfig(reward_clip=2.0, reward_scaling=0.5))
    assert not warnings
    for _ in range(2):
        actor.compute_advantages(batch | {"rewards": torch.arange(16.0)})
    (warning,) = warnings
    assert "actor.reward_clip=2" in warning and "11 of 16" in warning


def test_a_refused_update_enters_no_mean():
    actor, batch = prepared(PPOActorConfig(ppo_n_minibatches=4))
    one = split_minibatches(torch.arange(16), 4, seed=0)[1][0]
    batch["advantages"][one, 2] = math.nan
    stats = actor.ppo_update(batch)
    assert stats["skipped_updates"] == 1 and stats["n_updates"] == 3
    assert stats["update_successful"] == 0.75
    skipped = split_minibatches(torch.arange(16), 4, seed=0)[1]
    assert batch["skipped"].nonzero().flatten().tolist() == skipped
    assert stats["skipped_sequences"] == 4
    assert stats["skipped_tokens"] == batch["loss_mask"][skipped].sum() > 0
    assert all(math.isfinite(v) for v in stats.values())
    batch["advantages"][:, 2] = math.nan
    stats = actor.ppo_update(batch)
    assert stats["skipped_updates"] == 4 and stats["update_successful"] == 0
    assert stats["skipped_sequences"] == 16 and "loss" not in stats


def test_a_metric_that_some_updates_lack_is_the_mean_of_the_others():
    updates = [{"loss": 1.0}, {"loss": 2.0, "rare": 8.0, "lr": 1.0}, {"loss": 3.0, "rare": 4.0}]
    means = mean_metrics([u | {"update_successful": 1.0} for u in updates])
    assert means == {
        "loss": 2.0, "rare": 6.0, "lr": 1.0,
        "n_updates": 3.0, "skipped_updates": 0.0, "update_successful": 1.0,
    }  # fmt: skip


def test_a_metric_counts_by_its_weight_in_every_update():
    updates = [
        Metrics({"loss": 1.0, "late": math.nan, "never": math.nan}, {"late": 0.0, "never": 0.0}),
        Metrics({"loss": 2.0, "late": 8.0, "never": math.nan}, {"late": 1.0, "never": 0.0}),
        Metrics({"loss": 6.0, "late": 4.0, "never": math.nan}, {"late": 3.0, "never": 0.0}),
    ]
    for update in updates:
        update["update_successful"] = 1.0
    means = mean_metrics(updates)
    assert means["loss"] == 3.0 and means["late"] == 5.0 and math.isnan(means["never"])


def test_logp_gap_by_hand():
    mask = torch.tensor([[False, True, True], [False, True, False]])
    server = torch.tensor([[0.0, -1.0, -2.0], [0.0, -3.0, 9.0]])
    trainer = torch.tensor([[0.0, -1.5, -2.0], [0.0, -2.9, -9.0]])
    batch = whole(prox_logp=trainer, logprobs=server, loss_mask=mask)
    stats = logp_gap_stats(batch)
    k3 = [math.exp(-0.5) - 1 + 0.5, 0.0, math.exp(0.1) - 1 - 0.1]
    assert stats["train_rollout_logprob_abs_diff/mean"] == pytest.approx(0.2, abs=1e-6)
    assert stats["train_rollout_logprob_abs_diff/max"] == pytest.approx(0.5)
    assert stats["mismatch/k1"] == pytest.approx(0.4 / 3, abs=1e-6)
    assert stats["mismatch/k3"] == pytest.approx(sum(k3) / 3, abs=1e-6)
    worst = worst_logp_gaps(batch, k=2)
    assert [(w.row, w.position) for w in worst] == [(0, 1), (1, 1)]
    assert len(worst_logp_gaps(batch, k=50)) == 3
    assert worst_logp_gaps(batch, above=0.5) == []
    trainer[1, 1] = math.nan
    batch = whole(prox_logp=trainer, logprobs=server, loss_mask=mask)
    assert worst_logp_gaps(batch, k=1)[0].row == 1
    nothing = whole(prox_logp=trainer, logprobs=server, loss_mask=torch.zeros_like(mask))
    assert logp_gap_stats(nothing) == {} and worst_logp_gaps(nothing) == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(ppo_n_minibatches=0), "ppo_n_minibatches=0"),
        (dict(eps_clip=1.5), "eps_clip=1.5"),
        (dict(eps_clip_higher=-0.1), "eps_clip_higher=-0.1"),
        (dict(c_clip=0.9), "c_clip=0.9"),
        (
            dict(correction={}, recompute_logprob=False),
            "recompute_logprob other than false",
        ),
        (dict(correction={"weight_cap": 0.0}), "correction.weight_cap=0.0: must be greater than 0"),
        (dict(correction={"weight_cap": "2"}), r"weight_cap='2': not of type float \| None"),
        (dict(correction={"wieght": "token"}), r"did you mean weight\?"),
        (dict(reward_clip=0.0), "reward_clip=0.0"),
    ],
)
def test_bad_config_names_value_and_fix(config, message):
    with pytest.raises(ValueError, match=message):
        Actor(PPOActorConfig(**config), BigramEngine(), temperature=1.0)


@pytest.mark.parametrize("role", (Actor, Ref))
def test_a_role_made_by_hand_must_be_told_the_temperature(role):
    with pytest.raises(TypeError, match="temperature"):
        role(PPOActorConfig(), BigramEngine())


def test_temperature_must_be_positive():
    with pytest.raises(ValueError, match="temperature=0"):
        Actor(PPOActorConfig(), BigramEngine(), temperature=0.0)


def test_engine_verbs_pass_through():
    actor: Any = Actor(PPOActorConfig(), BigramEngine(), temperature=1.0)
    save = SaveLoadMeta(path="x")
    upload = WeightUpdateMeta(type="distributed", version=3)
    actor.initialize("addr", None)
    actor.step_lr_scheduler()
    assert actor.upload_weights(upload) == {"bytes": 8.0}
    actor.save(save)
    actor.load(save)
    actor.offload()
    actor.onload()
    actor.set_version(3)
    actor.destroy()
    assert actor.engine.calls == [
        ("initialize", "addr", None),
        ("step_lr_scheduler",),
        ("upload_weights", upload),
        ("save", save),
        ("load", save),
        ("offload",),
        ("onload",),
        ("destroy",),
    ]
    assert actor.get_version() == 3
    assert actor.get_scheduling_config() == {"cpu": 1}


def test_sft_learns_and_reports_exact_match():
    model = SFT(TrainEngineConfig(), BigramEngine(lr=20.0))
    ids = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [6, 7, 8, 0, 0]])
    attention = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    loss_mask = attention.clone()
    loss_mask[:, 0] = False
    batch = {"input_ids": ids, "attention_mask": attention, "loss_mask": loss_mask}
    before = model.evaluate(batch)
    assert before["exact_match"] < 1 and before["ppl"] == pytest.approx(math.exp(before["loss"]))
    first = model.train(batch)
    assert first["loss"] == pytest.approx(before["loss"]) and "ppl" in first
    for _ in range(30):
        model.train(batch)
    after = model.evaluate(batch)
    assert after["exact_match"] == after["token_accuracy"] == 1.0
    assert after["loss"] < 0.1
    words = r"SFT batch: loss_mask marks no token in 3 of 3 rows \(0, 1, 2\): there is nothing"
    with pytest.raises(ValueError, match=words):
        model.train(batch | {"loss_mask": torch.zeros_like(loss_mask)})


def test_a_row_without_a_trained_token_changes_nothing_in_sft_and_is_named(warnings):
    ids = torch.tensor([[1, 2, 3], [6, 7, 8]])
    full = torch.ones(2, 3).bool()
    mask = torch.tensor([[False, True, True], [False, False, False]])
    batch = {"input_ids": ids, "attention_mask": full, "loss_mask": mask}
    both, alone = (SFT(TrainEngineConfig(), BigramEngine(lr=20.0)) for _ in range(2))
    figures = both.train(batch)
    assert figures == alone.train({k: v[:1] for k, v in batch.items()})
    assert all(math.isfinite(v) for v in figures.values())
    both.train(batch)
    assert warnings == [
        "SFT batch: loss_mask marks no token in 1 of 2 rows (1): nothing is learned from them"
    ]
