"""Where prox_logp comes from: `auto` makes the same step to the bit, without the pass."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.algos import Actor, AdvantageSpec, LossSpec, token_weight
from megarl.api.batch import Batch
from megarl.config.algo import PPOActorConfig
from megarl.config.base import SeamConfig
from megarl.config.loader import load_config
from megarl.config.recipes import PPOConfig
from megarl.trainer import rl
from megarl.trainer.context import Workers
from megarl.trainer.rl import PPOTrainer, RLTrainer
from megarl.trainer.self_check import SelfCheckError
from tests.unit.bigram import BigramEngine, rollout
from tests.unit.test_self_check import Dropout, a_check

VARIANTS: dict[str, dict[str, Any]] = {
    "clip": {},
    "gspo": dict(ratio="sequence-token", loss_agg="sequence-mean"),
    "decoupled": dict(correction={"mask": "token", "mask_high": 1.02}),
    "masked": dict(correction=dict(weight="sequence", weight_cap=2.0, mask="geometric", veto=1e-3)),
    "kl": dict(kl_coef=0.1, kl_estimator="k3-weighted", entropy_coef=0.01),
}


class Passes(BigramEngine):
    """Counts the passes without gradients."""

    passes = 0

    def forward(self, *args: Any, **kw: Any) -> Any:
        self.passes += 1
        return super().forward(*args, **kw)


def steps(way: str, *, whole: bool, **config: Any) -> tuple[Any, list[dict[str, float]], Any]:
    """Makes three steps whose behaviour is a little off; returns actor, metrics, last batch."""
    settings = PPOActorConfig(recompute_logprob=way, logp_gap_warn=100.0, **config)
    actor: Any = Actor(settings, Passes(), temperature=0.7)
    actor.also = ("entropy",)
    stats = []
    for _ in range(3):
        made = rollout(actor.engine, 0.7)
        made["logprobs"] = made["logprobs"] - 0.02 * made["loss_mask"] * made["input_ids"]
        made["ref_logp"] = made["logprobs"] + 0.3 * made["loss_mask"]
        batch: Any = Batch.from_padded(made) if whole else made
        actor.engine.passes = 0
        if way == "true":
            actor.compute_prox_logp(batch)
        actor.compute_advantages(batch)
        stats.append(actor.ppo_update(batch))
        assert actor.engine.passes == (way == "true")
    return actor, stats, batch


@pytest.mark.parametrize("name", VARIANTS)
def test_the_step_is_the_same_to_the_bit_without_the_pass(name: str) -> None:
    for whole in (False, True):
        (with_pass, said, of_pass), (without, says, own) = (
            steps(way, whole=whole, **VARIANTS[name]) for way in ("true", "auto")
        )
        assert torch.equal(with_pass.engine.table, without.engine.table)
        assert not torch.equal(without.engine.table, BigramEngine().table)
        assert says == said and says[2]["train_rollout_logprob_abs_diff/max"] > 0.1
        for field in ("prox_logp", "entropy"):
            mine, theirs = ((b[field].values if whole else b[field]) for b in (own, of_pass))
            assert torch.equal(mine, theirs), field


def test_a_second_update_of_a_batch_starts_from_the_first_ones_policy() -> None:
    actor, _, batch = steps("auto", whole=False)
    before = batch["prox_logp"].clone()
    again = actor.ppo_update(batch)
    assert torch.equal(batch["prox_logp"], before) and again["ratio_abs_dev"] > 1e-3


def reads(config: PPOActorConfig) -> AdvantageSpec:
    return AdvantageSpec(
        per_sample=lambda b: b["rewards"],
        per_token=lambda numbers, part: part["prox_logp"] + numbers[:, None],
        reads=("prox_logp", "loss_mask"),
    )


def loss(config: PPOActorConfig, *, own: bool = False, outputs: Any = ("logprobs",)) -> LossSpec:
    def fn(outputs, batch):
        ratio = (outputs["logprobs"] - batch["prox_logp"]).exp()
        return -(ratio * batch["advantages"] * batch["loss_mask"]).sum(), {}

    needs = ("advantages", "prox_logp")
    return LossSpec(fn=fn, weight=token_weight, needs=needs, outputs=outputs, own_prox=own)


HERE = "tests.unit.test_proximal"


def of(seam: str, name: str, **options: Any) -> dict[str, Any]:
    return {seam: SeamConfig(type=f"{HERE}:{name}", options=options)}


@pytest.mark.parametrize(
    ("config", "also", "kl_ctl", "words"),
    [
        ({}, (), 0.0, ""),
        ({}, ("entropy",), 0.0, ""),
        (dict(router_replay="rollout"), (), 0.0, ""),
        (of("loss", "loss", own=True), (), 0.0, ""),
        (dict(recompute_logprob=True), (), 0.0, "recompute_logprob=true"),
        (dict(ppo_n_minibatches=2), (), 0.0, "ppo_n_minibatches=2"),
        ({}, (), 0.1, "kl_ctl=0.1"),
        (of("advantages", "reads"), (), 0.0, "actor.advantages=.*reads prox_logp"),
        (of("loss", "loss"), (), 0.0, "does not say .*own_prox"),
        (of("loss", "loss", own=True), ("entropy",), 0.0, "no entropy among its outputs"),
        (of("loss", "loss", own=True, outputs=("entropy",)), (), 0.0, "no logprobs among"),
        (dict(router_replay="trainer"), (), 0.0, "router_replay=trainer"),
    ],
)
def test_auto_makes_the_pass_where_something_needs_it(config, also, kl_ctl, words) -> None:
    actor: Any = Actor(PPOActorConfig(**config), BigramEngine(), temperature=1.0)
    actor.also = also
    reason = actor.reason_for_pass(kl_ctl=kl_ctl)
    assert bool(reason) == bool(words) and re.search(words, reason)


def test_what_reads_prox_logp_and_has_none_says_what_to_call() -> None:
    batch = rollout(BigramEngine())
    batch["advantages"] = torch.ones_like(batch["logprobs"])
    for config in (of("loss", "loss"), dict(ppo_n_minibatches=2)):
        actor: Any = Actor(PPOActorConfig(**config), BigramEngine(), temperature=1.0)
        with pytest.raises(ValueError, match=r"call actor.compute_prox_logp\(batch\) first \("):
            actor.ppo_update(batch)
    own: Any = Actor(PPOActorConfig(**of("loss", "loss", own=True)), Passes(), temperature=1.0)
    own.ppo_update(batch)
    assert own.engine.passes == 0 and "prox_logp" in batch


def test_the_words_of_before_are_read() -> None:
    given: Any
    for given, meant in ((True, "true"), (False, "false"), ("auto", "auto")):
        assert PPOActorConfig(recompute_logprob=given).recompute_logprob == meant
        cfg: Any = load_config(None, ["recipe=ppo", f"actor.recompute_logprob={given}".lower()])
        assert cfg.actor.recompute_logprob == meant
    assert PPOActorConfig().recompute_logprob == "auto"


# ---- the recipe ---------------------------------------------------------------------------------


class Own(RLTrainer):
    """A trainer of a user's, with a step of the recipe."""


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rl, "RolloutSession", lambda *args: SimpleNamespace(dataset_size=1))
    monkeypatch.setattr(rl, "StepRecorder", lambda *args, **kwargs: None)


