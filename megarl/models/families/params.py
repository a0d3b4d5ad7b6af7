"""Declares the parameters that families share: each Megatron parameter once, with its HF tensors.

Megatron names are those of megatron-core's local layer spec, with global layer numbers. Names in
a layer are relative to `decoder.layers.{i}.`, its HF names to `model.layers.{i}.`; in names of an
expert `#` stands for its number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megarl.models.ops import (
    FusedQKV,
    GateUp,
    H,
    Op,
    Replicated,
    RowParallel,
    Shape,
    VocabParallel,
)
from megarl.models.shapes import ModelConfig


@dataclass(frozen=True)
class Param:
    """One Megatron parameter and the HF tensors it is made of.

    `stage`: "first" (beside the embedding), "layer", or "last" (beside the output layer).
    `copy_on_last`: the name under which a tied parameter is repeated on the last pipeline stage.
    `expert`: the number of the expert it belongs to, which says who holds it.
    `buffer`: not trained. `fp32`: published in fp32, and fp32 in a bfloat16 model.
    `initial`: what random weights are: "zeros", "ones", "normal" (N(0, initializer_range)) or
    "log_uniform" (the logarithm of a uniform number in [0.01, 16)); "": ones where HF has a vector,
    else normal.
    `parts`: names of the sections of `Sections` that megatron-core's checkpoints keep one by one.
    `stacked`: its HF tensor is that of all experts, one after the other: [E, ...].
    """

    name: str
    hf: tuple[str, ...]
    op: Op
    stage: str = "layer"
    copy_on_last: str | None = None
    expert: int | None = None
    buffer: bool = False
    fp32: bool = False
    initial: str = ""
    parts: tuple[str, ...] = ()
    stacked: bool = False

    def hf_shapes(self, m: ModelConfig) -> tuple[Shape, ...]:
        """Returns the shapes of its HF tensors, which may be those of all experts."""
        shapes = self.op.hf_shapes(m)
        return tuple((m.experts.num_experts, *s) for s in shapes) if self.stacked else shapes

    def at_layer(self, i: int) -> Param:
        """Returns the parameter of layer i: its names become global."""
        hf = tuple(f"model.layers.{i}.{h}" for h in self.hf)
        return replace(self, name=f"decoder.layers.{i}.{self.name}", hf=hf)

    def of_expert(self, e: int) -> Param:
        """Returns the parameter of expert e: `#` in its names becomes e."""
        name, *hf = (n.replace("#", str(e)) for n in (self.name, *self.hf))
        return replace(self, name=name, hf=tuple(hf), expert=e)


EMBEDDING = Param(
    "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), VocabParallel(), "first"
)
TIED_EMBEDDING = replace(EMBEDDING, copy_on_last="output_layer.weight")
FINAL_NORM = Param("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated(H), "last")
OUTPUT = Param("output_layer.weight", ("lm_head.weight",), VocabParallel(), "last")
# in place of OUTPUT in a value model; HF's token classifiers have the bias, sequence classifiers do
# not
VALUE_HEAD = Param("output_layer.weight", ("score.weight",), Replicated(1, H), "last")
VALUE_HEAD_BIAS = Param(
    "output_layer.bias", ("score.bias",), Replicated(1), "last", initial="zeros"
)

_QKV = ("q_proj", "k_proj", "v_proj")
QKV = Param(
    "self_attention.linear_qkv.weight", tuple(f"self_attn.{x}.weight" for x in _QKV), FusedQKV()
)
GATED_QKV = replace(QKV, op=FusedQKV(gate=True))
QKV_BIAS = Param(
    "self_attention.linear_qkv.bias",
    tuple(f"self_attn.{x}.bias" for x in _QKV),
    FusedQKV(bias=True),
    initial="zeros",
)
_ATTENDED = "attention.attended"
PROJ = Param(
    "self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), RowParallel(H, _ATTENDED)
)
QK_NORMS = tuple(
    Param(
        f"self_attention.{x}_layernorm.weight",
        (f"self_attn.{x}_norm.weight",),
        Replicated("attention.head_dim"),
    )
    for x in "qk"
)
# where all heads are normalised together; every rank holds all
WHOLE_QK_NORMS = tuple(
    replace(norm, op=Replicated(f"attention.{width}"))
    for norm, width in zip(QK_NORMS, ("query", "keys"), strict=True)
)
_INNER = "intermediate_size"
MLP = (
    Param("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), GateUp()),
    Param("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), RowParallel(H, _INNER)),
)
FUSED_MLP = (
    Param("mlp.linear_fc1.weight", ("mlp.gate_up_proj.weight",), GateUp(fused=True)),
    MLP[1],
)
NORMS = (
    Param("input_layernorm.weight", ("input_layernorm.weight",), Replicated(H)),
    Param("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), Replicated(H)),
)
# norms of the outputs of attention and MLP; HF has the same names
POST_NORMS = tuple(
    Param(name, (name,), Replicated(H))
    for name in ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight")
)
