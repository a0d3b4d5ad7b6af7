"""What users add from outside of the package: a file each, named in the configuration alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algos import Actor
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.config.recipes import GRPOConfig
from megarl.data.dataset import build_dataloader, build_dataset
from megarl.observability import stats_tracker
from megarl.trainer.preflight import check_contents
from tests.hf_stub import write_stub
from tests.tiny_tokenizer import save_tokenizer
from tests.unit.bigram import BigramEngine, rollout

EXAMPLES = Path(__file__).parents[2] / "examples"
FILE = '''
import torch
from dataclasses import dataclass
from megarl.algos import AdvantageSpec, LossSpec, token_weight
from megarl.config.recipes import GRPOConfig
from megarl.rollout.chat import ChatWorkflow
from megarl.rollout.trajectory import to_batch


def reinforce(config, *, scale: float = 1.0):
    def loss(outputs, batch):
        mask = batch["loss_mask"].bool()
        return -scale * (outputs["logprobs"] * batch["advantages"])[mask].sum(), {}
    return LossSpec(fn=loss, weight=token_weight, needs=("advantages",))


def leave_one_out(config, *, floor: float = 0.0):
    """RLOO: the reward less the mean of the group's others, decaying towards the answer's start."""
    def per_sample(batch):
        same = batch["group_ids"][:, None] == batch["group_ids"]
        others = same.sum(1) - 1
        return batch["rewards"] - (same * batch["rewards"]).fill_diagonal_(0).sum(1) / others
    def per_token(numbers, rows):
        ahead = rows["loss_mask"].flip(1).cumsum(1).flip(1)
        return numbers[:, None] * rows["loss_mask"] / ahead.clamp(min=1)
    return AdvantageSpec(per_sample=per_sample, per_token=per_token, needs_groups=True)


def colours(cfg, *, seed, n: int = 4):
    for i in range(n):
        yield {"messages": f"Colour {i}?", "answer": "blue", "hue": i}


def judge(prompt, completion, prompt_ids, completion_ids, *, hue, bonus: float, **row):
    return bonus + hue


class Backwards:
    def __init__(self, dataset, *, seed):
        self.n = len(dataset)
    def __len__(self):
        return self.n
    def __iter__(self):
        return iter(range(self.n - 1, -1, -1))


def hues(rows, *, add: int):
    return [row | {"hue": row["hue"] + add} for row in rows]


class Ask(ChatWorkflow):
    def __init__(self, *args, turns: int, **kwargs):
        super().__init__(*args, **kwargs)
        self.turns = turns
    async def arun_episode(self, engine, data):
        samples = self.begin(data)
        for _ in range(self.turns):
            await self.generate(engine, samples, data)
        return to_batch(samples, await self.score(samples, data))


@dataclass(kw_only=True)
class MyConfig(GRPOConfig):
    patience: int = 3


class MyTrainer:
    config_class = MyConfig
    def __init__(self, cfg, ctx, *, loud: bool = False):
        pass
    def fit(self):
        pass
'''
ALL = {
    "actor.loss": "outside:reinforce",
    "actor.loss.options.scale": "2",
    "actor.advantages": "outside:leave_one_out",
    "train_dataset.type": "outside:colours",
    "train_dataset.options.n": "5",
    "train_dataset.reward": "outside:judge",
    "train_dataset.reward.options.bonus": "0.5",
    "train_dataset.sampler": "outside:Backwards",
    "train_dataset.collate": "outside:hues",
    "train_dataset.collate.options.add": "10",
    "train_dataset.batch_size": "2",
    "rollout.workflow": "outside:Ask",
    "rollout.workflow.options.turns": "2",
    "trainer": "outside:MyTrainer",
    "trainer.options.loud": "true",
    "patience": "4",
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    write_stub(tmp_path / "model")
    (tmp_path / "outside.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield tmp_path
    sys.modules.pop("outside", None)


def config(**changed: str | None) -> GRPOConfig:
    words = ALL | {k.replace("__", "."): v for k, v in changed.items()}
    base = ["actor.path=model", "actor.optimizer.lr=1e-5", "gconfig.n_samples=2", "fileroot=runs"]
    cfg = load_config(None, [*base, *(f"{k}={v}" for k, v in words.items() if v is not None)])
    assert isinstance(cfg, GRPOConfig)
    return cfg


def test_everything_is_named_in_the_configuration(home: Path) -> None:
    cfg = config()
    assert type(cfg).__name__ == "MyConfig" and vars(cfg)["patience"] == 4
    check_contents(cfg)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("actor__loss__options__scale", "x", r"actor\.loss\.options\.scale='x': not of type float"),
        ("actor__loss", "outside:colours", "missing a required argument: 'seed'|seed: .*needs it"),
        # a function for another place: how it is called comes before its arguments
        ("actor__loss", "outside:hues", r"loss\(config\).*actor\.loss\.options\.add: hues"),
        ("actor__loss", "ppo", r"actor\.loss=ppo: use one of policy, .*, or pkg\.module:function"),
        ("rollout__workflow__options__turns", None, r"workflow\.options\.turns: Ask needs it"),
        ("train_dataset__options__n", "many", r"options\.n='many': not of type int"),
        ("train_dataset__collate__options__add", None, r"collate\.options\.add: hues needs it"),
        ("train_dataset__sampler", "outside:hues", r"sampler\.options\.add: hues needs it"),
        ("trainer__options__loud", "2", r"trainer\.options\.loud=2: not of type bool"),
        ("trainer", "outside:Backwards", r"Backwards has no such option|has no method fit"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_start(
    home: Path, key: str, value: str | None, message: str
) -> None:
    changed: dict[str, Any] = {key: value}
    if key == "trainer":
        changed |= {"patience": None}
    if key == "actor__loss":
        changed |= {"actor__loss__options__scale": None}
    with pytest.raises(ConfigError, match=message):
        check_contents(config(**changed))


def test_what_is_made_wrongly_is_refused_where_a_launcher_starts_it(home: Path) -> None:
    check_contents(config(), launcher=True, starts=True)
    wrong = config(actor__advantages="outside:reinforce")
    check_contents(wrong)
    with pytest.raises(ConfigError, match=r"returned a LossSpec, not a .*AdvantageSpec"):
        check_contents(wrong, launcher=True, starts=True)


def test_rows_in_the_samplers_order_and_the_collators_form(home: Path) -> None:
    cfg, tokenizer = config(), save_tokenizer(home / "tokenizer")
    data = build_dataset(cfg.train_dataset, tokenizer, purpose="rl", seed=1)
    batches = list(build_dataloader(data, cfg.train_dataset, seed=1))
    assert [[row["hue"] for row in rows] for rows in batches] == [[14, 13], [12, 11]]


def test_a_loss_and_an_advantage_train(home: Path) -> None:
    """The step is the gradient that the file's two functions stand for."""
    cfg = config()
    actor = Actor(cfg.actor, BigramEngine(), temperature=1.0)
    batch = rollout(BigramEngine())
    actor.compute_prox_logp(batch)
    actor.compute_advantages(batch)
    rewards, groups, mask = batch["rewards"], batch["group_ids"], batch["loss_mask"].bool()
    for i in range(len(rewards)):
        others = [rewards[j] for j in range(len(rewards)) if groups[j] == groups[i] and j != i]
        number = float(rewards[i] - sum(others) / len(others))
        places = mask[i].nonzero().flatten().tolist()
        for k, t in enumerate(places):
            want = number / (len(places) - k)
            assert float(batch["advantages"][i, t]) == pytest.approx(want, abs=1e-6)
    table = actor.engine.table.detach().clone().requires_grad_()
    ids = batch["input_ids"]
    logp = table[ids[:, :-1]].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    (2 * (logp * batch["advantages"][:, 1:])[mask[:, 1:]].sum() / mask.sum()).backward()
    stats = actor.ppo_update(batch)
    assert table.grad is not None
    want_table = table.detach() + actor.engine.lr * table.grad
    torch.testing.assert_close(actor.engine.table.detach(), want_table, rtol=0, atol=1e-6)
    assert "ratio" not in stats and stats["n_updates"] == 1