@pytest.fixture
def log() -> Any:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda r: lines.append(r.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megarl.trainer.rl")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def a_trainer(
    cls: Any, tmp_path: Path, engine: Any = None, on_failure: str = "stop", **config: Any
) -> Any:
    cfg: Any = PPOConfig(self_check={"on_failure": on_failure})
    cfg.actor = PPOActorConfig(**config)
    ctx: Any = SimpleNamespace(tokenizer=None, ranks=None)
    ctx.trainers = ctx.rollout = Workers(ctx)
    trainer = cls(cfg, ctx)
    trainer.actor = Actor(cfg.actor, engine or Passes(), temperature=1.0)
    trainer.check = a_check(tmp_path, cfg)
    trainer.check.watch(trainer.actor, first_ratio_to="prox_logp")
    return trainer


def step(trainer: Any, read: bool = False) -> tuple[Batch, int]:
    """Makes the middle of a step; returns the batch, and the passes before the update. read: the
    step is one that may read prox_logp before it."""
    batch = Batch.from_padded(rollout(trainer.actor.engine))
    trainer.actor.engine.passes = 0
    trainer.compute_prox_logp(batch, **({} if read else {"read": False}))
    trainer.actor.compute_advantages(batch)
    passes = trainer.actor.engine.passes
    trainer.actor.ppo_update(batch)
    return batch, passes


@pytest.mark.parametrize("cls", [RLTrainer, PPOTrainer, Own])
def test_the_recipe_looks_once_and_then_saves_the_pass(cls: Any, tmp_path: Path, log: Any) -> None:
    trainer = a_trainer(cls, tmp_path)
    assert [step(trainer)[1] for _ in range(3)] == [1, 0, 0]  # the first is the self check's
    assert log == ["actor.recompute_logprob=auto: prox_logp comes from the update's own pass"]
    trainer.cfg.kl_ctl = 0.1  # as a trainer may do from step to step
    assert "kl_ctl=0.1" in trainer.reason_for_pass(read=False)
    assert [step(a_trainer(cls, tmp_path, on_failure="off"))[1]] == [0]


def test_the_recipe_makes_the_pass_for_who_may_read_it(tmp_path: Path, log: Any) -> None:
    for read, config, why in (
        (True, {}, "Own.step does not call compute_prox_logp(batch, read=False)"),
        (False, dict(ppo_n_minibatches=2), "actor.ppo_n_minibatches=2"),
    ):
        trainer = a_trainer(Own, tmp_path, **config)
        for _ in range(2):
            batch, passes = step(trainer, read)
            assert passes == 1 and "check_logp" not in batch
        line = log.pop()
        assert not log and why in line and "a pass before every update" in line
    assert step(a_trainer(RLTrainer, tmp_path, recompute_logprob=True))[1] == 1
    batch, passes = step(a_trainer(RLTrainer, tmp_path, recompute_logprob=False))
    assert passes == 0 and "prox_logp" not in batch and not log


def test_the_attribute_that_a_step_said_it_by_is_refused() -> None:
    for value in (True, False):
        with pytest.raises(TypeError, match=r"Mine\.reads_prox_logp.*read=False"):
            type("Mine", (PPOTrainer,), {"reads_prox_logp": value})


def test_the_self_check_still_sees_a_training_pass_that_differs(tmp_path: Path) -> None:
    class Wrong(Dropout, Passes):
        pass

    torch.manual_seed(0)
    with pytest.raises(SelfCheckError, match="training pass and compute_logp see different"):
        step(a_trainer(RLTrainer, tmp_path, Wrong()))
