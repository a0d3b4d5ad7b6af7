"""gpt-oss (2025, arXiv 2508.10925): attention with sinks, in every other layer through a window,
biases in all linear maps, and experts with a clamped gate, which share HF's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megarl.models.families.base import Family
from megarl.models.families.experts import MoE, mixtral_experts
from megarl.models.families.fields import number, refuse_others
from megarl.models.families.grouped_query import BUT_NTH
from megarl.models.families.params import Param
from megarl.models.families.rope import yarn
from megarl.models.ops import GateUpInTurns, H, Op, Replicated, Sections, Transposed
from megarl.models.shapes import Attention, ModelConfig, MoEShape

_E, _INNER = "experts.num_experts", "experts.intermediate_size"


def _param(name: str, hf: str, op: Op, initial: str = "normal") -> Param:
    return Param(name, (hf,), op, initial=initial, stacked="#" in name)


_CORE, _LOCAL = "self_attention.core_attention", "mlp.experts.local_experts.#"
_ATTENTION = (
    _param("self_attention.linear_proj.bias", "self_attn.o_proj.bias", Replicated(H), "zeros"),
    _param(f"{_CORE}.softmax_offset", "self_attn.sinks", Sections("attention.heads", ((1,),))),
)
_ROUTER = (
    _param("mlp.router.weight", "mlp.router.weight", Replicated(_E, H)),
    _param("mlp.router.bias", "mlp.router.bias", Replicated(_E)),
)
_HF = "mlp.experts"
_EXPERT = (
    _param(f"{_LOCAL}.linear_fc1.weight", f"{_HF}.gate_up_proj", GateUpInTurns(_INNER, H)),
    _param(f"{_LOCAL}.linear_fc1.bias", f"{_HF}.gate_up_proj_bias", GateUpInTurns(_INNER), "zeros"),
    _param(f"{_LOCAL}.linear_fc2.weight", f"{_HF}.down_proj", Transposed(H, _INNER)),
    _param(f"{_LOCAL}.linear_fc2.bias", f"{_HF}.down_proj_bias", Replicated(H), "zeros"),
)


class Experts(MoE):
    """A block whose experts share HF's tensors."""

    def params(self, experts: int) -> tuple[Param, ...]:
        """Returns a block's parameters: the router's, and those of each of `experts`."""
        return (*_ROUTER, *(p.of_expert(e) for e in range(experts) for p in _EXPERT))


def _experts(raw: Mapping[str, Any], source: str) -> MoEShape:
    """Reads gpt-oss's block: Mixtral's in every layer, with biases and clamped gates, whatever the
    config says."""
    refuse_others(raw, {"swiglu_alpha": (1.702,), "attention_bias": (True,)}, source)
    if not (limit := number(raw, "swiglu_limit", source)):
        raise ValueError(f"{source}: swiglu_limit={limit}; expected a positive number")
    shape = mixtral_experts({**raw, "decoder_sparse_step": 1, "mlp_only_layers": None}, source)
    return replace(shape, bias=True, limit=limit)


@dataclass(frozen=True, kw_only=True)
class GptOss(Family):
    """gpt-oss's 20B and 120B models, dequantised."""

    def read_attention(self, raw: Mapping[str, Any], source: str) -> Attention:
        """Returns the attention of `raw`, which has sinks. Raises ValueError naming the key that is
        wrong or unsupported."""
        raw = {**raw, "sliding_window_pattern": 2}  # where layer_types is left out
        return replace(super().read_attention(raw, source), sinks=True)

    def attention_params(self, m: ModelConfig) -> tuple[Param, ...]:
        """Returns a layer's parameters before its MLP."""
        return (*super().attention_params(m), *_ATTENTION)

    def transformer_fields(self, m: ModelConfig) -> dict[str, Any]:
        """Returns the fields of sinks, biases and clamped gates. megatron-core's fused activation
        clamps before it adds the bias, gpt-oss after it."""
        from megarl.parallel import mcore  # noqa: F401  before megatron

        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        return super().transformer_fields(m) | dict(
            softmax_type="learnable",
            add_bias_linear=True,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            activation_func=quick_gelu,  # x sigmoid(1.702 x)
            glu_linear_offset=1.0,
            activation_func_clamp_value=m.experts.limit,
        )

    def patch(self, chunk: Any, m: ModelConfig) -> None:
        """Sets the rotary frequencies, and how experts add their bias."""
        from megarl.models.layers import add_bias_out_of_place

        super().patch(chunk, m)
        add_bias_out_of_place(chunk)


FAMILIES = (
    GptOss(
        name="gpt_oss",
        architecture="GptOssForCausalLM",
        moe=Experts(_experts),
        qkv_bias=True,
        slides=BUT_NTH,
        rope_scalings={"yarn": yarn},
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
            "attention_bias": True,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        ignored_fields=("attention_bias", "mlp_bias"),
    ),
)
