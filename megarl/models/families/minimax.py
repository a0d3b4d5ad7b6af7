"""Declares MiniMax-M2 (2025): a sigmoid router with a bias, and norms over all heads of q and k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megarl.models.families.base import Family
from megarl.models.families.experts import ROUTER_BIAS, MoE, mixtral_experts
from megarl.models.families.fields import positive, refuse_others
from megarl.models.shapes import Attention, MoEShape

# of the published config.json; HF's implementation computes this whatever they say
_IMPLEMENTED: Mapping[str, tuple[Any, ...]] = {
    "scoring_func": ("sigmoid", None),
    "use_routing_bias": (True, None),
    "use_qk_norm": (True, None),
    "qk_norm_type": ("per_layer", None),
    "shared_intermediate_size": (0,),
}


@dataclass(frozen=True, kw_only=True)
class MiniMaxM2(Family):
    """A family that may say in numbers how much of a head is rotated."""

    def read_attention(self, raw: Mapping[str, Any], source: str) -> Attention:
        """Reads grouped-query attention. `rotary_dim` counts where there is no
        partial_rotary_factor. Raises ValueError naming the key that is wrong or unsupported."""
        refuse_others(raw, _IMPLEMENTED, source)
        dim = positive(raw, "head_dim", source)
        rotated = positive(raw, "rotary_dim", source, default=dim)
        return super().read_attention({"partial_rotary_factor": rotated / dim, **raw}, source)


def _experts(raw: Mapping[str, Any], source: str) -> MoEShape:
    """Reads the block: Mixtral's with a sigmoid router and a bias, whatever the config says."""
    return replace(mixtral_experts(raw, source), sigmoid=True, score_bias=True)


_BIAS = replace(ROUTER_BIAS, hf=("block_sparse_moe.e_score_correction_bias",))
FAMILIES = (
    MiniMaxM2(
        name="minimax_m2",
        architecture="MiniMaxM2ForCausalLM",
        # The released files have router and bias in fp32: NVIDIA-NeMo/Automodel#3674 (2026-08-25).
        moe=MoE(_experts, "block_sparse_moe", "w1", "w3", "w2", bias=_BIAS, fp32_router=True),
        qk_norm=True,
        whole_norm=True,
        partial_rotary=True,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 196608,
            "rope_theta": 5e6,
        },
        ignored_fields=("attention_bias", "mlp_bias", "partial_rotary_factor"),
    ),
)
