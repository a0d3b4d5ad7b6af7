"""MiniMax-M2's config.json."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.models.families.grouped_query import GroupedQuery
from megarl.models.hf_config import parse_hf_config
from megarl.planning.memory import parameters

# as on the hub, dequantised
M2: dict[str, Any] = dict(
    architectures=["MiniMaxM2ForCausalLM"], head_dim=128, hidden_act="silu", hidden_size=3072,
    intermediate_size=1536, max_position_embeddings=196608, model_type="minimax_m2",
    num_attention_heads=48, num_experts_per_tok=8, num_hidden_layers=62, num_key_value_heads=8,
    num_local_experts=256, qk_norm_type="per_layer", rms_norm_eps=1e-06, rope_theta=5000000,
    rotary_dim=64, scoring_func="sigmoid", shared_intermediate_size=0, tie_word_embeddings=False,
    use_qk_norm=True, use_routing_bias=True, vocab_size=200064,
)  # fmt: skip


def test_the_published_model_has_its_published_size() -> None:
    """Its model card has 230B parameters, 10B of them per token; here the embedding counts."""
    m = parse_hf_config(M2)
    assert isinstance(m.attention, GroupedQuery) and m.attention.whole_norm
    assert m.attention.rotary_dim == 64 and m.moe is not None
    assert m.moe.sigmoid and m.moe.score_bias and m.moe.norm_topk_prob
    total, active = parameters(m)
    active -= m.vocab_size * m.hidden_size
    assert (total, active) == (pytest.approx(230e9, rel=0.01), pytest.approx(10e9, rel=0.05))


def test_a_factor_overrides_rotary_dim_as_in_transformers() -> None:
    assert parse_hf_config(M2 | dict(partial_rotary_factor=0.25)).attention.rotary_dim == 32
    whole = {k: v for k, v in M2.items() if k != "rotary_dim"}
    assert parse_hf_config(whole).attention.rotary_dim == 128


@pytest.mark.parametrize(
    "over",
    (
        dict(scoring_func="softmax"),
        dict(use_routing_bias=False),
        dict(use_qk_norm=False),
        dict(qk_norm_type="per_head"),
        dict(shared_intermediate_size=1536),
        dict(rotary_dim=0),
        dict(rotary_dim=63),
        dict(rotary_dim=256),
        dict(num_experts_per_tok=1),
        dict(quantization_config={"quant_method": "fp8"}),
    ),
    ids=str,
)
def test_what_is_not_implemented_is_named(over: dict[str, Any]) -> None:
    key = "partial_rotary_factor" if over.get("rotary_dim") else next(iter(over))
    with pytest.raises(ValueError, match=f"{key}="):
        parse_hf_config(M2 | over)
