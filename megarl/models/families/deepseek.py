"""Declares DeepSeek-V2 and V3: multi-head latent attention, experts chosen by group, and YaRN.

Refuses what megatron-core's parts would compute differently from Hugging Face's model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from megarl.models.families.base import Family
from megarl.models.families.experts import (
    ROUTER_BIAS,
    MoE,
    in_groups,
    leading_dense_experts,
    shared_expert,
    sigmoid_experts,
)
from megarl.models.families.fields import number, positive, refuse_others
from megarl.models.families.params import PROJ, Param
from megarl.models.families.rope import yarn
from megarl.models.ops import ColumnParallel, H, Op, Replicated
from megarl.models.shapes import Attention, ModelConfig, MoEShape, RopeScaling


@dataclass(frozen=True, kw_only=True)
class Latent(Attention):
    """Multi-head latent attention (DeepSeek-V2, 2024, arXiv 2405.04434, section 2.1): keys and
    values of all heads come from one latent vector of `kv_rank` numbers, queries from one of
    `q_rank` (None: from the hidden state itself). `nope_dim` numbers of a head's query and key
    carry no position and `rotary_dim` are rotated; the rotated part of the key is the same in all
    heads."""

    latent: ClassVar[bool] = True
    q_rank: int | None
    kv_rank: int
    nope_dim: int

    @property
    def kv_down(self) -> int:
        """Returns the size of the latent of keys and values with the rotated part of the key."""
        return self.kv_rank + self.rotary_dim

    @property
    def kv_up(self) -> int:
        """Returns the size of every head's value and key without its rotated part."""
        return self.heads * (self.nope_dim + self.v_head_dim)

    def weights(self, hidden: int) -> int:
        """Returns how many numbers a layer's attention matrices have, latents' projections too."""
        queries = (self.q_rank or hidden) * self.heads * self.head_dim
        down = hidden * ((self.q_rank or 0) + self.kv_down)
        return down + queries + self.kv_rank * self.kv_up + hidden * self.heads * self.v_head_dim

    def sizes_to_cut(self) -> dict[str, int]:
        """Returns the sizes of the latents: megatron-core cuts the projections to the latents, and
        puts the results together again."""
        return {
            "q_lora_rank": self.q_rank or 0,
            "kv_lora_rank + qk_rope_head_dim": self.kv_down,
        }

    def kept(self, tp: int) -> tuple[float, float]:
        """Returns the numbers of latents before and after their norms; and of a rank's heads: of
        keys and values as projected, of queries, keys and outputs, and an fp32 sum a head."""
        latents = 2 * (self.q_rank or 0) + 2 * self.kv_rank + self.rotary_dim
        head = 2 * self.head_dim + self.nope_dim + 2 * self.v_head_dim + 2
        return latents, self.heads / tp * head

    def cached(self, tp: int) -> int:
        """Returns the numbers of the latent, which is whole on every GPU."""
        return self.kv_down


def _param(name: str, hf: str, op: Op) -> Param:
    return Param(f"self_attention.{name}.weight", (f"self_attn.{hf}.weight",), op)


_QUERY, _Q_RANK, _KV_RANK = "attention.query", "attention.q_rank", "attention.kv_rank"
_KV_DOWN, _KV_UP = "attention.kv_down", "attention.kv_up"
_QUERIES = (_param("linear_q_proj", "q_proj", ColumnParallel(_QUERY, H)),)
_LATENT_QUERIES = (
    _param("linear_q_down_proj", "q_a_proj", Replicated(_Q_RANK, H, linear=True)),
    _param("q_layernorm", "q_a_layernorm", Replicated(_Q_RANK)),
    _param("linear_q_up_proj", "q_b_proj", ColumnParallel(_QUERY, _Q_RANK)),
)
_KEYS_AND_VALUES = (
    _param("linear_kv_down_proj", "kv_a_proj_with_mqa", Replicated(_KV_DOWN, H, linear=True)),
    _param("kv_layernorm", "kv_a_layernorm", Replicated(_KV_RANK)),
    _param("linear_kv_up_proj", "kv_b_proj", ColumnParallel(_KV_UP, _KV_RANK)),
    PROJ,
)


def _yarn(params: Mapping[str, Any], source: str) -> RopeScaling:
    """Reads YaRN with DeepSeek's `mscale_all_dim`: attention scores are multiplied by its gain
    squared. megarl's other fields hold what megatron-core has: its factor on cos and sin is
    gain(mscale) / gain(mscale_all_dim). Raises ValueError for a field that is missing or not
    implemented."""
    s = yarn(params, source)
    all_dim = number(params, "mscale_all_dim", source, 0.0)
    if not s.attention_factor and all_dim == s.mscale_all_dim:
        return s
    excess = s.rotary_factor * s.gain(all_dim) - 1.0
    if s.factor <= 1 and excess:
        raise ValueError(
            f"{source}: attention_factor={s.attention_factor} with factor={s.factor} is not "
            "supported in latent attention; supported: a factor above 1"
        )
    mscale = excess / (s.gain(1.0) - 1.0) if excess else 0.0
    return replace(s, mscale=mscale, mscale_all_dim=all_dim, attention_factor=0.0)


