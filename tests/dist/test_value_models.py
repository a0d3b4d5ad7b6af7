"""Value models equal Hugging Face's: values, gradients, three AdamW steps, directories."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T

from megarl.algos import Critic, RewardModel, critic_loss, token_weight
from megarl.api.records import FinetuneSpec, SaveLoadMeta
from megarl.config.algo import PPOCriticConfig, ValueModelConfig
from megarl.config.engine import MicroBatchSpec, OptimizerConfig
from megarl.config.parallel import ParallelConfig
from megarl.models import read_hf_config
from tests.dist.engine_jobs import OPTIMIZER, Tensors, state
from tests.dist.world import World
from tests.tiny import random_batch, save_tiny, tiny_hf

SP = dict(tp=2, sequence_parallel=True)
STEPS = 3
# processes, family, the causal model's head is tied, HF class of the value model, layout
CASES = [
    (1, "qwen3", True, "Token", dict()),
    (1, "llama", False, "Sequence", dict()),
    (2, "qwen2", True, "Token", dict(tp=2)),
    (2, "qwen3", True, "Token", SP),
    (2, "llama", False, "Sequence", SP),
    (2, "qwen2", True, "Sequence", dict(pp=2)),
    (2, "qwen3", False, "Token", dict(pp=2)),
    (2, "llama", True, "Token", dict()),  # dp2
    (2, "llama", False, "Token", dict(cp=2)),
    (2, "qwen2", False, "Sequence", dict(pp=2, vpp=2)),
]


def value_hf(kind: str, tie: bool, head: str) -> Any:
    """A random value model over tiny_hf's transformer, its score far from zero."""
    causal = tiny_hf(kind, tie=tie)
    cls = getattr(T, type(causal).__name__.replace("CausalLM", f"{head}Classification"))
    config = causal.config
    config.num_labels, config.pad_token_id = 1, 0
    model = cls(config).float().eval()
    model.model.load_state_dict(causal.model.state_dict())
    torch.manual_seed(7)
    with torch.no_grad():
        model.score.weight.normal_(std=0.2)
        if head == "Token":
            model.score.bias.fill_(0.3)
    return model


def save_value_model(root: Path, kind: str, tie: bool, head: str) -> str:
    path = root / f"{kind}-{tie}-{head}"
    if not path.exists():
        value_hf(kind, tie, head).save_pretrained(path)
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


def run_all(path: str, parallel: dict[str, Any], **over: Any) -> dict[str, Any]:
    engine = make_engine(path, parallel, **over)
    b, kw = batch(), dict(outputs=("values",))
    result: dict[str, Any] = {"values": engine.forward(b, **kw)}
    b2 = {k: b[k] for k in ("input_ids", "attention_mask")}
    Critic(engine.config, engine).compute_values(b2)
    result["critic"], result["last_value"] = b2["values"], b2["last_value"]
    result["scores"] = RewardModel(engine).compute_rewards(b)
    if not engine.config.optimizer.distributed:
        engine.backward_batch(b, critic_loss, token_weight, **kw)
        result["grads"] = state(engine, grads=True)
    result["stats"] = [engine.train_batch(b, critic_loss, token_weight, **kw) for _ in range(STEPS)]
    result["weights"] = state(engine)
    engine.destroy()
    return result


