"""Declares Qwen3-Next and the text models of Qwen3.5: three layers of four are a gated delta
network (Yang et al., 2024, arXiv 2412.06464), the others attend, and their output is gated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megarl.models.families.base import Family
from megarl.models.families.experts import (
    SHARED_GATE,
    MoE,
    gated_shared_experts,
    shared_expert,
)
from megarl.models.families.fields import positive, refuse_others
from megarl.models.families.params import Param
from megarl.models.ops import Dim, H, Op, Replicated, RowParallel, Sections
from megarl.models.shapes import Attention, ModelConfig, MoEShape, Recurrent, Wrapper

_STATE, _FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class GatedDelta(Recurrent):
    """A layer whose `key_heads` heads of queries and keys, of size `key_dim`, serve equally many of
    the `value_heads` heads of values, of size `value_dim`, each with a state [key_dim, value_dim].
    Queries, keys and values first pass a convolution over `kernel` tokens."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def served(self) -> int:
        """Returns how many value heads a key head serves."""
        return self.value_heads // self.key_heads

    @property
    def served_values(self) -> int:
        """Returns the size of the values that a key head serves."""
        return self.served * self.value_dim

    @property
    def values(self) -> int:
        """Returns the size of all heads' values together, which the output projection takes."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Returns the size of queries, keys and values together."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def state(self) -> int:
        """Returns the numbers of all heads' states and of the inputs that the convolution looks
        back at."""
        return self.value_heads * self.key_dim * self.value_dim + (self.kernel - 1) * self.channels

    @property
    def products(self) -> int:
        """Returns the multiply-adds of reading the state by a key, changing it, and reading it by a
        query. In chunks there are more."""
        return 3 * self.value_heads * self.key_dim * self.value_dim

    def weights(self, hidden: int) -> int:
        """Returns the numbers of both projections and of the convolution."""
        rows = self.channels + self.values + 2 * self.value_heads
        return hidden * (rows + self.values) + self.channels * self.kernel

    def sizes_to_cut(self) -> dict[str, int]:
        """Returns nothing: what tensor and context parallelism share divides more."""
        return {}

    def sizes_to_share(self) -> dict[str, int]:
        """Returns the heads, which ranks share out whole."""
        return {"linear_num_key_heads": self.key_heads}

    def kept(self, tp: int) -> tuple[float, float]:
        """Returns the numbers of a rank's heads, as fla's kernels keep them: the projection's
        output; the convolution's, with queries and keys repeated for every value head; rates and
        decays; a row of 64 of the solved system; outputs before and after the norm, and both
        factors of the gate and its input in fp32."""
        repeated = 2 * self.value_heads * self.key_dim + self.values
        projected = self.channels + self.values + 2 * self.value_heads
        own = projected + repeated + (64 + 6) * self.value_heads + (2 + 6) * self.values
        return 0, own / tp


_GROUPS, _KEY, _VALUES = "recurrent.key_heads", "recurrent.key_dim", "recurrent.served_values"
_SERVED = "recurrent.served"


def _param(name: str, hf: tuple[str, ...], op: Op, **how: Any) -> Param:
    return Param(f"self_attention.{name}", tuple(f"linear_attn.{x}" for x in hf), op, **how)


_KEYS_AND_VALUES = (_KEY, _KEY, _VALUES)
_PER_HEAD = Sections(_GROUPS, ((_SERVED,),))
_AFTER_INPUTS = (
    _param(
        "conv1d.weight",
        ("conv1d.weight",),
        Sections(_GROUPS, (_KEYS_AND_VALUES,), (1, "recurrent.kernel")),
        initial="normal",
        parts=("query", "key", "value"),
    ),
    _param("dt_bias", ("dt_bias",), _PER_HEAD, initial="ones"),
    # Qwen3.5 publishes these in fp32, Qwen3.6 in bfloat16: vllm-project/vllm#51836 (2026-08-11).
    _param("A_log", ("A_log",), _PER_HEAD, initial="log_uniform", fp32=True),
    _param("out_norm.weight", ("norm.weight",), Replicated("recurrent.value_dim"), fp32=True),
    _param("out_proj.weight", ("out_proj.weight",), RowParallel(H, "recurrent.values")),
)


def _delta_params(
    inputs: tuple[str, ...], sections: tuple[tuple[Dim, ...], ...], *, by_group: bool
) -> tuple[Param, ...]:
    """Returns a layer's parameters; `inputs`: HF's names of the input projection's tensors, each
    with its sections."""
    projection = _param(
        "in_proj.weight",
        tuple(f"in_proj_{x}.weight" for x in inputs),
        Sections(_GROUPS, sections, (H,), by_group),
        parts=("query", "key", "value", "z", "beta", "alpha"),
    )
    return (projection, *_AFTER_INPUTS)


@dataclass(frozen=True, kw_only=True)
class Hybrid(Family):
    """A family with gated delta networks."""

    def read_attention(self, raw: Mapping[str, Any], source: str) -> Attention:
        """Reads the attention of the layers that attend, all of them to all tokens before."""
        refuse_others(raw, {"attn_output_gate": (True, None)}, source)
        return super().read_attention({**raw, "layer_types": None}, source)

    def read_recurrent(self, raw: Mapping[str, Any], source: str) -> Recurrent:
        """Reads the sizes of the other layers, and which these are. Raises ValueError naming the
        key that is wrong or unsupported."""
        key_heads, value_heads = (
            positive(raw, f"linear_num_{x}_heads", source) for x in ("key", "value")
        )
        if value_heads % key_heads:
            raise ValueError(
                f"{source}: linear_num_value_heads={value_heads} is not a multiple of "
                f"linear_num_key_heads={key_heads}"
            )
        return GatedDelta(
            layers=_state_layers(raw, source),
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=positive(raw, "linear_key_head_dim", source),
            value_dim=positive(raw, "linear_value_head_dim", source),
            kernel=positive(raw, "linear_conv_kernel_dim", source),
        )

    def transformer_fields(self, m: ModelConfig) -> dict[str, Any]:
        """Returns the fields with the sizes of gated delta networks."""
        d = m.recurrent
        assert isinstance(d, GatedDelta)
        return super().transformer_fields(m) | dict(
            linear_conv_kernel_dim=d.kernel,
            linear_key_head_dim=d.key_dim,
            linear_value_head_dim=d.value_dim,
            linear_num_key_heads=d.key_heads,
            linear_num_value_heads=d.value_heads,
        )

    def patch_spec(self, spec: Any, m: ModelConfig, first: int) -> None:
        """Gives layers the attention that cuts its gates, and gated delta networks where they
        are."""
        from megarl.models.gated_delta import GatedAttention

        for layer in spec.layer_specs:
            layer.submodules.self_attention.module = GatedAttention
        super().patch_spec(spec, m, first)

    def recurrent_spec(self, m: ModelConfig, attention: Any) -> Any:
        """Returns the spec of a gated delta network with the linear layers of `attention`'s."""
        from megarl.models.gated_delta import delta_spec

        return delta_spec(attention)


