"""Declares the options of an engine that its model and its passes read (`options` of `actor`,
`critic`, `model`, ...), and what they mean in megatron-core's words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from megarl.models.shapes import ModelConfig
from megarl.parallel.layout import Layout

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Module = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]


@dataclass(kw_only=True)
class EngineOptions:
    """Gives an engine's options. Those of megatron-core have its names.

    recompute_method, recompute_num_layers: with recompute_granularity=full, "uniform" keeps the
        input of every recompute_num_layers layers, "block" recomputes only the first
        recompute_num_layers of a pipeline chunk.
    recompute_modules: with recompute_granularity=selective, what backward computes again of every
        layer: "core_attn" (fused attention keeps no scores: nothing is gained), "layernorm" (norms
        that are not fused into a matrix product), "mlp" (of dense layers), "moe" (router, dispatch
        and experts), "moe_act" (what is between the experts' products), "shared_experts",
        "mla_up_proj" (latents up to queries, keys and values).
    offload_activations: the inputs of recomputed layers are in host memory until backward, and are
        copied while other layers run; needs recompute_granularity=full.
    cp_comm_type: how keys and values reach the other context-parallel ranks; "auto" is "p2p" with
        Transformer Engine, "all_gather" with torch SDPA.
    lm_head_chunk_tokens: tokens per LM-head chunk; logits of one chunk are the peak memory.
    lm_head_keep_mb: a micro-batch's logits are kept for backward if they take at most this many MiB
        on one device, in fp32 or with Triton kernels in the model's dtype; otherwise backward
        recomputes them.
    value_head_init: a new value head starts with zeros, or random by `seed`.
    moe_aux_loss_coeff: load-balancing loss, per layer and micro-batch; 0 is off, as usual in RL.
    moe_z_loss_coeff: loss on the router's squared logsumexp; None is off.
    moe_router_bias_update_rate: step of the bias that balances loads without a loss (DeepSeek-V3);
        0 leaves the bias as it is.
    moe_token_dispatcher_type: how tokens reach their experts; "flex" (DeepEP) needs a GPU and
        deep_ep.
    moe_shared_expert_overlap: the shared expert computes on its own stream while tokens travel to
        the other experts and back. With "flex" this needs megatron-core 0.19.
    load_per_layer: logs every layer's load of its busiest expert.

    The auxiliary losses are computed per micro-batch and data-parallel rank and averaged over them,
    whatever the loss is divided by: with them on, and only then, a step depends on how the batch is
    cut into micro-batches.
    """

    recompute_method: Literal["uniform", "block"] = "uniform"
    recompute_num_layers: PositiveInt = 1
    recompute_modules: Annotated[list[Module], Field(min_length=1)] = field(
        default_factory=lambda: ["core_attn"]
    )
    offload_activations: bool = False
    cp_comm_type: Literal["auto", "p2p", "all_gather", "a2a"] = "auto"
    lm_head_chunk_tokens: PositiveInt = 4096
    lm_head_keep_mb: NonNegativeInt = 1024
    value_head_init: Literal["zero", "random"] = "zero"
    moe_aux_loss_coeff: NotNegative = 0.0
    moe_z_loss_coeff: NotNegative | None = None
    moe_router_bias_update_rate: NotNegative = 0.0
    moe_token_dispatcher_type: Literal["alltoall", "flex"] = "alltoall"
    moe_shared_expert_overlap: bool = False
    load_per_layer: bool = False


def recompute_fields(
    granularity: str,
    options: EngineOptions,
    layout: Layout,
    model: ModelConfig,
    *,
    attention: str,
) -> dict[str, Any]:
    """Returns the TransformerConfig's fields. Granularity "full" recomputes whole layers, chosen by
    a method; "selective" recomputes modules in every layer. attention: "te" or "sdpa".

    Raises ValueError where "uniform" would reach beyond the end of a pipeline chunk, and for
    modules that the model or its layers do not have.
    """
    if granularity == "none":
        return {"recompute_granularity": None}
    if granularity == "selective":
        _check_modules(options.recompute_modules, model, attention)
        return {
            "recompute_granularity": granularity,
            "recompute_modules": options.recompute_modules,
        }
    method, n = options.recompute_method, options.recompute_num_layers
    chunks = {
        len(layout.layers(model.num_layers, pp, vpp))
        for pp in range(layout.pp)
        for vpp in range(layout.vpp)
    }
    if method == "uniform" and any(size % n for size in chunks):
        raise ValueError(
            f"options.recompute_num_layers={n} does not divide the layers of a pipeline chunk "
            f"({', '.join(map(str, sorted(chunks)))}); use 1, or recompute_method='block'"
        )
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": n}


def _check_modules(modules: list[Module], model: ModelConfig, attention: str) -> None:
    moe = model.moe
    needs = {
        "mla_up_proj": (model.attention.latent, "latent attention"),
        "mlp": (moe is None or moe.dense_layers, "dense layers"),
        "moe": (moe, "experts"),
        "moe_act": (moe and attention == "te", "experts in Transformer Engine's layers"),
        "shared_experts": (moe and moe.shared_intermediate_size, "shared experts"),
    }
    for module in modules:
        has, what = needs.get(module, (True, ""))
        if not has:
            raise ValueError(
                f"options.recompute_modules={module!r} needs {what}, which {model.family} does not "
                "have here; leave it out"
            )
