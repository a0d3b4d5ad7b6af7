"""The families, one declaration each: every Megatron parameter once, with its HF tensors.

To add a family: list its layer's parameters (most are shared below), name its architecture, and add
it to FAMILIES. Loading, saving, streaming, coverage checks and random weights follow.

Megatron names are those of megatron-core's local layer spec, with global layer numbers. Names in
a layer are relative to `decoder.layers.{i}.`, its HF names to `model.layers.{i}.`; in names of an
expert `#` stands for its number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megarl.models import sliding_window
from megarl.models.ops import (
    ColumnParallel,
    FusedQKV,
    GateUp,
    Op,
    Replicated,
    RowParallel,
    VocabParallel,
    attended,
    expert_intermediate,
    head_dim,
    hidden,
    intermediate,
    kv_down,
    kv_rank,
    kv_up,
    num_experts,
    one,
    q_rank,
    query,
    shared_intermediate,
)

if TYPE_CHECKING:
    from megarl.models.hf_config import ModelConfig


@dataclass(frozen=True)
class Param:
    """`stage`: "first" (beside the embedding), "layer", or "last" (beside the output layer).
    `copy_on_last`: the name under which a tied parameter is repeated on the last pipeline stage.
    `expert`: the number of the expert it belongs to, which says who holds it.
    `buffer`: not trained, and fp32 in whichever dtype the model is.
    """

    name: str
    hf: tuple[str, ...]
    op: Op
    stage: str = "layer"
    copy_on_last: str | None = None
    expert: int | None = None
    buffer: bool = False

    def at_layer(self, i: int) -> Param:
        hf = tuple(f"model.layers.{i}.{h}" for h in self.hf)
        return replace(self, name=f"decoder.layers.{i}.{self.name}", hf=hf)

    def of_expert(self, e: int) -> Param:
        name, *hf = (n.replace("#", str(e)) for n in (self.name, *self.hf))
        return replace(self, name=name, hf=tuple(hf), expert=e)


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
# in place of OUTPUT in a value model; HF's token classifiers have the bias, sequence ones do not
VALUE_HEAD = Param("output_layer.weight", ("score.weight",), Replicated(one, hidden), "last")
VALUE_HEAD_BIAS = Param("output_layer.bias", ("score.bias",), Replicated(one), "last")

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
    "self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), RowParallel(hidden, attended)
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
FUSED_MLP = (
    Param("mlp.linear_fc1.weight", ("mlp.gate_up_proj.weight",), GateUp(fused=True)),
    MLP[1],
)
NORMS = (
    Param("input_layernorm.weight", ("input_layernorm.weight",), Replicated(hidden)),
    Param("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), Replicated(hidden)),
)
# of what attention and MLP add to the residual stream; HF has the same names
POST_NORMS = tuple(
    Param(name, (name,), Replicated(hidden))
    for name in ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight")
)


def _latent(name: str, hf: str, op: Op) -> Param:
    return Param(f"self_attention.{name}.weight", (f"self_attn.{hf}.weight",), op)


# --8<-- [start:mla]
# multi-head latent attention; queries by way of a latent, or straight from the hidden state
MLA_Q = (_latent("linear_q_proj", "q_proj", ColumnParallel(query, hidden)),)
MLA_Q_LATENT = (
    _latent("linear_q_down_proj", "q_a_proj", Replicated(q_rank, hidden)),
    _latent("q_layernorm", "q_a_layernorm", Replicated(q_rank)),
    _latent("linear_q_up_proj", "q_b_proj", ColumnParallel(query, q_rank)),
)
MLA = (
    _latent("linear_kv_down_proj", "kv_a_proj_with_mqa", Replicated(kv_down, hidden)),
    _latent("kv_layernorm", "kv_a_layernorm", Replicated(kv_rank)),
    _latent("linear_kv_up_proj", "kv_b_proj", ColumnParallel(kv_up, kv_rank)),
    PROJ,
)
# --8<-- [end:mla]


@dataclass(frozen=True)
class MoE:
    """What stands in place of MLP in a mixture-of-experts layer: the router, each expert, and what
    every token meets (held like a dense MLP). `bias`: added to a sigmoid router's scores when it
    chooses; without one the router has a softmax."""

    router: Param
    expert: tuple[Param, ...]
    shared: tuple[Param, ...] = ()
    bias: Param | None = None


def moe(
    hf: str,
    gate: str,
    up: str,
    down: str,
    shared: tuple[Param, ...] = (),
    bias: Param | None = None,
) -> MoE:
    """`hf`: HF's name of the block; `gate`, `up`, `down`: its names of an expert's matrices."""
    fc1, fc2 = (f"mlp.experts.local_experts.#.linear_fc{i}.weight" for i in (1, 2))
    gate, up, down = (f"{hf}.experts.#.{x}.weight" for x in (gate, up, down))
    return MoE(
        Param("mlp.router.weight", (f"{hf}.gate.weight",), Replicated(num_experts, hidden)),
        (
            Param(fc1, (gate, up), GateUp(expert_intermediate)),
            Param(fc2, (down,), RowParallel(hidden, expert_intermediate)),
        ),
        shared,
        bias,
    )


def shared_expert(hf: str) -> tuple[Param, ...]:
    """`hf`: HF's name of the expert that every token meets."""
    return (
        Param(
            "mlp.shared_experts.linear_fc1.weight",
            (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"),
            GateUp(shared_intermediate),
        ),
        Param(
            "mlp.shared_experts.linear_fc2.weight",
            (f"{hf}.down_proj.weight",),
            RowParallel(hidden, shared_intermediate),
        ),
    )


SHARED_GATE = Param(
    "mlp.shared_experts.gate_weight", ("mlp.shared_expert_gate.weight",), Replicated(one, hidden)
)
ROUTER_BIAS = Param(
    "mlp.router.expert_bias",
    ("mlp.gate.e_score_correction_bias",),
    Replicated(num_experts),
    buffer=True,
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """`attention`: a layer's parameters before its MLP. `mlp`: of a dense layer's MLP. `norms`: of
    its norms. `moe`: its mixture-of-experts block.
    `mla`: its queries have parameters of their own, before those of `attention`, and its config is
    DeepSeek's.
    `glm`: rotary embeddings turn pairs of neighbours, and its config, GLM's, says how many of them
    and whether queries, keys and values have biases.
    `expert_size_field`: the config field with an expert's intermediate size.
    `norm_topk_prob`: its experts' weights sum to 1, whatever the config says.
    `slides`: which layers HF's implementation gives a sliding window, a rule of
    megarl.models.sliding_window.
    `defaults`: what HF's config class takes for a key that config.json leaves out; those of all
    families are megarl.models.hf_config.DEFAULTS. Sizes without which no weight has a shape are
    not among them: a config.json that lacks one is refused.
    `ignored_fields`: config fields that HF's own implementation of the family does not read, or
    that are read for what they say.
    """

    name: str
    architecture: str
    attention: tuple[Param, ...]
    mlp: tuple[Param, ...] = MLP
    norms: tuple[Param, ...] = NORMS
    moe: MoE | None = None
    mla: bool = False
    glm: bool = False
    expert_size_field: str = "moe_intermediate_size"
    norm_topk_prob: bool = False
    slides: str = sliding_window.BEHIND
    defaults: Mapping[str, Any] = field(default_factory=dict)
    ignored_fields: tuple[str, ...] = ()

    @property
    def qkv_bias(self) -> bool:
        return QKV_BIAS in self.attention

    @property
    def qk_norm(self) -> bool:
        return QK_NORMS[0] in self.attention

    @property
    def post_norms(self) -> bool:
        return POST_NORMS[0] in self.norms

    def params(self, m: ModelConfig) -> Iterator[tuple[Param, int | None]]:
        """Every parameter of `m` in HF order, with the layer it belongs to."""
        yield (TIED_EMBEDDING if m.tie_word_embeddings else EMBEDDING), None
        for i in range(m.num_layers):
            for p in (*self._attention(m), *self._mlp(m, i), *self.norms):
                yield p.at_layer(i), i
        yield FINAL_NORM, None
        if m.head == "value":
            yield VALUE_HEAD, None
            if m.score_bias:
                yield VALUE_HEAD_BIAS, None
        elif not m.tie_word_embeddings:
            yield OUTPUT, None

    def _attention(self, m: ModelConfig) -> tuple[Param, ...]:
        if m.mla is not None:
            queries = MLA_Q if m.mla.q_rank is None else MLA_Q_LATENT
            return (*queries, *self.attention)
        return tuple(p for p in self.attention if p != QKV_BIAS or m.qkv_bias)

    def _mlp(self, m: ModelConfig, layer: int) -> tuple[Param, ...]:
        if m.moe is None or layer in m.moe.dense_layers:
            return self.mlp
        assert self.moe is not None
        each = (p.of_expert(e) for e in range(m.moe.num_experts) for p in self.moe.expert)
        bias = () if self.moe.bias is None else (self.moe.bias,)
        return (self.moe.router, *bias, *each, *self.moe.shared)


_QWEN_DEFAULTS = {
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
LLAMA = Family(name="llama", architecture="LlamaForCausalLM", attention=(QKV, PROJ))
QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    attention=(QKV, QKV_BIAS, PROJ),
    defaults={**_QWEN_DEFAULTS, "num_key_value_heads": 32},
    ignored_fields=("attention_bias", "mlp_bias"),
)
QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    attention=(QKV, PROJ, *QK_NORMS),
    defaults={**_QWEN_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128},
    ignored_fields=("mlp_bias",),
)
QWEN2_MOE = Family(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    attention=(QKV, QKV_BIAS, PROJ),
    moe=moe(
        "mlp",
        "gate_proj",
        "up_proj",
        "down_proj",
        (*shared_expert("mlp.shared_expert"), SHARED_GATE),
    ),
    slides=sliding_window.EVEN,
    defaults={**_QWEN_DEFAULTS, "num_key_value_heads": 16},
    ignored_fields=("attention_bias", "mlp_bias"),
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    attention=(QKV, PROJ, *QK_NORMS),
    moe=moe("mlp", "gate_proj", "up_proj", "down_proj"),
    slides=sliding_window.EVERY,
    defaults={**_QWEN_DEFAULTS, "num_key_value_heads": 4},
    ignored_fields=("mlp_bias",),
)
MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    attention=(QKV, PROJ),
    moe=moe("block_sparse_moe", "w1", "w3", "w2"),
    expert_size_field="intermediate_size",
    norm_topk_prob=True,
    slides=sliding_window.UNASKED,
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    ignored_fields=("attention_bias", "mlp_bias"),
)
DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    attention=MLA,
    moe=moe("mlp", "gate_proj", "up_proj", "down_proj", shared_expert("mlp.shared_experts")),
    mla=True,
    defaults={"q_lora_rank": 1536, "topk_method": "greedy"},
)
# --8<-- [start:deepseek_v3]
DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    attention=MLA,
    moe=moe(
        "mlp",
        "gate_proj",
        "up_proj",
        "down_proj",
        shared_expert("mlp.shared_experts"),
        ROUTER_BIAS,
    ),
    mla=True,
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
# --8<-- [end:deepseek_v3]
GLM = Family(
    name="glm",
    architecture="GlmForCausalLM",
    attention=(QKV, QKV_BIAS, PROJ),
    mlp=FUSED_MLP,
    glm=True,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    ignored_fields=("attention_bias", "mlp_bias", "partial_rotary_factor"),
)
GLM4 = replace(GLM, name="glm4", architecture="Glm4ForCausalLM", norms=(*NORMS, *POST_NORMS))
FAMILIES = {
    f.name: f
    for f in (
        LLAMA,
        QWEN2,
        QWEN3,
        QWEN2_MOE,
        QWEN3_MOE,
        MIXTRAL,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        GLM,
        GLM4,
    )
}
