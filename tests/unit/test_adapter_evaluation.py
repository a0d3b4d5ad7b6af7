"""`megarl eval` of a PEFT adapter: the model that is evaluated is PEFT's merged one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from megarl.ckpt.peft import merge_peft
from megarl.cli import evaluate
from megarl.config.errors import ConfigError
from megarl.trainer import evaluation

TOKENS = torch.tensor([[3, 17, 5, 29, 11, 2]])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path: Path = tmp_path_factory.mktemp("base")
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, vocab_size=40)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(path, max_shard_size="10KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


def adapter_of(base: Path, path: Path, **keys: object) -> Path:
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **keys)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for name, weight in model.named_parameters():
        if "lora_B" in name:  # as trained ones, times 30
            weight.data.normal_(std=0.6)
    model.save_pretrained(path)
    return path


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The logits of every model that is handed to an evaluation."""
    found: list[torch.Tensor] = []

    def evaluate_model(cfg, model, datasets, *, logs):
        logs.mkdir(parents=True, exist_ok=True)
        found.append(logits(AutoModelForCausalLM.from_pretrained(model)))
        return {name: {"failed": 0.0} for name in datasets}, []

    monkeypatch.setattr(evaluation, "evaluate_model", evaluate_model)
    return found


@pytest.mark.parametrize("keys", [{}, {"use_rslora": True}], ids=["plain", "rslora"])
def test_an_adapter_is_evaluated_as_pefts_merged_model(base, tmp_path, evaluated, keys) -> None:
    adapter = adapter_of(base, tmp_path / "adapter", **keys)
    plain = AutoModelForCausalLM.from_pretrained(base)
    without = logits(plain)
    merged = logits(PeftModel.from_pretrained(plain, adapter).merge_and_unload())
    assert (merged - without).abs().max() > 0.1
    of_base = [str(base), "--datasets", "arithmetic", f"actor.lora.adapter_path={adapter}"]
    for i, line in enumerate(([str(adapter), "--datasets", "arithmetic"], of_base)):
        out = tmp_path / f"out{i}"
        assert evaluate.main([*line, "--out", str(out)]) == 0
        torch.testing.assert_close(evaluated[-1], merged, rtol=0, atol=1e-5)
        assert json.loads((out / "results.json").read_text())["model"] == str(adapter)
        assert not list(out.glob("merged*"))
    assert evaluate.main([str(base), "--datasets", "arithmetic", "--out", f"{tmp_path}/b"]) == 0
    torch.testing.assert_close(evaluated[-1], without, rtol=0, atol=1e-5)


def test_an_adapter_that_cannot_be_merged_evaluates_nothing(base, tmp_path, evaluated) -> None:
    adapter = adapter_of(base, tmp_path / "adapter")
    line = [str(adapter), "--datasets", "arithmetic", "--out", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match=r"rollout\.addresses"):
        evaluate.main([*line, "rollout.addresses=[127.0.0.1:9]"])
    config = json.loads((adapter / "adapter_config.json").read_text())
    for wrong in ({"base_model_name_or_path": "org/elsewhere"}, {"use_dora": True}):
        (adapter / "adapter_config.json").write_text(json.dumps(config | wrong))
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            evaluate.main(line)
    assert evaluated == []


def test_a_tensor_without_a_weight_is_named(base, tmp_path) -> None:
    adapter = adapter_of(base, tmp_path / "adapter", modules_to_save=["lm_head"])
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=r"tensor .*lm_head"):
        merge_peft(base, adapter, tmp_path / "out")
