"""Declares the text model of Gemma 3 (2025, arXiv 2503.19786): norms before and after attention and
MLP, and layers with a sliding window that have a rotary base of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megarl.models.families.base import Family
from megarl.models.families.fields import positive, refuse_others
from megarl.models.families.grouped_query import BUT_NTH, GroupedQuery
from megarl.models.families.params import Param
from megarl.models.ops import H, Replicated
from megarl.models.shapes import Attention, ModelConfig, Wrapper


@dataclass(frozen=True, kw_only=True)
class Gemma3(Family):
    """A family whose embeddings are scaled."""

    def read_attention(self, raw: Mapping[str, Any], source: str) -> Attention:
        """Reads grouped-query attention and what its scores are scaled by. Raises ValueError naming
        the key that is wrong or unsupported."""
        refuse_others(raw, _IMPLEMENTED, source)
        a = super().read_attention(raw, source)
        assert isinstance(a, GroupedQuery)
        return replace(a, scaled_by=positive(raw, "query_pre_attn_scalar", source))

    def transformer_fields(self, m: ModelConfig) -> dict[str, Any]:
        """Returns the fields with Gemma's activation: megatron-core's fused GeGLU takes the
        approximation by tanh, as HF's gelu_pytorch_tanh does."""
        import torch.nn.functional as F

        return super().transformer_fields(m) | {"activation_func": F.gelu}

    def patch(self, chunk: Any, m: ModelConfig) -> None:
        """Scales embeddings by the root of their size, besides setting rotary frequencies."""
        from megarl.models.layers import scale_embeddings

        super().patch(chunk, m)
        scale_embeddings(chunk, m.hidden_size**0.5)


_IMPLEMENTED: Mapping[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
}
_NORMS = tuple(
    Param(f"{name}.weight", (f"{hf}.weight",), Replicated(H))
    for name, hf in (
        ("input_layernorm", "input_layernorm"),
        ("post_self_attn_layernorm", "post_attention_layernorm"),
        ("pre_mlp_layernorm", "pre_feedforward_layernorm"),
        ("post_mlp_layernorm", "post_feedforward_layernorm"),
    )
)
_WHOLE = Wrapper(
    architecture="Gemma3ForConditionalGeneration",
    model="language_model.model.",
    head="language_model.lm_head.",
)
FAMILIES = (
    Gemma3(
        name="gemma3_text",
        architecture="Gemma3ForCausalLM",
        classifier="Gemma3TextForCausalLM",
        wrappers=(_WHOLE,),
        norms=_NORMS,
        zero_centred=True,
        qk_norm=True,
        slides=BUT_NTH,
        rope_by_type=True,
        defaults={  # the published wholes leave out sizes, too
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        ignored_fields=("hidden_act", "mlp_bias"),
    ),
)
