"""GLM-4's configs as they are published and as transformers completes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from megarl.models.families.grouped_query import GroupedQuery
from megarl.models.hf_config import parse_hf_config, read_hf_config
from megarl.models.piece_table import build_piece_table
from megarl.models.rope import inv_freq
from megarl.parallel.layout import Layout
from megarl.planning.memory import parameters
from tests.tiny import GLM_KINDS, save_tiny

# GLM-4-9B-0414's
GLM4: dict[str, Any] = dict(
    architectures=["Glm4ForCausalLM"], attention_bias=False, attention_dropout=0.0, head_dim=128,
    hidden_act="silu", hidden_size=4096, initializer_range=0.02, intermediate_size=13696,
    max_position_embeddings=32768, model_type="glm4", num_attention_heads=32,
    num_hidden_layers=40, num_key_value_heads=2, partial_rotary_factor=0.5, rms_norm_eps=1e-05,
    rope_theta=10000.0, tie_word_embeddings=False, torch_dtype="bfloat16", vocab_size=151552,
)  # fmt: skip


def test_a_published_config() -> None:
    m = parse_hf_config(GLM4)
    assert isinstance(m.attention, GroupedQuery) and not m.attention.qkv_bias
    assert (m.family, m.attention.head_dim, m.attention.rotary_dim) == ("glm4", 128, 64)
    size = sum(t.numel for t in build_piece_table(m, Layout()).tensors)
    assert round(size / 1e9, 1) == 9.4


# GLM-4.5-Air's
AIR: dict[str, Any] = dict(
    architectures=["Glm4MoeForCausalLM"], attention_bias=True, attention_dropout=0.0, head_dim=128,
    hidden_act="silu", hidden_size=4096, initializer_range=0.02, intermediate_size=10944,
    max_position_embeddings=131072, model_type="glm4_moe", moe_intermediate_size=1408,
    norm_topk_prob=True, num_attention_heads=96, n_group=1, topk_group=1, n_routed_experts=128,
    n_shared_experts=1, routed_scaling_factor=1.0, num_experts_per_tok=8, first_k_dense_replace=1,
    num_hidden_layers=46, num_key_value_heads=8, num_nextn_predict_layers=1,
    partial_rotary_factor=0.5, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=1000000,
    tie_word_embeddings=False, torch_dtype="bfloat16", use_qk_norm=False, vocab_size=151552,
)  # fmt: skip


def test_glm_45_has_its_published_size() -> None:
    """Its model card has 106B parameters, 12B of them per token; here the embedding counts."""
    m = parse_hf_config(AIR)
    assert isinstance(m.attention, GroupedQuery) and m.moe is not None
    assert m.attention.qkv_bias and not (m.attention.qk_norm or m.attention.interleaved)
    assert (m.attention.rotary_dim, m.mtp_layers, m.moe.dense_layers) == (64, 1, (0,))
    total, active = parameters(m)
    active -= m.vocab_size * m.hidden_size
    assert (total, active) == (pytest.approx(106e9, rel=0.01), pytest.approx(12e9, rel=0.07))


@pytest.mark.parametrize("kind, name", (("glm", "Glm"), ("glm4", "Glm4")))
def test_missing_fields_take_hf_defaults(kind: str, name: str) -> None:
    left_out = ("attention_bias", "head_dim", "rms_norm_eps", "partial_rotary_factor")
    raw = {k: v for k, v in GLM4.items() if k not in left_out}
    m = parse_hf_config({**raw, "architectures": [f"{name}ForCausalLM"]})
    hf = getattr(transformers, f"{name}Config")()
    factor = hf.rope_parameters["partial_rotary_factor"]
    assert isinstance(m.attention, GroupedQuery)
    assert m.family == kind and m.attention.rotary_dim == int(hf.head_dim * factor)
    assert (m.attention.head_dim, m.rms_norm_eps, m.attention.qkv_bias) == (
        hf.head_dim, hf.rms_norm_eps, hf.attention_bias,
    )  # fmt: skip


@pytest.mark.parametrize(
    "rope",
    (
        {},
        dict(partial_rotary_factor=0.25),
        dict(rope_parameters=dict(rope_type="default", rope_theta=500.0)),
        dict(
            partial_rotary_factor=0.75,
            rope_parameters=dict(rope_type="linear", factor=2.5, partial_rotary_factor=0.25),
        ),
    ),
    ids=("default", "beside", "without", "within"),
)
def test_rotary_frequencies_equal_hf_bit_for_bit(rope: dict[str, Any]) -> None:
    raw = {k: v for k, v in GLM4.items() if k != "partial_rotary_factor"} | rope
    hf = transformers.Glm4Config(**{k: v for k, v in raw.items() if k != "architectures"})
    rotary = transformers.models.glm4.modeling_glm4.Glm4RotaryEmbedding(hf)
    assert torch.equal(inv_freq(parse_hf_config(raw)), rotary.inv_freq)


@pytest.mark.parametrize("kind", GLM_KINDS)
@pytest.mark.parametrize("bias", (False, True))
def test_names_and_shapes_are_those_transformers_saves(
    kind: str, bias: bool, tmp_path: Path
) -> None:
    save_tiny(tmp_path, kind, attention_bias=bias)
    with safe_open(tmp_path / "model.safetensors", "pt") as f:
        want = {n: tuple(f.get_slice(n).get_shape()) for n in f.keys()}  # noqa: SIM118
    table = build_piece_table(read_hf_config(tmp_path), Layout(tp=2, pp=2))
    assert {t.name: t.shape for t in table.tensors} == want


@pytest.mark.parametrize(
    "over, words",
    (
        (dict(partial_rotary_factor=0.51), "partial_rotary_factor=0.51 of head_dim=128"),
        (dict(partial_rotary_factor=0.0), "partial_rotary_factor=0.0"),
        (dict(partial_rotary_factor=1.5), "partial_rotary_factor=1.5"),
        (dict(partial_rotary_factor="half"), "partial_rotary_factor='half'"),
        (dict(rope_scaling={"type": "dynamic", "factor": 4.0}), "'dynamic'.*linear, llama3"),
        (dict(hidden_act="gelu"), "hidden_act='gelu'"),
        (dict(attention_dropout=0.1), "attention_dropout=0.1"),
        (dict(architectures=["ChatGLMModel"]), "ChatGLMModel.*GlmForCausalLM"),
    ),
)
def test_what_is_not_implemented_is_named(over: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_hf_config({**GLM4, **over})