def hf_values(model: Any, b: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """values [B,S] and last_value [B] of the contract from HF's score of every token."""
    mask = b["attention_mask"]
    hidden = model.model(b["input_ids"], attention_mask=mask.long()).last_hidden_state
    score = model.score(hidden)[..., 0]
    values = torch.nn.functional.pad(score[:, :-1], (1, 0)).where(mask, 0.0)
    return values, score.gather(1, mask.sum(1, keepdim=True) - 1)[:, 0]


@cache
def reference(kind: str, tie: bool, head: str) -> dict[str, Any]:
    """What `run_all` should give, from HF's model, autograd and torch's AdamW."""
    model, b = value_hf(kind, tie, head), batch()
    values, last = hf_values(model, b)
    result: dict[str, Any] = {"values": values.detach(), "last_value": last.detach(), "stats": []}
    params = dict(model.named_parameters())
    groups = [
        {"params": [p for p in params.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=OPTIMIZER["lr"], betas=(0.9, 0.95), eps=OPTIMIZER["eps"])
    for step in range(STEPS):
        adam.zero_grad()
        loss_sum, _ = critic_loss({"values": hf_values(model, b)[0]}, b)
        loss = loss_sum / token_weight(b)
        loss.backward()
        if step == 0:
            result["grads"] = {n: p.grad.clone() for n, p in params.items()}
        norm = float(torch.nn.utils.clip_grad_norm_(params.values(), 1.0))
        result["stats"].append({"loss": float(loss.detach()), "grad_norm": norm})
        adam.step()
    result["weights"] = {n: p.detach().clone() for n, p in params.items()}
    return result


@pytest.fixture(scope="module")
def worlds():
    open_: dict[int, World] = {}
    yield lambda n: open_.setdefault(n, World(n))
    for world in open_.values():
        world.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def name(case: tuple[Any, ...]) -> str:
    n, kind, tie, head, parallel = case
    layout = "".join(f"{k[:2]}{int(v)}" for k, v in parallel.items()) or "dp"
    return f"{n}-{kind}-{'tied' if tie else 'untied'}-{head}-{layout}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_value_model_equals_hugging_face(case, worlds, models):
    n, kind, tie, head, parallel = case
    ranks = worlds(n).run(run_all, save_value_model(models, kind, tie, head), parallel)
    got, want = ranks[0], reference(kind, tie, head)
    for key in ("values", "critic"):
        torch.testing.assert_close(got[key], want["values"], rtol=0, atol=1e-4, msg=key)
    for key in ("last_value", "scores"):
        torch.testing.assert_close(got[key], want["last_value"], rtol=0, atol=1e-4, msg=key)
    for mine, theirs in zip(got["stats"], want["stats"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=2e-4)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-4)
    assert got["grads"].keys() == want["grads"].keys() == got["weights"].keys()
    for key, value in want["grads"].items():
        assert (got["grads"][key] - value).norm() <= 1e-4 * value.norm(), key
    for key, value in want["weights"].items():
        torch.testing.assert_close(got["weights"][key], value, rtol=0, atol=2e-5, msg=key)
    for other in ranks[1:]:
        assert other["stats"] == got["stats"]
        assert torch.equal(other["last_value"], got["last_value"])


def test_sequence_scores_are_those_of_hugging_face(worlds, models):
    """A reward model's score is what ForSequenceClassification answers."""
    b = {k: random_batch()[k] for k in ("input_ids", "attention_mask")}
    b["input_ids"] = b["input_ids"].clamp(min=3) * b["attention_mask"]
    path = save_value_model(models, "llama", False, "Sequence")
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


FULL = pytest.mark.full


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(SP, id="sp2"),
        pytest.param(dict(pp=2), id="pp2", marks=FULL),
        pytest.param(dict(), id="dp2", marks=FULL),
    ],
)
def test_the_step_does_not_depend_on_micro_batching(parallel, worlds, models):
    path = save_value_model(models, "qwen3", True, "Token")
    over = dict(optimizer={"distributed": True})
    one, *others = (
        worlds(2).run(run_all, path, parallel, max_tokens=budget, **over)[0]
        for budget in (10**6, 33, 1)
    )
    for other in others:
        assert other["stats"][0]["loss"] == pytest.approx(one["stats"][0]["loss"], rel=1e-5)
        for key, value in one["weights"].items():
            difference = (other["weights"][key] - value).norm()
            assert difference <= 1e-5 * value.norm() + 1e-6, key


def new_head(source: str, target: str, init: str) -> dict[str, Any]:
    """A value model from a language model, a step, both kinds of saves and back."""
    from megarl.engine import MegatronEngine

    engine = make_engine(source, SP, value_head_init=init)
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
        MegatronEngine(type(engine.config)(path=target, head="lm")).initialize()
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


def test_several_labels_are_refused(tmp_path):
    config = tiny_hf("llama").config.to_dict() | {"architectures": ["LlamaForTokenClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"id2label": {"0": "a", "1": "b"}}))
    with pytest.raises(ValueError, match="LlamaForTokenClassification with 2 labels"):
        read_hf_config(tmp_path, head="value")
