"""Holds everything megarl knows of one kind of model, a family. The default is Llama's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megarl.models.families import grouped_query
from megarl.models.families.experts import MoE
from megarl.models.families.grouped_query import GroupedQuery
from megarl.models.families.params import (
    EMBEDDING,
    FINAL_NORM,
    GATED_QKV,
    MLP,
    NORMS,
    OUTPUT,
    POST_NORMS,
    PROJ,
    QK_NORMS,
    QKV,
    QKV_BIAS,
    TIED_EMBEDDING,
    VALUE_HEAD,
    VALUE_HEAD_BIAS,
    WHOLE_QK_NORMS,
    Param,
)
from megarl.models.families.rope import (
    SCALINGS,
    Rope,
    ScalingReader,
    rope,
    rope_by_type,
    rope_settings,
)
from megarl.models.shapes import Attention, ModelConfig, Recurrent, Wrapper


@dataclass(frozen=True, kw_only=True)
class Family:
    """Describes a decoder whose layers are an attention and an MLP. Subclasses override what
    differs.

    `model_type`: config.json's, needed where another family has the same architecture and no
    model_type. `wrappers`: what publishes it beside a vision tower.
    `classifier`: in place of `architecture` where HF's classifiers of the family have another
    name, with ForCausalLM for what they end in.
    `mlp`, `norms`: parameters of a dense layer's MLP and of a layer's norms, which say what is
    normalised: inputs of attention and MLP, their outputs, or both. `zero_centred`: its
    norms multiply with 1 + weight, not those within a recurrent layer. `moe`: its
    mixture-of-experts block. `recurrent_params`: those of a recurrent layer before its MLP.
    `qkv_bias`, `qk_norm`, `whole_norm`, `interleaved`, `output_gate`: see GroupedQuery; a text is
    the key of config.json that says so. `slides`: which layers HF's implementation gives a sliding
    window, a rule of megarl.models.families.grouped_query; None: it knows no window.
    `partial_rotary`: it reads partial_rotary_factor. `rope_scalings`: the kinds of rotary scaling
    it has, each with its reader. `rope_by_type`: layers with a window have rotary settings of their
    own.
    `config_class`: the name of megatron-core's class of TransformerConfig.
    `defaults`: what HF's config class takes for a key that config.json leaves out; those of all
    families are megarl.models.hf_config.DEFAULTS. They leave out the sizes that weights' shapes
    need: a config.json that lacks one is refused.
    `ignored_fields`: config fields that HF's own implementation of the family does not read, or
    that this family reads itself.
    """

    name: str
    architecture: str
    model_type: str | None = None
    wrappers: tuple[Wrapper, ...] = ()
    classifier: str | None = None
    mlp: tuple[Param, ...] = MLP
    norms: tuple[Param, ...] = NORMS
    zero_centred: bool = False
    moe: MoE | None = None
    recurrent_params: tuple[Param, ...] = ()
    qkv_bias: bool | str = False
    qk_norm: bool | str = False
    whole_norm: bool = False
    interleaved: bool = False
    output_gate: bool = False
    slides: str | None = None
    partial_rotary: bool = False
    rope_scalings: Mapping[str, ScalingReader] = field(default_factory=lambda: SCALINGS)
    rope_by_type: bool = False
    config_class: str = "TransformerConfig"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    ignored_fields: tuple[str, ...] = ()

    # ---- config.json

    def read_attention(self, raw: Mapping[str, Any], source: str) -> Attention:
        """Returns the attention of `raw`, completed with defaults; `source` names it in errors.
        Raises ValueError naming the key that is wrong or unsupported."""
        a = grouped_query.read(raw, source, slides=self.slides)
        return replace(
            a,
            rotary_dim=_rotary_dim(raw, a.head_dim, source) if self.partial_rotary else a.head_dim,
            qkv_bias=_says(raw, self.qkv_bias),
            qk_norm=_says(raw, self.qk_norm),
            whole_norm=self.whole_norm,
            interleaved=self.interleaved,
            output_gate=self.output_gate,
        )

    def read_recurrent(self, raw: Mapping[str, Any], source: str) -> Recurrent | None:
        """Returns the kind of the layers that do not attend; None where all do. Raises ValueError
        naming the key that is wrong or unsupported."""
        return None

    def read_rope(self, raw: Mapping[str, Any], source: str) -> tuple[Rope, Rope | None]:
        """Returns rotary base and scaling, and those of layers with a window where they have their
        own. Raises ValueError naming the setting that is wrong or unsupported."""
        if self.rope_by_type:
            return rope_by_type(raw, source, self.rope_scalings)
        return rope(raw, source, partial=self.partial_rotary, scalings=self.rope_scalings), None

    # ---- the declaration

    def params(self, m: ModelConfig) -> Iterator[tuple[Param, int | None]]:
        """Yields every parameter of `m` in HF order, with the number of its layer."""
        for p, layer in self._params(m):
            if self.zero_centred and p.name.endswith("layernorm.weight"):
                p = replace(p, initial="zeros")
            yield (replace(p, hf=tuple(map(m.hf_name, p.hf))) if m.wrapper else p), layer

    def _params(self, m: ModelConfig) -> Iterator[tuple[Param, int | None]]:
        yield (TIED_EMBEDDING if m.tie_word_embeddings else EMBEDDING), None
        for i in range(m.num_layers):
            for p in (*self._mixer_params(m, i), *self._mlp_params(m, i), *self.norms):
                yield p.at_layer(i), i
        yield FINAL_NORM, None
        if m.head == "value":
            yield VALUE_HEAD, None
            if m.score_bias:
                yield VALUE_HEAD_BIAS, None
        elif not m.tie_word_embeddings:
            yield OUTPUT, None

    def attention_params(self, m: ModelConfig) -> tuple[Param, ...]:
        """Returns the parameters, before its MLP, of a layer that attends."""
        a = _grouped(m)
        bias = (QKV_BIAS,) * a.qkv_bias
        norms = WHOLE_QK_NORMS if a.whole_norm else QK_NORMS * a.qk_norm
        return (GATED_QKV if a.output_gate else QKV, *bias, PROJ, *norms)

    def _mixer_params(self, m: ModelConfig, layer: int) -> tuple[Param, ...]:
        recurrent = m.mixer(layer) is m.recurrent
        return self.recurrent_params if recurrent else self.attention_params(m)

    def _mlp_params(self, m: ModelConfig, layer: int) -> tuple[Param, ...]:
        if m.moe is None or layer in m.moe.dense_layers:
            return self.mlp
        assert self.moe is not None
        return self.moe.params(m.moe.num_experts)

    # ---- megatron-core; what needs torch is imported where it is used

    def transformer_fields(self, m: ModelConfig) -> dict[str, Any]:
        """Returns the TransformerConfig's fields that depend on the kind of attention."""
        a = _grouped(m)
        fields: dict[str, Any] = dict(
            add_qkv_bias=a.qkv_bias, qk_layernorm=a.qk_norm, rotary_interleaved=a.interleaved
        )
        if self.zero_centred:
            fields["layernorm_zero_centered_gamma"] = True
        if a.output_gate:
            fields["attention_output_gate"] = True
        if a.scaled_by:
            fields["softmax_scale"] = a.scaled_by**-0.5
        if a.interleaved or a.rotary_dim < a.head_dim:
            # for packed sequences megatron-core does not tell the kernel to rotate pairs of
            # neighbours, and the CPU kernel rotates whole heads
            fields["apply_rope_fusion"] = False
        if a.window is not None:
            # megatron-core and Transformer Engine count the tokens before the token itself
            fields["window_size"] = (a.window - 1, 0)
            fields["window_attn_skip_freq"] = [
                int(i in a.window_layers) for i in range(m.num_layers)
            ]
        return fields

    def recurrent_spec(self, m: ModelConfig, attention: Any) -> Any:
        """Returns the ModuleSpec that a recurrent layer has in place of `attention`'s. Raises
        NotImplementedError in a family without such layers."""
        raise NotImplementedError(f"{self.name} has no recurrent layers")

    def patch_spec(self, spec: Any, m: ModelConfig, first: int) -> None:
        """Changes megatron-core's spec of the layers from number `first` on, before they are built
        from it. Layers that are alike may be one object."""
        for i, layer in enumerate(spec.layer_specs):
            if m.mixer(first + i) is m.recurrent:
                mixer = self.recurrent_spec(m, layer.submodules.self_attention)
                parts = replace(layer.submodules, self_attention=mixer)
                spec.layer_specs[i] = replace(layer, submodules=parts)
        from megarl.models import layers

        names = {p.name for p in self.norms}
        if self.whole_norm:
            layers.normalise_whole_heads(spec)
        if names.intersection(p.name for p in POST_NORMS):
            layers.sandwich(spec)
        if names.isdisjoint(p.name for p in NORMS):
            layers.normalise_no_inputs(spec)

    def patch(self, chunk: Any, m: ModelConfig) -> None:
        """Sets what the constructors of a built GPTModel take no argument for."""
        from megarl.models.layers import rotate_windows
        from megarl.models.rope import inv_freq

        frequencies = chunk.rotary_pos_emb
        frequencies.inv_freq = inv_freq(m).to(frequencies.inv_freq.device)
        if m.window_rope is not None:
            rotate_windows(chunk, m)


def _says(raw: Mapping[str, Any], field: bool | str) -> bool:
    return bool(raw.get(field)) if isinstance(field, str) else field


def _grouped(m: ModelConfig) -> GroupedQuery:
    assert isinstance(m.attention, GroupedQuery), f"{m.family} overrides what needs its attention"
    return m.attention


def _rotary_dim(raw: Mapping[str, Any], head_dim: int, source: str) -> int:
    """Returns how many numbers of a head are rotated. A factor among the rotary settings overrides
    one beside them, as in Hugging Face's configs."""
    settings = rope_settings(raw, source)
    factor = settings.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    dim = int(head_dim * factor) if isinstance(factor, int | float) else 0
    if dim % 2 or not 2 <= dim <= head_dim:
        raise ValueError(
            f"{source}: partial_rotary_factor={factor!r} of head_dim={head_dim} is not supported; "
            "supported: an even number of a head's numbers"
        )
    return dim
