"""`algorithm: NAME` stands for keys of the actor: what wins over what, and that each one learns."""

from __future__ import annotations

import pytest
import torch

from megarl.algos import Actor
from megarl.algos.specs import advantages_of, loss_of
from megarl.algos.surrogates import CISPO, GMPO, Clip
from megarl.config.algo import PPOActorConfig
from megarl.config.base import SeamConfig
from megarl.config.check import check_config
from megarl.config.check_parts import actor_problems
from megarl.config.errors import ConfigError
from megarl.config.loader import config_yaml, load_config
from megarl.config.presets import PRESETS
from tests.unit.bigram import BigramEngine, prepared, rollout
from tests.unit.presets import NAMES, preset

FILE = """\
algorithm: gspo
actor: {path: nowhere, eps_clip_higher: 0.01, advantages: {type: mine.py:mine, options: {a: 1}}}
train_dataset: {path: rows.jsonl}
"""


def test_keys_of_the_file_win_over_the_preset_it_names(tmp_path):
    (tmp_path / "run.yaml").write_text(FILE)
    actor = load_config(tmp_path / "run.yaml").actor
    assert (actor.ratio, actor.eps_clip, actor.eps_clip_higher) == ("sequence", 3e-4, 0.01)
    assert (actor.advantages.type, actor.advantages.options) == ("mine.py:mine", {"a": 1})
    # as it is written again, all keys are there, and win again
    (tmp_path / "again.yaml").write_text(config_yaml(load_config(tmp_path / "run.yaml")))
    assert load_config(tmp_path / "again.yaml").actor == actor


def test_the_command_line_names_another_algorithm_whole(tmp_path):
    (tmp_path / "run.yaml").write_text(FILE)
    config = load_config(tmp_path / "run.yaml", ["algorithm=gmpo", "actor.eps_clip=0.3"])
    assert config.algorithm == "gmpo"
    assert loss_of(config.actor).fn.surrogate == GMPO(eps_low=0.3, eps_high=None)
    assert config.actor.ratio == "token" and config.actor.advantages.type == "group"
    assert config.actor.path == "nowhere"


def test_a_preset_wins_over_what_the_file_takes_from_others(tmp_path):
    (tmp_path / "base.yaml").write_text("actor: {path: nowhere, eps_clip: 0.1, ratio: sequence}\n")
    (tmp_path / "run.yaml").write_text("defaults: [base]\nalgorithm: cispo\n")
    actor = load_config(tmp_path / "run.yaml").actor
    assert loss_of(actor).fn.surrogate == CISPO(eps_low=1.0, eps_high=4.0)
    assert (actor.path, actor.ratio) == ("nowhere", "token")


def test_ppo_offers_none():
    with pytest.raises(ConfigError, match="algorithm=gspo: with a critic"):
        check_config(load_config(None, ["recipe=ppo", "algorithm=gspo", "actor.path=nowhere"]))


@pytest.mark.parametrize("kind", ["sample", "population"])
@pytest.mark.parametrize(
    ("name", "options", "config"),
    [
        ("group", {}, {"adv_norm": "group"}),
        ("group", {}, {"adv_norm": "group_batch"}),
        ("levels", {"std": "group"}, {}),
        ("levels", {}, {}),
        ("somebodys.code:fn", {}, {"adv_norm": "none"}),
    ],
)
def test_a_kind_of_std_goes_with_what_divides_by_it(name, options, config, kind):
    advantages = SeamConfig(type=name, options=options | {"kind": kind})
    assert not list(actor_problems(PPOActorConfig(advantages=advantages, **config)))


def test_an_unknown_algorithm_is_named_with_all_that_there_are():
    with pytest.raises(ConfigError, match=r"algorithm=gropo.*gspo"):
        load_config(None, ["algorithm=gropo", "actor.path=nowhere"])


@pytest.mark.parametrize("name", ["algorithm.adv_estimator=grpo", "algorithm.kl_ctrl.kl_coef=0.1"])
def test_the_section_of_that_name_in_verl_still_gets_our_names(name):
    with pytest.raises(ConfigError, match=r"unknown key; did you mean (actor\.adv_norm|kl_ctl)"):
        load_config(None, [name, "actor.path=nowhere"])


def test_interpolated_lengths_are_those_of_the_run():
    words = ["algorithm=dr_grpo", "actor.path=nowhere", "gconfig.max_new_tokens=64"]
    assert loss_of(load_config(None, words).actor).fn.scale == 1 / 64


