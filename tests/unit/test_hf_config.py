"""Reading config.json: both spellings, every refusal named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megarl.models.families import FAMILIES
from megarl.models.families.grouped_query import GroupedQuery
from megarl.models.hf_config import parse_hf_config, read_hf_config, transformers_config
from megarl.models.rope import inv_freq
from megarl.models.shapes import RopeScaling
from tests.tiny import KINDS, tiny_hf

BASE: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"], vocab_size=64, hidden_size=16, intermediate_size=32,
    num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128,
)  # fmt: skip
LLAMA3: dict[str, Any] = dict(
    factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tie", (False, True))
def test_what_transformers_saves_is_read_back(kind: str, tie: bool, tmp_path: Path) -> None:
    config = tiny_hf(kind, tie=tie).config
    config.architectures = [FAMILIES[kind].architecture]
    config.save_pretrained(tmp_path)
    m = read_hf_config(tmp_path)
    assert (m.family, m.num_layers, m.hidden_size, m.intermediate_size) == (kind, 4, 64, 96)
    assert (m.attention.heads, m.attention.kv_heads, m.vocab_size) == (4, 2, 130)
    assert m.attention.head_dim == (32 if kind == "qwen3" else 16)
    assert (m.tie_word_embeddings, m.rms_norm_eps, m.max_position_embeddings) == (tie, 1e-6, 256)
    assert isinstance(m.attention, GroupedQuery)
    assert (m.attention.qkv_bias, m.attention.qk_norm) == (kind == "qwen2", kind == "qwen3")
    assert m.rope_theta == 10000.0 and m.rope_scaling is None


@pytest.mark.parametrize("kind", ["qwen3", "kimi_k2"])
def test_trainer_and_server_read_overridden_keys_alike(kind: str, tmp_path: Path) -> None:
    model = tiny_hf(kind)
    config = model.config
    config.architectures = [type(model).__name__]
    config.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": kind}))
    override = {"eos_token_id": 7, "rms_norm_eps": 0.25}
    ours = read_hf_config(tmp_path, override=override)
    theirs = transformers_config(tmp_path, override)
    assert ours.raw["eos_token_id"] == theirs.eos_token_id == 7 != config.eos_token_id
    assert ours.rms_norm_eps == theirs.rms_norm_eps == 0.25 != config.rms_norm_eps
    as_they_are = [transformers_config(tmp_path).to_dict()[k] for k in override]
    assert as_they_are == [config.to_dict()[k] for k in override]


def test_both_spellings_of_rope_say_the_same() -> None:
    old = parse_hf_config(
        {**BASE, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}
    )
    legacy = parse_hf_config(
        {**BASE, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}}
    )
    new = parse_hf_config(
        {**BASE, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}
    )
    assert old == legacy == new
    assert new.rope_theta == 5e5 and new.rope_scaling == RopeScaling(type="llama3", **LLAMA3)


@pytest.mark.parametrize(
    "rope",
    (
        dict(rope_type="default"),
        dict(rope_type="linear", factor=2.5),
        dict(rope_type="llama3", **LLAMA3),
        dict(rope_type="llama3", **{**LLAMA3, "high_freq_factor": 8.0, "factor": 3.0}),
    ),
)
def test_rotary_frequencies_equal_hf_bit_for_bit(rope: dict[str, Any]) -> None:
    params = dict(rope_theta=50000.0, **rope)
    hf = transformers.LlamaConfig(
        **{k: v for k, v in BASE.items() if k != "architectures"}, rope_parameters=params
    )
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(hf)
    ours = inv_freq(parse_hf_config({**BASE, "rope_parameters": params}))
    assert torch.equal(ours, rotary.inv_freq) and rotary.attention_scaling == 1.0


def test_missing_fields_take_hf_defaults() -> None:
    m = parse_hf_config(BASE)
    assert (m.attention.kv_heads, m.attention.head_dim, m.tie_word_embeddings) == (4, 4, False)
    qwen = {**BASE, "num_key_value_heads": 4}
    assert (
        parse_hf_config({**qwen, "architectures": ["Qwen3ForCausalLM"]}).attention.head_dim == 128
    )
    assert parse_hf_config({**qwen, "architectures": None, "model_type": "qwen2"}).family == "qwen2"
    assert parse_hf_config({**BASE, "torch_dtype": "bfloat16"}).dtype == "bfloat16"
    assert parse_hf_config({**BASE, "dtype": "bfloat16"}).dtype == "bfloat16"


def test_sliding_window_that_is_off_is_fine() -> None:
    qwen = {**BASE, "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 4}
    off = dict(sliding_window=32, use_sliding_window=False, max_window_layers=1)
    parse_hf_config({**qwen, **off})
    beyond = dict(sliding_window=32, use_sliding_window=True, max_window_layers=2)
    parse_hf_config({**qwen, **beyond})


@pytest.mark.parametrize(
    "over, words",
    (
        (dict(architectures=[None]), "architectures.*list of names"),
        (dict(architectures=[["LlamaForCausalLM"]]), "architectures.*list of names"),
        (dict(architectures=["Gemma2ForCausalLM"]), "Gemma2ForCausalLM.*supported: .*Llama"),
        (dict(architectures=["LlamaForSequenceClassification"]), "SequenceClassification"),
        (dict(hidden_act="gelu"), "hidden_act='gelu'.*silu"),
        (dict(mlp_bias=True), "mlp_bias=True"),
        (dict(attention_bias=True), "attention_bias=True"),
        (dict(attention_dropout=0.1), "attention_dropout=0.1"),
        (dict(quantization_config={"quant_method": "fp8"}), "quantization_config.*dequantise"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
        (dict(rope_scaling={"rope_type": "dynamic", "factor": 4.0}), "'dynamic'.*linear, llama3"),
        (dict(rope_scaling={"rope_type": "llama3", "factor": 4.0}), "lacks low_freq_factor"),
        (dict(rope_parameters={"full_attention": {"rope_theta": 1.0}}), "per layer type"),
        (
            dict(sliding_window=8, use_sliding_window=True, max_window_layers=1),
            "use_sliding_window=true with sliding_window=8",
        ),
        (dict(layer_types=["full_attention", "sliding_attention"]), "sliding_attention"),
        (dict(hidden_size=None), "hidden_size is missing"),
        (dict(num_hidden_layers=0), "num_hidden_layers=0"),
        (dict(num_key_value_heads=3), "num_key_value_heads=3"),
        (dict(hidden_size=18), "hidden_size=18"),
        (dict(head_dim=5), "head_dim=5 is odd"),
        (dict(dtype="float8_e4m3fn"), "float8_e4m3fn"),
    ),
)
def test_what_is_not_implemented_is_named(over: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_hf_config({**BASE, **over})


def test_a_path_without_a_readable_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json in .*hf download"):
        read_hf_config(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{oops")
    with pytest.raises(ValueError, match="not valid JSON"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="JSON object"):
        read_hf_config(tmp_path)
