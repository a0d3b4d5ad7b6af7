"""The families, one declaration each: every Megatron parameter once, with its HF tensors.

To add a family: list its layer's parameters (most are shared below), name its architecture, and add
it to FAMILIES. Loading, saving, streaming, coverage checks and random weights follow.

Megatron names are those of megatron-core's local layer spec, with global layer numbers. Names in
a layer are relative to `decoder.layers.{i}.`, its HF names to `model.layers.{i}.`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.models.ops import (
    FusedQKV,
    GateUp,
    Op,
    Replicated,
    RowParallel,
    VocabParallel,
    head_dim,
    hidden,
    intermediate,
    query,
)


@dataclass(frozen=True)
class Param:
    """`stage`: "first" (beside the embedding), "layer", or "last" (beside the output layer).
    `copy_on_last`: the name under which a tied parameter is repeated on the last pipeline stage.
    """

    name: str
    hf: tuple[str, ...]
    op: Op
    stage: str = "layer"
    copy_on_last: str | None = None

    def at_layer(self, i: int) -> Param:
        return Param(
            f"decoder.layers.{i}.{self.name}",
            tuple(f"model.layers.{i}.{h}" for h in self.hf),
            self.op,
        )


EMBEDDING = Param(
    "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), VocabParallel(), "first"
)
TIED_EMBEDDING = Param(
    EMBEDDING.name, EMBEDDING.hf, EMBEDDING.op, "first", copy_on_last="output_layer.weight"
)
FINAL_NORM = Param(
    "decoder.final_layernorm.weight", ("model.norm.weight",), Replicated(hidden), "last"
)
OUTPUT = Param("output_layer.weight", ("lm_head.weight",), VocabParallel(), "last")

_QKV = ("q_proj", "k_proj", "v_proj")
QKV = Param(
    "self_attention.linear_qkv.weight", tuple(f"self_attn.{x}.weight" for x in _QKV), FusedQKV()
)
QKV_BIAS = Param(
    "self_attention.linear_qkv.bias",
    tuple(f"self_attn.{x}.bias" for x in _QKV),
    FusedQKV(bias=True),
)
PROJ = Param(
    "self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), RowParallel(hidden, query)
)
QK_NORMS = tuple(
    Param(
        f"self_attention.{x}_layernorm.weight",
        (f"self_attn.{x}_norm.weight",),
        Replicated(head_dim),
    )
    for x in "qk"
)
MLP = (
    Param("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), GateUp()),
    Param("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), RowParallel(hidden, intermediate)),
)
NORMS = (
    Param("input_layernorm.weight", ("input_layernorm.weight",), Replicated(hidden)),
    Param("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), Replicated(hidden)),
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """`ignored_fields`: config fields that HF's own implementation of the family does not read."""

    name: str
    architecture: str
    layer: tuple[Param, ...]
    default_head_dim: int | None = None
    ignored_fields: tuple[str, ...] = ()

    @property
    def qkv_bias(self) -> bool:
        return QKV_BIAS in self.layer

    @property
    def qk_norm(self) -> bool:
        return QK_NORMS[0] in self.layer

    def params(self, num_layers: int, tied: bool) -> Iterator[tuple[Param, int | None]]:
        """Every parameter in HF order, with the layer it belongs to."""
        yield (TIED_EMBEDDING if tied else EMBEDDING), None
        for i in range(num_layers):
            for p in self.layer:
                yield p.at_layer(i), i
        yield FINAL_NORM, None
        if not tied:
            yield OUTPUT, None


LLAMA = Family(name="llama", architecture="LlamaForCausalLM", layer=(QKV, PROJ, *MLP, *NORMS))
QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    layer=(QKV, QKV_BIAS, PROJ, *MLP, *NORMS),
    ignored_fields=("attention_bias", "mlp_bias"),
)
QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    layer=(QKV, PROJ, *QK_NORMS, *MLP, *NORMS),
    default_head_dim=128,
    ignored_fields=("mlp_bias",),
)
FAMILIES = {f.name: f for f in (LLAMA, QWEN2, QWEN3)}
