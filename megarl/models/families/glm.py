"""Declares GLM-4 and GLM-4.5, which rotate a part of each head only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.models.families.base import Family
from megarl.models.families.experts import ROUTER_BIAS, MoE, shared_expert, sigmoid_experts
from megarl.models.families.params import FUSED_MLP, NORMS, POST_NORMS
from megarl.models.shapes import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Glm4(Family):
    """GLM-4-0414, which also normalises the outputs of attention and MLP."""

    def patch_spec(self, spec: Any, m: ModelConfig, first: int) -> None:
        """Makes every layer of `spec` a SandwichLayer."""
        from megarl.models.layers import sandwich

        sandwich(spec)


_COMMON: dict[str, Any] = dict(
    qkv_bias="attention_bias",
    partial_rotary=True,
    ignored_fields=("attention_bias", "mlp_bias", "partial_rotary_factor"),
)
_DENSE: dict[str, Any] = dict(
    mlp=FUSED_MLP,
    interleaved=True,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    **_COMMON,
)
_GLM4_MOE = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    moe=MoE(sigmoid_experts, shared=shared_expert("mlp.shared_experts"), bias=ROUTER_BIAS),
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    },
    qk_norm="use_qk_norm",
    **_COMMON,
)
FAMILIES = (
    Family(name="glm", architecture="GlmForCausalLM", **_DENSE),
    Glm4(name="glm4", architecture="Glm4ForCausalLM", norms=(*NORMS, *POST_NORMS), **_DENSE),
    _GLM4_MOE,
)
