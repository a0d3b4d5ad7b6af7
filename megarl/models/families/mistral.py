"""Mistral, and Mixtral, its mixture of experts: Llama with a sliding window in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.models.families.base import Family
from megarl.models.families.experts import MoE, softmax_experts
from megarl.models.families.grouped_query import UNASKED
from megarl.models.shapes import MoEShape

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


def _mixtral_experts(raw: Mapping[str, Any], source: str) -> MoEShape:
    """Reads Mixtral's block: an expert has the MLP's size, and the weights of a token's experts sum
    to 1 whatever the config says."""
    raw = {**raw, "norm_topk_prob": True, "moe_intermediate_size": raw.get("intermediate_size")}
    return softmax_experts(raw, source)


_MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    moe=MoE(_mixtral_experts, "block_sparse_moe", "w1", "w3", "w2"),
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
