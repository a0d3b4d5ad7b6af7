"""Mistral, and Mixtral, its mixture of experts: Llama with a sliding window in every layer."""

from __future__ import annotations

from megarl.models.families.base import Family
from megarl.models.families.experts import MoE, mixtral_experts
from megarl.models.families.grouped_query import UNASKED

_MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    slides=UNASKED,
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    ignored_fields=("attention_bias", "mlp_bias"),
)
_MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    moe=MoE(mixtral_experts, "block_sparse_moe", "w1", "w3", "w2"),
    slides=UNASKED,
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    ignored_fields=("attention_bias", "mlp_bias"),
)
FAMILIES = (_MISTRAL, _MIXTRAL)