def _state_layers(raw: Mapping[str, Any], source: str) -> tuple[int, ...]:
    layers = range(positive(raw, "num_hidden_layers", source))
    types = raw.get("layer_types")
    if types is None:
        step = positive(raw, "full_attention_interval", source)
        return tuple(i for i in layers if (i + 1) % step)
    if not isinstance(types, list) or len(types) != len(layers) or set(types) - {_STATE, _FULL}:
        raise ValueError(
            f"{source}: layer_types={types!r}; expected a list of {len(layers)} types, "
            f"each {_STATE!r} or {_FULL!r}"
        )
    return tuple(i for i in layers if types[i] == _STATE)


def _every_layer(raw: Mapping[str, Any], source: str) -> MoEShape:
    """Reads Qwen3.5's block, which Hugging Face puts into every layer."""
    settings: dict[str, tuple[Any, ...]] = {
        "norm_topk_prob": (True, None),
        "decoder_sparse_step": (1, None),
        "mlp_only_layers": ([],),
    }
    refuse_others(raw, settings, source)
    return gated_shared_experts(raw, source)


def _moe(read: Callable[[Mapping[str, Any], str], MoEShape]) -> MoE:
    return MoE(read, shared=(*shared_expert("mlp.shared_expert"), SHARED_GATE))


def _beside_vision(architecture: str) -> Wrapper:
    return Wrapper(architecture=architecture, model="model.language_model.")


_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "norm_topk_prob": True,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_COMMON: dict[str, Any] = dict(
    zero_centred=True,
    qk_norm=True,
    output_gate=True,
    partial_rotary=True,
    ignored_fields=("mlp_bias", "partial_rotary_factor", "use_mrope"),
)
_BY_PART = _delta_params(
    ("qkv", "z", "b", "a"), (_KEYS_AND_VALUES, (_VALUES,), (_SERVED,), (_SERVED,)), by_group=False
)
_BY_HEAD = _delta_params(
    ("qkvz", "ba"), ((*_KEYS_AND_VALUES, _VALUES), (_SERVED, _SERVED)), by_group=True
)
FAMILIES = (
    Hybrid(
        name="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        moe=_moe(gated_shared_experts),
        recurrent_params=tuple(replace(p, fp32=False) for p in _BY_HEAD),
        defaults=_DEFAULTS,
        **_COMMON,
    ),
    Hybrid(
        name="qwen3_5_text",
        architecture="Qwen3_5ForCausalLM",
        classifier="Qwen3_5TextForCausalLM",
        wrappers=(_beside_vision("Qwen3_5ForConditionalGeneration"),),
        recurrent_params=_BY_PART,
        defaults={**_DEFAULTS, "num_key_value_heads": 4},
        **_COMMON,
    ),
    Hybrid(
        name="qwen3_5_moe_text",
        architecture="Qwen3_5MoeForCausalLM",
        classifier="Qwen3_5MoeTextForCausalLM",
        wrappers=(_beside_vision("Qwen3_5MoeForConditionalGeneration"),),
        moe=_moe(_every_layer),
        recurrent_params=_BY_PART,
        defaults=_DEFAULTS,
        **_COMMON,
    ),
)
