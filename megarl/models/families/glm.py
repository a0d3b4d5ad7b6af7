"""Declares GLM-4 and GLM-4.5, which rotate a part of each head only, and GLM-4.7-Flash, which has
latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.models.families.base import Family
from megarl.models.families.deepseek import V3
from megarl.models.families.experts import ROUTER_BIAS, MoE, shared_expert, sigmoid_experts
from megarl.models.families.fields import positive, refuse_others
from megarl.models.families.params import FUSED_MLP, NORMS, POST_NORMS
from megarl.models.shapes import MoEShape


def _flash_experts(raw: Mapping[str, Any], source: str) -> MoEShape:
    """Reads GLM-4.5's block of the layers that `mlp_layer_types` says, by default all but the
    first. Raises ValueError naming the key that is wrong or unsupported."""
    layers = positive(raw, "num_hidden_layers", source)
    types = raw.get("mlp_layer_types")
    if types is None:
        types = ["dense"] + ["sparse"] * (layers - 1)
    kinds = set(map(str, types)) if isinstance(types, list) else {""}
    if len(types) != layers or not {"sparse"} <= kinds <= {"dense", "sparse"}:
        raise ValueError(
            f"{source}: mlp_layer_types={types!r}; expected 'dense' or 'sparse' for each of "
            f"{layers} layers, and one that is sparse"
        )
    dense = tuple(i for i, kind in enumerate(types) if kind == "dense")
    leading = (len(dense), None) if dense == tuple(range(len(dense))) else ()
    # servers read the first, transformers takes the second for qk_rope_head_dim
    also = {"first_k_dense_replace": leading, "head_dim": (raw.get("qk_rope_head_dim"),)}
    refuse_others(raw, also, source)
    shape = sigmoid_experts({**raw, "first_k_dense_replace": 0}, source)
    return replace(shape, dense_layers=dense)


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
_FLASH = replace(
    V3,
    name="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    moe=MoE(_flash_experts, shared=shared_expert("mlp.shared_experts"), bias=ROUTER_BIAS),
    defaults={
        "num_key_value_heads": 20,
        "max_position_embeddings": 202752,
        "q_lora_rank": 768,
        "rms_norm_eps": 1e-5,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "norm_topk_prob": True,
    },
)
FAMILIES = (
    Family(name="glm", architecture="GlmForCausalLM", **_DENSE),
    Family(name="glm4", architecture="Glm4ForCausalLM", norms=(*NORMS, *POST_NORMS), **_DENSE),
    _GLM4_MOE,
    _FLASH,
)
