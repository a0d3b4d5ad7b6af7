"""Qwen2 and Qwen3, dense and with experts."""

from __future__ import annotations

from megarl.models.families.base import Family
from megarl.models.families.experts import (
    SHARED_GATE,
    MoE,
    gated_shared_experts,
    shared_expert,
    softmax_experts,
)
from megarl.models.families.grouped_query import BEHIND, EVEN, EVERY

_DEFAULTS = {
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
FAMILIES = (
    Family(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        qkv_bias=True,
        slides=BEHIND,
        defaults={**_DEFAULTS, "num_key_value_heads": 32},
        ignored_fields=("attention_bias", "mlp_bias"),
    ),
    Family(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        qk_norm=True,
        slides=BEHIND,
        defaults={**_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128},
        ignored_fields=("mlp_bias",),
    ),
    Family(
        name="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        qkv_bias="qkv_bias",
        moe=MoE(gated_shared_experts, shared=(*shared_expert("mlp.shared_expert"), SHARED_GATE)),
        slides=EVEN,
        defaults={**_DEFAULTS, "num_key_value_heads": 16, "qkv_bias": True},
        ignored_fields=("attention_bias", "mlp_bias"),
    ),
    Family(
        name="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        qk_norm=True,
        moe=MoE(softmax_experts),
        slides=EVERY,
        defaults={**_DEFAULTS, "num_key_value_heads": 4},
        ignored_fields=("mlp_bias",),
    ),
)
