"""Declares GLM-4 and GLM-4.5, which rotate a part of each head only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megarl.models.families.base import Family
from megarl.models.families.experts import ROUTER_BIAS, moe, shared_expert, sigmoid_experts
from megarl.models.families.grouped_query import GroupedQuery
from megarl.models.families.params import FUSED_MLP, NORMS, POST_NORMS
from megarl.models.shapes import Attention


@dataclass(frozen=True, kw_only=True)
class Glm(Family):
    """GLM-4, whose rotary embeddings turn pairs of neighbours."""

    partial_rotary: bool = True

    def read_attention(self, raw: Mapping[str, Any], source: str) -> Attention:
        """Reads grouped-query attention whose rotary embeddings turn neighbours; its projections
        have a bias where `attention_bias` says so."""
        found = super().read_attention(raw, source)
        assert isinstance(found, GroupedQuery)
        return replace(found, qkv_bias=bool(raw["attention_bias"]), interleaved=True)


@dataclass(frozen=True, kw_only=True)
class Glm4(Glm):
    """GLM-4-0414, which also normalises the outputs of attention and MLP."""

    def patch_spec(self, spec: Any) -> None:
        """Makes every layer of `spec` a SandwichLayer."""
        from megarl.models.layers import SandwichLayer

        for layer in spec.layer_specs:
            layer.module, layer.params = SandwichLayer, {"norm": spec.layer_norm}


@dataclass(frozen=True, kw_only=True)
class Glm4Moe(Glm):
    """GLM-4.5, which turns pairs of halves, and may normalise queries and keys."""

    def read_attention(self, raw: Mapping[str, Any], source: str) -> Attention:
        """Reads attention as GLM-4 does, but rotates halves, and has norms where `use_qk_norm` says
        so."""
        found = super().read_attention(raw, source)
        assert isinstance(found, GroupedQuery)
        return replace(found, qk_norm=bool(raw.get("use_qk_norm")), interleaved=False)


_IGNORED = ("attention_bias", "mlp_bias", "partial_rotary_factor")
_DENSE: dict[str, Any] = dict(
    mlp=FUSED_MLP,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    ignored_fields=_IGNORED,
)
_GLM4_MOE = Glm4Moe(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    moe=moe(sigmoid_experts, shared=shared_expert("mlp.shared_experts"), bias=ROUTER_BIAS),
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
    ignored_fields=_IGNORED,
)
FAMILIES = (
    Glm(name="glm", architecture="GlmForCausalLM", **_DENSE),
    Glm4(name="glm4", architecture="Glm4ForCausalLM", norms=(*NORMS, *POST_NORMS), **_DENSE),
    _GLM4_MOE,
)
