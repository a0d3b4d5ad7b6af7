"""Gemma 3's and Olmo 3's configs, and their norms and embeddings, against transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import (
    Gemma3RMSNorm,
    Gemma3TextScaledWordEmbedding,
)

from megarl.models.families import family_of
from megarl.models.families.grouped_query import GroupedQuery
from megarl.models.hf_config import parse_hf_config, read_hf_config
from megarl.models.layers import ZeroCentredRMSNorm, scale_embeddings
from megarl.models.params import draw
from megarl.models.piece_table import build_piece_table
from megarl.parallel.layout import Layout
from megarl.planning.memory import parameters
from tests.tiny import WINDOW_ROPE_KINDS, save_tiny

# gemma-3-1b-it's
GEMMA: dict[str, Any] = dict(
    architectures=["Gemma3ForCausalLM"], attention_bias=False, attn_logit_softcapping=None,
    cache_implementation="hybrid", final_logit_softcapping=None, head_dim=256,
    hidden_activation="gelu_pytorch_tanh", hidden_size=1152, intermediate_size=6912,
    max_position_embeddings=32768, model_type="gemma3_text", num_attention_heads=4,
    num_hidden_layers=26, num_key_value_heads=1, query_pre_attn_scalar=256, rms_norm_eps=1e-06,
    rope_local_base_freq=10000, rope_scaling=None, rope_theta=1000000, sliding_window=512,
    sliding_window_pattern=6, torch_dtype="bfloat16", vocab_size=262144,
)  # fmt: skip
# gemma-3-4b-it's
WHOLE: dict[str, Any] = dict(
    architectures=["Gemma3ForConditionalGeneration"], model_type="gemma3", torch_dtype="bfloat16",
    vision_config={"model_type": "siglip_vision_model"},
    text_config=dict(
        hidden_size=2560, intermediate_size=10240, model_type="gemma3_text", num_hidden_layers=34,
        rope_scaling={"factor": 8.0, "rope_type": "linear"}, sliding_window=1024,
    ),
)  # fmt: skip
# Olmo-3-7B's before its context was extended
OLMO: dict[str, Any] = dict(
    architectures=["Olmo3ForCausalLM"], attention_bias=False, hidden_act="silu", hidden_size=4096,
    intermediate_size=11008, max_position_embeddings=8192, model_type="olmo3",
    num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32, rms_norm_eps=1e-06,
    rope_scaling=None, rope_theta=500000, sliding_window=4096, tie_word_embeddings=False,
    torch_dtype="bfloat16", vocab_size=100278,
)  # fmt: skip


def test_published_models_have_their_published_sizes() -> None:
    gemma, whole, olmo = (parse_hf_config(raw) for raw in (GEMMA, WHOLE, OLMO))
    assert isinstance(gemma.attention, GroupedQuery) and isinstance(olmo.attention, GroupedQuery)
    assert gemma.tie_word_embeddings and gemma.attention.scaled_by == 256
    assert (gemma.rope_theta, gemma.window_rope) == (1e6, (1e4, None))
    full = set(range(26)) - set(gemma.attention.window_layers)
    assert full == {5, 11, 17, 23} and gemma.attention.window == 512
    assert olmo.attention.whole_norm and olmo.attention.window_layers[:4] == (0, 1, 2, 4)
    assert parameters(gemma)[0] == pytest.approx(1.0e9, rel=0.01)
    assert whole.wrapper is not None and whole.tie_word_embeddings
    assert whole.rope_scaling is not None and whole.rope_scaling.factor == 8.0
    assert whole.window_rope == (1e4, None)
    assert parameters(whole)[0] == pytest.approx(3.88e9, rel=0.01)
    assert parameters(olmo)[0] == pytest.approx(7.3e9, rel=0.01)


@pytest.mark.parametrize(
    ("raw", "over", "words"),
    (
        (GEMMA, dict(final_logit_softcapping=30.0), "final_logit_softcapping=30.0.*leave it out"),
        (GEMMA, dict(attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0.*leave it out"),
        (GEMMA, dict(use_bidirectional_attention=True), "use_bidirectional_attention=True"),
        (GEMMA, dict(hidden_activation="gelu"), "hidden_activation='gelu'.*'gelu_pytorch_tanh'"),
        (GEMMA, dict(query_pre_attn_scalar=0), "query_pre_attn_scalar=0"),
        (GEMMA, dict(sliding_window_pattern=0), "sliding_window_pattern=0"),
        (GEMMA, dict(sliding_window=None), "sliding_window is missing"),
        (GEMMA, dict(attention_bias=True), "attention_bias=True"),
        (GEMMA, dict(layer_types=["full_attention"]), "expected a list of 26 types"),
        (OLMO, dict(sliding_window_pattern=6), "sliding_window_pattern=6.*supported: 4"),
        (OLMO, dict(rope_local_base_freq=1e4), "rope_local_base_freq=10000.0.*supported: 500000.0"),
        (OLMO, dict(hidden_act="gelu"), "hidden_act='gelu'"),
    ),
)
def test_what_is_not_implemented_is_named(
    raw: dict[str, Any], over: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        parse_hf_config(raw | over)


@pytest.mark.parametrize("kind", (*WINDOW_ROPE_KINDS, "minimax_m2"))
@pytest.mark.parametrize("tie", (False, True))
def test_names_and_shapes_are_those_transformers_saves(
    kind: str, tie: bool, tmp_path: Path
) -> None:
    save_tiny(tmp_path, kind, tie=tie)
    with safe_open(tmp_path / "model.safetensors", "pt") as f:
        want = {n: tuple(f.get_slice(n).get_shape()) for n in f.keys()}  # noqa: SIM118
    table = build_piece_table(read_hf_config(tmp_path), Layout(tp=2, pp=2))
    assert {t.name: t.shape for t in table.tensors} == want


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_norms_and_embeddings_are_transformers(dtype: torch.dtype) -> None:
    """Outputs are of order one, where neighbours in bf16 are 2^-7 apart."""
    torch.manual_seed(0)
    config = SimpleNamespace(
        params_dtype=dtype, use_cpu_initialization=True, sequence_parallel=False
    )
    norm, hf = ZeroCentredRMSNorm(config, 48, eps=1e-6), Gemma3RMSNorm(48, eps=1e-6).to(dtype)
    x, weight = torch.randn(7, 48).to(dtype), (0.3 * torch.randn(48)).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(weight)
        hf.weight.copy_(weight)
        bound = 1e-6 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(norm(x), hf(x), atol=bound, rtol=bound)

        table = Gemma3TextScaledWordEmbedding(9, 5376, 0, embed_scale=5376**0.5).to(dtype)
        chunk: Any = SimpleNamespace(
            pre_process=True, config=config, embedding=nn.Embedding(9, 5376, dtype=dtype)
        )
        chunk.embedding.weight.copy_(table.weight)
        scale_embeddings(chunk, 5376**0.5)
        ids = torch.arange(9)
        assert torch.equal(chunk.embedding(ids), table(ids))


def test_random_norms_multiply_with_one() -> None:
    m = parse_hf_config(GEMMA | dict(num_hidden_layers=1))
    assert family_of(m).transformer_fields(m)["layernorm_zero_centered_gamma"]
    norms = [t for t in build_piece_table(m, Layout()).tensors if "norm" in t.name]
    assert len(norms) == 7 and not any(draw(t, 0, 0.02).any() for t in norms)
