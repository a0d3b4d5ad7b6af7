"""gpt-oss's config.json: published sizes, YaRN, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megarl.config.engine import MicroBatchSpec, ParallelConfig, TrainEngineConfig
from megarl.engine.setup import resolve
from megarl.models.hf_config import ModelConfig, check_layout, parse_hf_config
from megarl.models.params import draw
from megarl.models.piece_table import build_piece_table
from megarl.models.rope import inv_freq
from megarl.parallel.layout import Layout
from megarl.planning.memory import parameters
from tests.tiny import tiny_hf

# gpt-oss-20b's as on the hub, dequantised
YARN: dict[str, Any] = dict(
    beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096,
    rope_type="yarn", truncate=False,
)  # fmt: skip
OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True,
    "attention_dropout": 0.0, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02,
    "intermediate_size": 2880, "max_position_embeddings": 131072, "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "rms_norm_eps": 1e-05, "rope_scaling": YARN, "rope_theta": 150000,
    "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "vocab_size": 201088, "layer_types": ["sliding_attention", "full_attention"] * 12,
}  # fmt: skip


def read(**over: Any) -> ModelConfig:
    return parse_hf_config({**OSS, **over})


def test_the_published_models_have_their_published_sizes() -> None:
    """The model card (2025, arXiv 2508.10925) has 20.91B and 116.83B parameters, of which a token
    meets 3.61B and 5.13B; those leave the embedding out."""
    m = read()
    a = m.attention
    assert (a.heads, a.kv_heads, a.head_dim, a.window, a.sinks) == (64, 8, 64, 128, True)
    assert a.window_layers == tuple(range(0, 24, 2))
    assert m.moe is not None and (m.moe.bias, m.moe.limit, m.moe.top_k) == (True, 7.0, 4)
    large = read(num_hidden_layers=36, num_local_experts=128, layer_types=None)
    for model, total, active in ((m, 20.91e9, 3.61e9), (large, 116.83e9, 5.13e9)):
        found = parameters(model)
        embedding = model.vocab_size * model.hidden_size
        assert found[0] == pytest.approx(total, rel=1e-3)
        assert found[1] - embedding == pytest.approx(active, rel=1e-2)


def test_names_and_shapes_are_those_that_transformers_saves() -> None:
    hf = tiny_hf("gpt_oss")
    raw = {**hf.config.to_dict(), "architectures": ["GptOssForCausalLM"]}
    for layout in (Layout(), Layout(tp=2, ep=2), Layout(tp=2, pp=2, vpp=2, ep=2), Layout(cp=2)):
        table = build_piece_table(parse_hf_config(raw), layout)
        saved = {n: tuple(x.shape) for n, x in hf.state_dict().items()}
        assert {t.name: t.shape for t in table.tensors} == saved


def test_random_weights_are_drawn_as_hugging_face_draws_them() -> None:
    hf = transformers.GptOssForCausalLM(tiny_hf("gpt_oss", layers=1).config)
    raw = {**hf.config.to_dict(), "architectures": ["GptOssForCausalLM"]}
    for t in build_piece_table(parse_hf_config(raw), Layout()).tensors:
        want, got = hf.state_dict()[t.name], draw(t, 0, 0.02)
        if want.unique().numel() == 1:
            assert torch.equal(got, want), t.name
        elif want.numel() > 100:
            assert float(got.std()) == pytest.approx(float(want.std()), rel=0.3), t.name
        else:
            assert t.name.endswith(("sinks", "router.bias")) and 0 < float(got.abs().max()) < 0.1


@pytest.mark.parametrize(
    "over",
    (
        {},
        dict(factor=4.0, beta_fast=16.0, beta_slow=2.0),
        dict(original_max_position_embeddings=32),
        dict(truncate=True),
        dict(rope_type="default"),
    ),
)
def test_frequencies_are_hugging_faces_to_the_bit(over: dict[str, Any]) -> None:
    hf = tiny_hf("gpt_oss", layers=1, rope_parameters={**YARN, "rope_theta": 1e4, **over})
    raw = {**hf.config.to_dict(), "architectures": ["GptOssForCausalLM"]}
    assert torch.equal(inv_freq(parse_hf_config(raw)), hf.model.rotary_emb.inv_freq)


@pytest.mark.parametrize(
    "over, words",
    (
        (dict(attention_bias=False), "attention_bias=False.*True"),
        (dict(swiglu_alpha=1.0), r"swiglu_alpha=1\.0.*1\.702"),
        (dict(swiglu_limit=0), "swiglu_limit=0.*positive"),
        (dict(swiglu_limit="7"), "swiglu_limit='7'"),
        (dict(hidden_act="gelu"), "hidden_act='gelu'.*'silu'"),
        (dict(attention_dropout=0.1), r"attention_dropout=0\.1"),
        (dict(num_experts_per_tok=33), "num_experts_per_tok=33"),
        (dict(num_experts_per_tok=1), "num_experts_per_tok=1"),
        (dict(num_local_experts=None), "num_local_experts"),
        (dict(sliding_window=None), "sliding_window is missing"),
        (dict(layer_types=["chunked_attention"] * 24), r"layer_types contains.*chunked_attention"),
        (dict(layer_types=["full_attention"]), "expected a list of 24 types"),
        (dict(rope_scaling={"rope_type": "linear", "factor": 2}), "'linear'.*yarn"),
        (dict(rope_scaling={**YARN, "attention_factor": 0}), "attention_factor=0; expected"),
        (dict(rope_scaling={**YARN, "truncate": "no"}), "truncate='no'"),
        (dict(rope_scaling={**YARN, "factor": None}), "lacks factor"),
        (dict(quantization_config={"quant_method": "mxfp4"}), "quantization_config.*dequantise"),
    ),
)
def test_what_is_not_implemented_is_named(over: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(**over)


def test_experts_with_biases_are_not_cut() -> None:
    m = read()
    check_layout(m, ParallelConfig(tp=8, sequence_parallel=True, pp=4, ep=8))
    with pytest.raises(ValueError, match=r"parallel\.etp=2.*biases.*parallel\.etp=1"):
        check_layout(m, ParallelConfig(etp=2))


def test_sinks_share_no_prefixes(tmp_path: Path) -> None:
    config = {**OSS, "layer_types": ["full_attention"] * 24, "sliding_window": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    cfg = TrainEngineConfig(path=str(tmp_path), mb_spec=MicroBatchSpec(share_prefixes="true"))
    with pytest.raises(ValueError, match=r"mb_spec\.share_prefixes=true: .* sinks.*=false"):
        resolve(cfg, 1)
    assert resolve(replace(cfg, mb_spec=MicroBatchSpec(share_prefixes="auto")), 1).sharing is None


def test_layers_without_a_window_keep_their_sinks() -> None:
    a = read(layer_types=["full_attention"] * 24, sliding_window=None).attention
    assert a.window is None and a.sinks and a.window_layers == ()
    assert read(layer_types=None).attention.window_layers == tuple(range(0, 24, 2))