def test_without_an_algorithm_the_loss_is_ppos():
    config = load_config(None, ["actor.path=nowhere"]).actor
    assert loss_of(config).fn.surrogate == Clip(eps_low=0.2, eps_high=None)


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_raises_the_probability_of_what_was_rewarded(name):
    config = preset(name)
    assert PRESETS[name]["actor"].items() and loss_of(config) and advantages_of(config)
    actor, batch = prepared(config)
    advantages = batch["advantages"]
    before = actor.compute_logp(batch)
    for _ in range(3):
        actor.ppo_update(batch)
    gain = (actor.compute_logp(batch) - before) * advantages
    assert gain.sum() > 0


@pytest.mark.parametrize("name", ["gspo", "dr_grpo", "gmpo", "reinforce_pp"])
def test_the_mean_of_the_mini_batches_makes_the_step(name):
    """One step on all rows is the sum of the steps on its halves, by their weights."""
    config = preset(name)
    actor, batch = prepared(config)
    start = actor.engine.table.detach().clone()
    actor.ppo_update(batch)
    moved = actor.engine.table.detach() - start
    halves = torch.zeros_like(moved)
    spec = loss_of(config)
    for rows in (slice(0, 5), slice(5, 16)):
        other = Actor(config, BigramEngine(), temperature=1.0)
        part = {k: v[rows] for k, v in batch.items()}
        other.ppo_update(part)
        halves += (other.engine.table.detach() - start) * spec.weight(part) / spec.weight(batch)
    torch.testing.assert_close(moved, halves, rtol=0, atol=1e-6)


def test_token_sum_divides_by_nothing_and_sequence_sum_by_sequences():
    moved = {}
    for agg in ("token-sum", "sequence-sum", "token-mean"):
        config = load_config(None, ["actor.path=nowhere", f"actor.loss_agg={agg}"]).actor
        actor, batch = prepared(config)
        start = actor.engine.table.detach().clone()
        actor.ppo_update(batch)
        moved[agg] = actor.engine.table.detach() - start
    tokens = float(batch["loss_mask"].sum())
    torch.testing.assert_close(moved["token-sum"], moved["token-mean"] * tokens)
    torch.testing.assert_close(moved["token-sum"], moved["sequence-sum"] * 16)


def test_reinforce_pp_takes_the_kl_that_follows_a_token():
    """arXiv 2501.03262, before whitening: r - beta sum over i >= t of k1_i."""
    actor, batch = prepared(preset("reinforce_pp"))
    batch["ref_logp"] = batch["prox_logp"] - 0.1 * torch.arange(batch["prox_logp"].shape[1])
    actor.compute_advantages(batch, kl_ctl=0.5)
    mask = batch["loss_mask"].bool()
    raw = torch.zeros_like(batch["advantages"])
    for i in range(len(raw)):
        for t in mask[i].nonzero().flatten().tolist():
            to_go = sum(
                float(batch["prox_logp"][i, j] - batch["ref_logp"][i, j])
                for j in range(t, raw.shape[1])
                if mask[i, j]
            )
            raw[i, t] = float(batch["rewards"][i]) - 0.5 * to_go
    want = (raw - raw[mask].mean()) / (raw[mask].std() + 1e-6)
    torch.testing.assert_close(batch["advantages"][mask], want[mask], rtol=0, atol=1e-5)


def test_answers_that_were_cut_are_compared_and_not_trained_on():
    words = ["actor.path=nowhere", "actor.mask_truncated=true", "actor.adv_norm=group_mean"]
    actor, batch = prepared(PPOActorConfig())
    actor = Actor(load_config(None, words).actor, BigramEngine(), temperature=1.0)
    with pytest.raises(ValueError, match=r"mask_truncated=true: the batch has no 'truncated'"):
        actor.compute_advantages(batch)
    batch["truncated"] = torch.arange(16) % 4 == 0
    rewards = batch["rewards"].view(4, 4)
    numbers = (rewards - rewards.mean(1, keepdim=True)).flatten()  # of all, the cut ones too
    mask = batch["loss_mask"].clone()
    actor.compute_advantages(batch)
    assert torch.equal(batch["loss_mask"].bool(), mask & ~batch["truncated"][:, None])
    torch.testing.assert_close(batch["advantages"], numbers[:, None] * batch["loss_mask"])
    batch |= {"truncated": torch.ones(16, dtype=torch.bool), "loss_mask": mask}
    actor.compute_advantages(batch)  # nothing would be left
    assert torch.equal(batch["loss_mask"], mask)


def test_a_group_too_small_for_k_is_refused():
    config = load_config(None, ["algorithm=pass_at_k", "actor.path=nowhere"]).actor
    actor = Actor(config, BigramEngine(), temperature=1.0)
    batch = rollout(actor.engine, n=2, groups=8)
    with pytest.raises(Exception, match=r"k=4, and a group has 2 samples"):
        actor.compute_advantages(batch)
