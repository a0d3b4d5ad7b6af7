"""Value models: their values and scores, their making from language models, their directories.
(invariance.py's table compares their training with Hugging Face's.)
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T

from megarl.algos import Critic, RewardModel, critic_loss, token_weight
from megarl.api.records import FinetuneSpec, SaveLoadMeta
from megarl.config.algo import PPOCriticConfig, RewardModelConfig, ValueModelConfig
from megarl.config.engine import MicroBatchSpec, OptimizerConfig, ParallelConfig
from megarl.models.hf_config import read_hf_config
from tests.dist.engine_jobs import OPTIMIZER, Tensors, state
from tests.dist.reference import hf_model, hf_values
from tests.tiny import random_batch, save_tiny, tiny_hf

SP = dict(tp=2, sequence_parallel=True)
# processes, family, the causal model's head is tied, layout
CASES = [
    (2, "qwen3", True, SP),
    (2, "qwen2", True, dict(pp=2)),
    (2, "llama", False, dict(cp=2)),
]


def save_value_model(root: Path, kind: str, tie: bool) -> str:
    path = root / f"{kind}-{tie}"
    if not path.exists():
        hf_model(kind, tie=tie, head="value").save_pretrained(path)
    return str(path)


def batch() -> Tensors:
    b = dict(random_batch(n=7, seed=3))
    g = torch.Generator().manual_seed(5)
    shape = b["input_ids"].shape
    b["values"], b["returns"] = torch.randn(shape, generator=g), torch.randn(shape, generator=g)
    return b


def make_engine(path: str, parallel: dict[str, Any], **over: Any) -> Any:
    from megarl.engine import MegatronEngine

    optimizer = {**OPTIMIZER, "distributed": False, **over.pop("optimizer", {})}
    cfg = PPOCriticConfig(
        path=path, parallel=ParallelConfig(**parallel), optimizer=OptimizerConfig(**optimizer),
        mb_spec=MicroBatchSpec(max_tokens_per_mb=over.pop("max_tokens", 40)), **over,
    )  # fmt: skip
    engine = MegatronEngine(cfg)
    engine.initialize(None, FinetuneSpec(total_train_epochs=1, dataset_size=8, train_batch_size=1))
    return engine


def run_roles(path: str, parallel: dict[str, Any]) -> Tensors:
    """Returns the critic's values and the reward model's scores."""
    engine = make_engine(path, parallel)
    b = {k: batch()[k] for k in ("input_ids", "attention_mask")}
    Critic(engine.config, engine).compute_values(b)
    scores = RewardModel(ValueModelConfig(), engine).compute_rewards(batch())
    engine.destroy()
    return {"values": b["values"], "last_value": b["last_value"], "scores": scores}


@pytest.mark.parametrize(
    ("n", "kind", "tie", "parallel"),
    [*CASES, (2, "deepseek_v3", False, SP)],
    ids=("sp", "pp2", "cp2", "latent"),
)
def test_values_and_scores_are_those_of_hugging_face(n, kind, tie, parallel, worlds, models):
    values, last = hf_values(hf_model(kind, tie=tie, head="value"), batch())
    for got in worlds(n).run(run_roles, save_value_model(models, kind, tie), parallel):
        torch.testing.assert_close(got["values"], values.detach(), rtol=0, atol=1e-5)
        for name in ("last_value", "scores"):
            torch.testing.assert_close(got[name], last.detach(), rtol=0, atol=1e-5, msg=name)


def test_sequence_scores_are_those_of_hugging_face(worlds, models):
    """A reward model's score is that of HF's ForSequenceClassification."""
    b = {k: random_batch()[k] for k in ("input_ids", "attention_mask")}
    b["input_ids"] = b["input_ids"].clamp(min=3) * b["attention_mask"]
    path = save_value_model(models, "llama", False)
    model = T.AutoModelForSequenceClassification.from_pretrained(path).eval()
    want = model(b["input_ids"], attention_mask=b["attention_mask"].long()).logits[:, 0]
    got = worlds(2).run(score, path, b, SP)[0]
    torch.testing.assert_close(got, want.detach(), rtol=0, atol=1e-4)


def score(path: str, b: Tensors, parallel: dict[str, Any]) -> torch.Tensor:
    from megarl.trainer.roles import MegatronRewardModel

    role = MegatronRewardModel(ValueModelConfig(path=path, parallel=ParallelConfig(**parallel)))
    role.initialize(None, None)
    rewards = role.compute_rewards(b)
    role.destroy()
    return rewards


def new_head(source: str, target: str, init: str) -> dict[str, Any]:
    """Makes a value model from a language model, trains it, saves both formats and loads them."""
    from megarl.config.engine import TrainEngineConfig
    from megarl.engine import MegatronEngine

    engine = make_engine(source, SP, options=dict(value_head_init=init))
    result = {"before": state(engine), "values": engine.forward(batch(), outputs=("values",))}
    engine.train_batch(batch(), critic_loss, token_weight, outputs=("values",))
    result["after"], result["trained"] = state(engine), engine.forward(batch(), outputs=("values",))
    engine.save(SaveLoadMeta(path=target, base_model_path=source))
    dist = SaveLoadMeta(path=f"{target}-dist", weight_format="dist", with_optim=True)
    engine.save(dist)
    engine.train_batch(batch(), critic_loss, token_weight, outputs=("values",))
    result["second"] = state(engine)
    engine.destroy()

    again = make_engine(source, dict(pp=2))  # another layout
    again.load(dist)
    again.train_batch(batch(), critic_loss, token_weight, outputs=("values",))
    result["resumed"] = state(again)
    again.load(SaveLoadMeta(path=target))
    result["reloaded"] = state(again)
    with pytest.raises(ValueError, match=r"'logprobs' needs another head; this engine \(head=val"):
        again.forward(batch())
    again.destroy()
    with pytest.raises(ValueError, match=r"Qwen3ForTokenClassification.*not supported"):
        MegatronEngine(TrainEngineConfig(path=target, head="lm")).initialize()
    return result


@pytest.mark.parametrize(("tie", "init"), [(True, "random"), (False, "zero")])
def test_a_language_model_becomes_a_value_model(init, tie, worlds, tmp_path):
    source, target = str(save_tiny(tmp_path / "lm", "qwen3", tie=tie)), tmp_path / "value"
    got = worlds(2).run(new_head, source, str(target), init)[0]
    assert set(got["before"]) - set(tiny_hf("qwen3", tie=tie).state_dict()) == {
        "score.weight", "score.bias"
    }  # fmt: skip
    assert not got["before"]["score.bias"].any()
    assert got["before"]["score.weight"].any() == got["values"].any() == (init == "random")
    model = T.AutoModelForTokenClassification.from_pretrained(target).eval()
    assert type(model).__name__ == "Qwen3ForTokenClassification" and model.num_labels == 1
    values, _ = hf_values(model, batch())
    torch.testing.assert_close(got["trained"], values.detach(), rtol=0, atol=1e-4)
    assert read_hf_config(target, head="value").score_bias
    assert json.loads((target / "config.json").read_text())["tie_word_embeddings"] == tie
    for key, value in got["after"].items():
        assert torch.equal(got["reloaded"][key], value), key
        torch.testing.assert_close(got["resumed"][key], got["second"][key], rtol=0, atol=2e-5)


def learn_to_score(source: str, target: str) -> dict[str, Any]:
    """Trains a reward model of a language model on pairs, saves it, and scores with the directory,
    as recipe rm and a run with reward_model do."""
    from megarl.trainer.roles import MegatronRewardLearner

    parallel = ParallelConfig(**SP)
    spec = FinetuneSpec(total_train_epochs=1, dataset_size=8, train_batch_size=1)
    config = RewardModelConfig(
        path=source, parallel=parallel, optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.0)
    )
    learner = MegatronRewardLearner(config)
    learner.initialize(None, spec)
    stats = [learner.train(pairs()) for _ in range(6)]
    learner.save(SaveLoadMeta(path=target, base_model_path=source))
    learner.destroy()
    return {"stats": stats, "scores": score(target, pairs(), dict(pp=2))}


def pairs() -> Tensors:
    b = dict(random_batch(n=6, seed=3))
    b["input_ids"] = b["input_ids"].clamp(min=3) * b["attention_mask"]
    b["group_ids"] = torch.tensor([4, 0, 9, 9, 0, 4])
    b["unit_ids"] = b["group_ids"].clone()
    b["chosen"] = torch.tensor([True, True, True, False, False, False])
    return b


def test_a_reward_model_scores_elsewhere_what_it_learned_here(worlds, tmp_path):
    source, target = str(save_tiny(tmp_path / "lm", "llama")), tmp_path / "rm"
    got = worlds(2).run(learn_to_score, source, str(target))[0]
    first, last = got["stats"][0], got["stats"][-1]
    assert first["loss"] == pytest.approx(math.log(2.0)) and first["accuracy"] == 0.5
    assert last["accuracy"] == 1.0 and last["margin"] > 0.1
    model = T.AutoModelForSequenceClassification.from_pretrained(target).eval()
    b = pairs()
    want = model(b["input_ids"], attention_mask=b["attention_mask"].long()).logits[:, 0].detach()
    torch.testing.assert_close(got["scores"], want, rtol=0, atol=1e-4)
    assert (want[:3] > want[[5, 4, 3]]).all()
    found = read_hf_config(target, head="value")  # a run with reward_model looks at this
    assert not found.new_head and not found.score_bias


def test_several_labels_are_refused(tmp_path):
    config = tiny_hf("llama").config.to_dict() | {"architectures": ["LlamaForTokenClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"id2label": {"0": "a", "1": "b"}}))
    with pytest.raises(ValueError, match="LlamaForTokenClassification with 2 labels"):
        read_hf_config(tmp_path, head="value")