@dataclass(frozen=True, kw_only=True)
class DeepSeek(Family):
    """A family with latent attention."""

    config_class: str = "MLATransformerConfig"

    def read_attention(self, raw: Mapping[str, Any], source: str) -> Attention:
        """Reads latent attention from `raw`. Raises ValueError naming the key that is wrong or
        unsupported, such as another number of key/value heads than of query heads."""
        refuse_others(raw, {"rope_interleave": (True,)}, source)
        heads = positive(raw, "num_attention_heads", source)
        if (kv := positive(raw, "num_key_value_heads", source, default=heads)) != heads:
            raise ValueError(
                f"{source}: num_key_value_heads={kv} with num_attention_heads={heads} is not "
                "supported in latent attention; supported: equally many"
            )
        nope, rotary = (positive(raw, k, source) for k in ("qk_nope_head_dim", "qk_rope_head_dim"))
        if rotary % 2:
            raise ValueError(
                f"{source}: qk_rope_head_dim={rotary} is odd; rotary embeddings need it even"
            )
        return Latent(
            heads=heads,
            kv_heads=heads,
            head_dim=nope + rotary,
            v_head_dim=positive(raw, "v_head_dim", source),
            rotary_dim=rotary,
            q_rank=positive(raw, "q_lora_rank", source) if raw.get("q_lora_rank") else None,
            kv_rank=positive(raw, "kv_lora_rank", source),
            nope_dim=nope,
        )

    def attention_params(self, m: ModelConfig) -> tuple[Param, ...]:
        """Returns the projections to and from latents, with their norms."""
        assert isinstance(m.attention, Latent)
        queries = _QUERIES if m.attention.q_rank is None else _LATENT_QUERIES
        return (*queries, *_KEYS_AND_VALUES)

    def transformer_fields(self, m: ModelConfig) -> dict[str, Any]:
        """Returns the fields of latent attention. megatron-core takes rotary dimensions apart as
        Hugging Face does (even ones first) and, unlike elsewhere, its YaRN is the same to the
        bit."""
        a = m.attention
        assert isinstance(a, Latent)
        fields: dict[str, Any] = dict(
            q_lora_rank=a.q_rank,
            kv_lora_rank=a.kv_rank,
            qk_head_dim=a.nope_dim,
            qk_pos_emb_head_dim=a.rotary_dim,
            v_head_dim=a.v_head_dim,
            qk_layernorm=True,
            rotary_base=m.rope_theta,
            rope_type="rope",
            rotary_scaling_factor=1.0,  # the default is 40, and scales scores whatever the type
            apply_rope_fusion=False,  # the kernel works in place and for YaRN alone
        )
        if (scaling := m.rope_scaling) is not None:
            fields |= dict(
                rope_type="yarn",
                rotary_scaling_factor=scaling.factor,
                original_max_position_embeddings=scaling.original_max_position_embeddings,
                beta_fast=scaling.beta_fast,
                beta_slow=scaling.beta_slow,
                mscale=scaling.mscale,
                mscale_all_dim=scaling.mscale_all_dim,
            )
        return fields

    def patch(self, chunk: Any, m: ModelConfig) -> None:
        """Sets the latents' norms and projections, and YaRN's rounding; the frequencies stay
        megatron-core's own."""
        from megarl.models.layers import settle_mla

        settle_mla(chunk)
        if m.rope_scaling is not None and m.rope_scaling.exact:
            for module in chunk.modules():
                if hasattr(module, "correction_range_round_to_int"):
                    module.correction_range_round_to_int = False


def _v2_experts(raw: Mapping[str, Any], source: str) -> MoEShape:
    """Reads DeepSeek-V2's block: a group is judged by its best expert (2024, section 2.2.2)."""
    refuse_others(  # Hugging Face's model reads none of these but topk_method
        raw,
        {
            "scoring_func": ("softmax", None),
            "topk_method": ("greedy", "group_limited_greedy"),
            "norm_topk_prob": (False,),
        },
        source,
    )
    shape = leading_dense_experts(raw, source)
    if raw.get("topk_method", "greedy") != "group_limited_greedy":
        return shape
    return in_groups(shape, raw, source, best=1)


_V2 = DeepSeek(
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    moe=MoE(_v2_experts, shared=shared_expert("mlp.shared_experts")),
    rope_scalings={"yarn": _yarn},
    defaults={"q_lora_rank": 1536, "topk_method": "greedy"},
)
V3 = DeepSeek(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    moe=MoE(sigmoid_experts, shared=shared_expert("mlp.shared_experts"), bias=ROUTER_BIAS),
    rope_scalings={"yarn": _yarn},
    defaults={
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
        "q_lora_rank": 1536,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    },
)
FAMILIES = (_V2, V3)
