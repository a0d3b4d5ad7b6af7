"""Declares Olmo 3 (2025, arXiv 2512.13961): attention and MLP normalise their outputs and not their
inputs, and every fourth layer attends in full."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.models.families.base import Family
from megarl.models.families.fields import refuse_others
from megarl.models.families.grouped_query import BUT_NTH
from megarl.models.families.params import Param
from megarl.models.ops import H, Replicated
from megarl.models.shapes import Attention


@dataclass(frozen=True, kw_only=True)
class Olmo3(Family):
    """A family whose HF implementation knows no other pattern of windows."""

    def read_attention(self, raw: Mapping[str, Any], source: str) -> Attention:
        """Reads grouped-query attention. Raises ValueError naming the key that is wrong, or that
        HF's implementation would not read."""
        unread = ("sliding_window_pattern", "rope_local_base_freq")
        refuse_others(raw, {key: (self.defaults[key],) for key in unread}, source)
        return super().read_attention(raw, source)


_NORMS = (
    Param("post_self_attn_layernorm.weight", ("post_attention_layernorm.weight",), Replicated(H)),
    Param("post_mlp_layernorm.weight", ("post_feedforward_layernorm.weight",), Replicated(H)),
)
FAMILIES = (
    Olmo3(
        name="olmo3",
        architecture="Olmo3ForCausalLM",
        norms=_NORMS,
        qk_norm=True,
        whole_norm=True,
        slides=BUT_NTH,
        rope_by_type=True,
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "rope_local_base_freq": 5e5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        ignored_fields=("mlp_bias",),
    ),
)
