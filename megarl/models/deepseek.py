"""What is DeepSeek's own in a config.json: latent attention, its experts, and YaRN.

Refuses what megatron-core's parts would compute differently from Hugging Face's model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.models.shapes import MLAShape, MoEShape, RopeScaling, count, number, positive


def mla_shape(raw: Mapping[str, Any], source: str) -> MLAShape:
    shape = MLAShape(
        q_rank=positive(raw, "q_lora_rank", source) if raw.get("q_lora_rank") else None,
        kv_rank=positive(raw, "kv_lora_rank", source),
        nope_dim=positive(raw, "qk_nope_head_dim", source),
        rope_dim=positive(raw, "qk_rope_head_dim", source),
        v_dim=positive(raw, "v_head_dim", source),
    )
    if shape.rope_dim % 2:
        raise ValueError(
            f"{source}: qk_rope_head_dim={shape.rope_dim} is odd; rotary embeddings need it even"
        )
    heads = positive(raw, "num_attention_heads", source)
    if (kv := positive(raw, "num_key_value_heads", source, default=heads)) != heads:
        raise ValueError(
            f"{source}: num_key_value_heads={kv} with num_attention_heads={heads} is not supported "
            "in latent attention; supported: equally many"
        )
    return shape


def moe_shape(raw: Mapping[str, Any], source: str, *, sigmoid: bool) -> MoEShape:
    """`sigmoid`: DeepSeek-V3's router, else V2's."""
    experts, top_k = (
        positive(raw, key, source) for key in ("n_routed_experts", "num_experts_per_tok")
    )
    if top_k > experts:
        raise ValueError(f"{source}: num_experts_per_tok={top_k} of n_routed_experts={experts}")
    _check_router(raw, source, sigmoid=sigmoid)
    layers = positive(raw, "num_hidden_layers", source)
    dense = count(raw, "first_k_dense_replace", source)
    if dense >= layers:
        raise ValueError(
            f"{source}: first_k_dense_replace={dense} leaves no layer of {layers} with experts"
        )
    groups, top_groups = _groups(raw, source, experts, top_k, sigmoid=sigmoid)
    size = positive(raw, "moe_intermediate_size", source)
    return MoEShape(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=size,
        norm_topk_prob=sigmoid,
        dense_layers=tuple(range(dense)),
        shared_intermediate_size=size * positive(raw, "n_shared_experts", source),
        sigmoid=sigmoid,
        scale=number(raw, "routed_scaling_factor", source),
        groups=groups,
        top_groups=top_groups,
        group_best=2 if sigmoid else 1,
    )


def _check_router(raw: Mapping[str, Any], source: str, *, sigmoid: bool) -> None:
    """Hugging Face's models read none of these but `norm_topk_prob` (V3) and `topk_method` (V2)."""
    allowed: dict[str, tuple[Any, ...]] = {
        "scoring_func": ("sigmoid",) if sigmoid else ("softmax",),
        "topk_method": ("noaux_tc",) if sigmoid else ("greedy", "group_limited_greedy"),
        "norm_topk_prob": (sigmoid,),
        "moe_layer_freq": (1,),
        "rope_interleave": (True,),
    }
    for name, values in allowed.items():
        value = raw.get(name)
        if value is not None and value not in values:
            raise ValueError(
                f"{source}: {name}={value!r} is not supported; supported: "
                f"{' or '.join(map(repr, values))}"
            )
    if sigmoid and raw.get("num_experts_per_tok") == 1:
        raise ValueError(
            f"{source}: num_experts_per_tok=1 with norm_topk_prob=true is not supported: every "
            "weight is the same, so the router has no gradient"
        )


def _groups(
    raw: Mapping[str, Any], source: str, experts: int, top_k: int, *, sigmoid: bool
) -> tuple[int, int]:
    """(groups, groups a token may go to); (1, 1) where all are open to it."""
    if not sigmoid and raw.get("topk_method", "greedy") != "group_limited_greedy":
        return 1, 1
    groups = positive(raw, "n_group", source, default=1)
    top = positive(raw, "topk_group", source, default=groups)
    if top >= groups:
        return 1, 1
    size = experts // groups
    if experts % groups or top * size < top_k or (sigmoid and size < 2):
        raise ValueError(
            f"{source}: n_group={groups} with topk_group={top} does not fit n_routed_experts="
            f"{experts} and num_experts_per_tok={top_k}"
        )
    return groups, top


def yarn(params: Mapping[str, Any], source: str) -> RopeScaling:
    """YaRN (Peng et al., 2023) with DeepSeek's `mscale`. cos and sin are multiplied by
    g(mscale) / g(mscale_all_dim), attention scores by g(mscale_all_dim)^2, where
    g(m) = 0.1 m ln(factor) + 1.
    """
    for name, allowed in (("attention_factor", None), ("truncate", True)):
        if params.get(name, allowed) not in (None, allowed):
            raise ValueError(
                f"{source}: {name}={params[name]} in rope scaling type 'yarn' is not supported; "
                "leave it out"
            )
    for name in ("factor", "original_max_position_embeddings"):
        if params.get(name) is None:
            raise ValueError(f"{source}: rope scaling type 'yarn' lacks {name}")
    mscale, all_dim = (number(params, k, source, 0.0) for k in ("mscale", "mscale_all_dim"))
    if all_dim and not mscale:
        raise ValueError(f"{source}: rope scaling has mscale_all_dim={all_dim} but no mscale")
    return RopeScaling(
        type="yarn",
        factor=number(params, "factor", source),
        original_max_position_embeddings=positive(
            params, "original_max_position_embeddings", source
        ),
        beta_fast=number(params, "beta_fast", source, 32.0) or 32.0,
        beta_slow=number(params, "beta_slow", source, 1.0) or 1.0,
        mscale=mscale if all_dim else 1.0,  # alone, it is not read
        mscale_all_dim=all_dim,
    )