# the examples, each in a file of its own


def updated(*words: str) -> tuple[dict[str, float], torch.Tensor, dict[str, Any]]:
    """The figures of an update as the configuration names it, how much likelier the tokens became,
    and the batch."""
    cfg = load_config(None, ["actor.path=nowhere", *words])
    assert isinstance(cfg, GRPOConfig)
    actor = Actor(cfg.actor, BigramEngine(), temperature=1.0)
    batch = rollout(BigramEngine())
    actor.compute_prox_logp(batch)
    actor.compute_advantages(batch)
    before = actor.compute_logp(batch)
    stats = actor.ppo_update(batch)
    return stats, actor.compute_logp(batch) - before, batch


def test_a_loss_that_learns_from_good_answers_alone() -> None:
    name = "actor.loss=examples.custom_loss:raft"
    stats_tracker.export(over_ranks=False)  # what other tests left
    stats, gain, batch = updated(name, "actor.loss.options.floor=0.5")
    good = batch["loss_mask"].bool() & (batch["advantages"] > 0.5)
    assert stats["good_tokens"] == pytest.approx(float(good.sum() / batch["loss_mask"].sum()))
    assert 0 < stats["good_tokens"] < 1
    logp = batch["prox_logp"]
    assert stats["loss"] == pytest.approx(float(-logp[good].mean()), rel=1e-5)
    assert gain[good].sum() > 0
    # the figures of every loss, and one that is no mean
    assert {"ratio_rms_dev", "approx_kl", "behav_ess", "clip_frac"} <= set(stats)
    assert stats["ratio"] == pytest.approx(1.0) and "ratio_sq_dev" not in stats
    own = stats_tracker.export(over_ranks=False)
    assert own == {
        "good": float(good.sum()),
        "good_logp_min": pytest.approx(float(logp[good].min())),
    }


