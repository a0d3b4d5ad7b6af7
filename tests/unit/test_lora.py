"""LoRA's declarations and checks: no process group, no model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.config.check import check_config
from megarl.config.engine import LoRAConfig
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.models.hf_config import ModelConfig, parse_hf_config
from megarl.models.lora import (
    adapter_config,
    adapter_table,
    check_adapter_config,
    check_lora,
    resolve_targets,
    scale,
)
from megarl.parallel.layout import Layout
from megarl.trainer.preflight import check_models
from tests.hf_stub import write_stub

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)


def model(architecture: str, **over: Any) -> ModelConfig:
    raw: dict[str, Any] = dict(
        architectures=[architecture + "ForCausalLM"], vocab_size=130, hidden_size=16,
        intermediate_size=24, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        head_dim=4, max_position_embeddings=64,
    )  # fmt: skip
    return parse_hf_config({**raw, **over})


def lora(*targets: str, **over: Any) -> LoRAConfig:
    return LoRAConfig(r=3, alpha=6.0, target_modules=list(targets or ("all-linear",)), **over)


def mixtral() -> ModelConfig:
    return model("Mixtral", num_local_experts=4, num_experts_per_tok=2)


def test_targets_are_hugging_faces_modules() -> None:
    dense = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
    for architecture in ("Llama", "Qwen2", "Qwen3"):
        assert resolve_targets(model(architecture), lora()) == dense
    assert resolve_targets(mixtral(), lora()) == (*ATTENTION, "w1", "w3", "w2")
    assert resolve_targets(model("Qwen3"), lora("v_proj", "q_proj")) == ("q_proj", "v_proj")
    for name in ("qkv_proj", "lm_head", "embed_tokens", "all-linear2"):
        with pytest.raises(ValueError, match=f"no linear layer '{name}'; use q_proj, k_proj"):
            resolve_targets(model("Qwen3"), lora("q_proj", name))


def test_routers_gates_embeddings_and_heads_have_no_adapters() -> None:
    names = [t.name for t in adapter_table(model("Qwen3Moe", **MOE), Layout(), lora()).tensors]
    assert len(names) == 4 * 2 * (4 + 4 * 3)
    assert not any("mlp.gate." in n or "embed" in n or "lm_head" in n for n in names)
    prefix = "base_model.model.model.layers.3"
    assert f"{prefix}.self_attn.k_proj.lora_A.weight" in names
    assert f"{prefix}.mlp.experts.2.down_proj.lora_B.weight" in names


LAYOUTS = [
    Layout(),
    Layout(tp=2, pp=2),
    Layout(tp=8),
    Layout(pp=2, vpp=2, dp=2),
    Layout(tp=2, ep=2, etp=1),
    Layout(tp=2, ep=1, etp=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_element_has_one_owner_in_every_layout(layout: Layout) -> None:
    """build_piece_table checks coverage itself; shapes are those of PEFT's files."""
    for m in (model("Qwen2"), model("Qwen3Moe", **MOE)):
        for cfg in (lora(), lora("o_proj", "gate_proj")):
            shapes = {t.name: t.shape for t in adapter_table(m, layout, cfg).tensors}
            layer = "base_model.model.model.layers.1.self_attn.o_proj.lora_"
            assert shapes[f"{layer}A.weight"] == (3, 32)
            assert shapes[f"{layer}B.weight"] == (16, 3)


def test_ranks_that_share_a_key_value_head_hold_equal_rows_or_none() -> None:
    m = model("Qwen3")
    check_lora(m, 2, lora("q_proj", "v_proj"))
    check_lora(m, 4, lora(*ATTENTION))
    check_lora(m, 4, lora("o_proj", "up_proj"))
    with pytest.raises(ValueError, match="only part of q_proj, k_proj, v_proj, which tp=4"):
        check_lora(m, 4, lora("q_proj", "v_proj"))


def test_scale() -> None:
    assert scale(LoRAConfig(r=16, alpha=32)) == 2
    assert scale(LoRAConfig(r=16, alpha=32, use_rslora=True)) == 8


def test_adapters_of_another_kind_are_refused() -> None:
    m, cfg = model("Qwen3"), lora()
    good = adapter_config(m, cfg, "base")
    check_adapter_config(good, cfg, "f")
    check_adapter_config({k: good[k] for k in ("peft_type", "r", "lora_alpha")}, cfg, "f")
    for key, value, words in (
        ("peft_type", "IA3", "peft_type='IA3'"),
        ("use_dora", True, "merge_and_unload"),
        ("bias", "all", "merge_and_unload"),
        ("rank_pattern", {"q_proj": 8}, "merge_and_unload"),
        ("r", 8, "set lora.r"),
        ("lora_alpha", 1, "set lora.alpha"),
        ("use_rslora", True, "set lora.use_rslora"),
    ):
        with pytest.raises(ValueError, match=f"^f: .*{words}"):
            check_adapter_config({**good, key: value}, cfg, "f")


# ---- checks at the start


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stub(tmp_path_factory.mktemp("lora"))


def sft(path: Path, *overrides: str) -> Any:
    base = ["recipe=sft", f"model.path={path}", "model.optimizer.lr=1e-3"]
    return load_config(None, [*base, *overrides])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.lora.r=0", "model.lora.r=0: must be > 0"),
        ("model.lora.alpha=0", "model.lora.alpha=0"),
        ("model.lora.target_modules=[]", "use [all-linear]"),
        ("model.lora.target_modules=[all-linear,q_proj]", "all-linear stands alone"),
        ("model.lora.adapter_path=/nowhere", "no adapter_config.json there"),
        ("model.lora.save=both", "merged"),
    ],
)
def test_problem_is_named(saved: Path, override: str, words: str) -> None:
    check_config(sft(saved, "model.lora={}"), 1)
    with pytest.raises(ConfigError) as caught:
        check_config(sft(saved, override), 1)
    (problem,) = caught.value.problems
    assert words in problem


def test_targets_are_checked_against_the_model(saved: Path) -> None:
    check_models(sft(saved, "model.lora={}"))
    with pytest.raises(
        ConfigError, match=r"model: lora\.target_modules: .*no linear layer 'c_attn'"
    ):
        check_models(sft(saved, "model.lora.target_modules=[c_attn]"))


def test_declarations_need_neither_torch_nor_megatron() -> None:
    code = "import sys, megarl.models.lora; assert not {'torch', 'megatron'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