def test_a_surrogate_keeps_what_stands_around_it() -> None:
    name = "actor.surrogate=examples.custom_loss:square_root"
    stats, gain, batch = updated(name, "actor.use_decoupled_loss=true")
    assert (gain * batch["advantages"]).sum() > 0
    assert {"approx_kl", "behav_ess", "entropy"} <= set(stats)
    # on policy u^p / p has the slope of u, whatever p is
    plain, plain_gain, _ = updated("actor.surrogate=unclipped")
    torch.testing.assert_close(gain, plain_gain, rtol=0, atol=1e-5)
    assert stats["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)


def test_advantages_by_difficulty() -> None:
    name = "actor.advantages=examples.custom_advantage:by_difficulty"
    _, gain, batch = updated(name, "actor.advantages.options.decay=0.5")
    rewards, mask = batch["rewards"].view(4, 4), batch["loss_mask"]
    passed = (rewards > 0).float().mean(1, keepdim=True)
    numbers = ((rewards - rewards.mean(1, keepdim=True)) * 4 * passed * (1 - passed)).flatten()
    for i in range(16):
        at = mask[i].nonzero().flatten()
        left = torch.arange(len(at) - 1, -1, -1)
        torch.testing.assert_close(batch["advantages"][i, at], numbers[i] * 0.5**left)
    assert (gain * batch["advantages"]).sum() > 0


def test_examples_are_short() -> None:
    for name in ("loss", "advantage", "trainer"):
        text = (EXAMPLES / f"custom_{name}.py").read_text()
        assert len(text.splitlines()) < 80, name
