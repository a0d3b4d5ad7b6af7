"""Reads a Hugging Face config.json into a ModelConfig, and refuses what is not implemented.

Pure: no torch, no transformers, no megatron; callable before any process group exists. A key that
is absent means what it means to transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.config.parallel import ParallelConfig
from megarl.models import deepseek, glm
from megarl.models.families import FAMILIES, Family
from megarl.models.rope_config import rope
from megarl.models.shapes import MLAShape, MoEShape, RopeScaling, count, number
from megarl.models.shapes import positive as _positive
from megarl.models.sliding_window import refuse_sliding_window
from megarl.models.value_model import language_model, value_model

DTYPES = ("float32", "bfloat16", "float16")

# what transformers takes for absent keys, in every family whose own `defaults` say nothing else
DEFAULTS: Mapping[str, Any] = {
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 2048, "initializer_range": 0.02, "norm_topk_prob": False,
    "decoder_sparse_step": 1, "routed_scaling_factor": 1.0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer as its config.json describes it (H hidden, V vocabulary).

    head_dim: of queries and keys; values have `v_head_dim`, which is another in latent attention.
    rotary_dim: how many numbers of a head are rotated. qkv_bias: queries, keys and values have one.
    mtp_layers: layers behind the last that predict further tokens; left out, as HF leaves them.
    head: "lm", or "value": one score per token in place of the vocabulary, with or without a bias;
    with `new_head` the directory is a language model's and has no score yet.
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    qkv_bias: bool
    vocab_size: int
    tie_word_embeddings: bool
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    initializer_range: float
    dtype: str
    moe: MoEShape | None = None
    mla: MLAShape | None = None
    mtp_layers: int = 0
    raw: Mapping[str, Any] = field(repr=False, compare=False)
    head: str = "lm"
    score_bias: bool = False
    new_head: bool = field(default=False, compare=False)

    @property
    def declaration(self) -> Family:
        return FAMILIES[self.family]

    @property
    def v_head_dim(self) -> int:
        return self.head_dim if self.mla is None else self.mla.v_dim

    @property
    def qk_norm(self) -> bool:
        return self.declaration.qk_norm


def read_hf_config(path: str | Path, *, head: str = "lm") -> ModelConfig:
    """ModelConfig of the model directory `path` with the wanted head ("lm" or "value").

    ValueError naming what is wrong or unsupported.
    """
    file = Path(path) / "config.json"
    if not file.is_file() and (Path(path) / "adapter_config.json").is_file():
        raise ValueError(adapter_given(path))
    if not file.is_file():
        raise ValueError(
            f"no config.json in {str(path)!r}: give a local Hugging Face model directory (fetch "
            "one with `hf download NAME --local-dir DIR`)"
        )
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as e:
        raise ValueError(f"{file}: not valid JSON ({e})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{file}: expected a JSON object, found {type(raw).__name__}")
    if head == "value":
        return value_model(parse_hf_config(language_model(raw), str(file)), raw, str(file))
    return parse_hf_config(raw, str(file))


def adapter_given(path: str | Path) -> str:
    """Says that `path` is an adapter's directory where a model's should be, and the fix."""
    return (
        f"{path} holds a PEFT adapter, not a model: name the model it was trained on, and the "
        "adapter in lora.adapter_path"
    )


def parse_hf_config(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """ModelConfig of an already parsed config.json; `source` names it in errors."""
    family = _family(raw, source)
    full = {**DEFAULTS, **family.defaults, **raw}
    _refuse_unsupported(full, family, source)
    hidden = _positive(full, "hidden_size", source)
    mla = deepseek.mla_shape(full, source) if family.mla else None
    heads, kv_heads, head_dim = _heads(full, mla, hidden, source)
    theta, scaling = rope(full, source, partial=family.glm, mla=family.mla)
    rotary_dim = mla.rope_dim if mla else head_dim
    if family.glm:
        rotary_dim = glm.rotary_dim(full, head_dim, source)
    return ModelConfig(
        family=family.name,
        num_layers=_positive(full, "num_hidden_layers", source),
        hidden_size=hidden,
        intermediate_size=_positive(full, "intermediate_size", source),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        qkv_bias=bool(full["attention_bias"]) if family.glm else family.qkv_bias,
        vocab_size=_positive(full, "vocab_size", source),
        tie_word_embeddings=bool(full["tie_word_embeddings"]),
        rms_norm_eps=number(full, "rms_norm_eps", source),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=_positive(full, "max_position_embeddings", source),
        initializer_range=number(full, "initializer_range", source),
        dtype=_dtype(full, source),
        moe=_moe(full, family, source),
        mla=mla,
        mtp_layers=count(full, "num_nextn_predict_layers", source) if family.mla else 0,
        raw=dict(raw),
    )


def check_layout(model: ModelConfig, parallel: ParallelConfig) -> None:
    """ValueError, naming the values and the fix, if `model` cannot be cut as `parallel` says."""
    m, tp = model, parallel.tp
    heads, kv = m.num_attention_heads, m.num_key_value_heads
    if heads % tp:
        raise ValueError(
            f"parallel.tp={tp} does not divide num_attention_heads={heads}; choose tp from "
            f"{_divisors(heads)}"
        )
    if kv % tp and tp % kv:
        raise ValueError(
            f"parallel.tp={tp} neither divides num_key_value_heads={kv} nor is a multiple of it; "
            f"choose tp from {[d for d in _divisors(heads) if not (kv % d and d % kv)]}"
        )
    sizes = _latent_sizes(m.mla) if m.mla else {"qkv rows": (heads + 2 * kv) * m.head_dim}
    if m.moe is None or m.moe.dense_layers:
        sizes["intermediate_size"] = m.intermediate_size
    if m.moe is not None:
        sizes["shared_expert_intermediate_size"] = m.moe.shared_intermediate_size
    for name, size in sizes.items():
        if size % tp:
            raise ValueError(f"parallel.tp={tp} does not divide {name}={size}; lower tp")
    chunks = parallel.pp * parallel.vpp
    if (split := parallel.pipeline_split) is not None and sum(split) != m.num_layers:
        raise ValueError(
            f"parallel.pipeline_split={split} adds up to {sum(split)} layers, but "
            f"num_hidden_layers={m.num_layers}; change its numbers"
        )
    if split is None and m.num_layers % chunks:
        raise ValueError(
            f"parallel.pp*vpp={parallel.pp}*{parallel.vpp}={chunks} does not divide "
            f"num_hidden_layers={m.num_layers}; choose a product from {_divisors(m.num_layers)}, "
            "or give the layers of each chunk in parallel.pipeline_split"
        )
    _check_expert_layout(m, parallel)


def _latent_sizes(mla: MLAShape) -> dict[str, int]:
    """megatron-core cuts the projections to a latent, if only to put them together again."""
    return {
        "q_lora_rank": mla.q_rank or 0,
        "kv_lora_rank + qk_rope_head_dim": mla.kv_rank + mla.rope_dim,
    }


def _check_expert_layout(m: ModelConfig, p: ParallelConfig) -> None:
    if m.moe is None:
        for degree in ("ep", "etp"):
            if getattr(p, degree) > 1:
                raise ValueError(
                    f"parallel.{degree}={getattr(p, degree)} needs a mixture-of-experts model, "
                    f"and {m.family} is dense; set parallel.{degree}=1"
                )
        return
    for degree, name, size in (
        ("ep", "num_experts", m.moe.num_experts),
        ("etp", "the experts' intermediate size", m.moe.intermediate_size),
    ):
        if size % getattr(p, degree):
            raise ValueError(
                f"parallel.{degree}={getattr(p, degree)} does not divide {name}={size}; choose "
                f"{degree} from {_divisors(size)}"
            )
    if p.tp > 1 and not p.sequence_parallel:
        raise ValueError(
            f"parallel.tp={p.tp} with a mixture-of-experts model ({m.family}) needs tokens shared "
            "out to the ranks' routers; set parallel.sequence_parallel=true"
        )


def _family(raw: Mapping[str, Any], source: str) -> Family:
    names = raw.get("architectures") or []
    if not isinstance(names, list):
        raise ValueError(f"{source}: architectures={names!r}; expected a list of names")
    for family in FAMILIES.values():
        if names and family.architecture in names:
            return family
        if not names and raw.get("model_type") == family.name:
            return family
    found = names or raw.get("model_type")
    raise ValueError(
        f"{source}: architecture {found!r} is not supported; supported: "
        f"{', '.join(f.architecture for f in FAMILIES.values())}"
    )


def _heads(
    raw: Mapping[str, Any], mla: MLAShape | None, hidden: int, source: str
) -> tuple[int, int, int]:
    """(attention heads, key/value heads, head dimension)."""
    heads = _positive(raw, "num_attention_heads", source)
    kv_heads = _positive(raw, "num_key_value_heads", source, default=heads)
    if heads % kv_heads:
        raise ValueError(
            f"{source}: num_attention_heads={heads} is not a multiple of "
            f"num_key_value_heads={kv_heads}"
        )
    if mla is not None:
        return heads, kv_heads, mla.nope_dim + mla.rope_dim
    if raw.get("head_dim") is None and hidden % heads:
        raise ValueError(
            f"{source}: hidden_size={hidden} is not a multiple of num_attention_heads={heads} and "
            "no head_dim is given"
        )
    head_dim = _positive(raw, "head_dim", source, default=hidden // heads)
    if head_dim % 2:
        raise ValueError(f"{source}: head_dim={head_dim} is odd; rotary embeddings need it even")
    return heads, kv_heads, head_dim


def _moe(raw: Mapping[str, Any], family: Family, source: str) -> MoEShape | None:
    """Both names of the number of experts are read: transformers 4 and 5 differ."""
    if family.moe is None:
        return None
    if family.mla:
        return deepseek.moe_shape(raw, source, sigmoid=family.moe.bias is not None)
    key = next((k for k in ("num_experts", "num_local_experts") if k in raw), "num_experts")
    experts, top_k = _positive(raw, key, source), _positive(raw, "num_experts_per_tok", source)
    if top_k > experts:
        raise ValueError(f"{source}: num_experts_per_tok={top_k} of {key}={experts} experts")
    shared = "shared_expert_intermediate_size" if family.moe.shared else None
    normed = family.norm_topk_prob or bool(raw["norm_topk_prob"])
    if normed and top_k == 1:
        raise ValueError(
            f"{source}: num_experts_per_tok=1 with norm_topk_prob=true is not supported: every "
            "weight is 1, so the router has no gradient; supported: norm_topk_prob=false"
        )
    return MoEShape(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=_positive(raw, family.expert_size_field, source),
        norm_topk_prob=normed,
        dense_layers=_dense_layers(raw, source),
        shared_intermediate_size=_positive(raw, shared, source) if shared else 0,
    )


def _dense_layers(raw: Mapping[str, Any], source: str) -> tuple[int, ...]:
    layers = range(_positive(raw, "num_hidden_layers", source))
    step = _positive(raw, "decoder_sparse_step", source)
    plain = raw.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(isinstance(i, int) for i in plain):
        raise ValueError(f"{source}: mlp_only_layers={plain!r}; expected a list of layer numbers")
    dense = {i for i in layers if (i + 1) % step} | set(plain)
    if len(dense.intersection(layers)) == len(layers):
        raise ValueError(
            f"{source}: decoder_sparse_step={step} and mlp_only_layers leave no layer with experts"
        )
    return tuple(sorted(dense.intersection(layers)))


# Fields that change the maths: (values that are implemented, what they mean in the message).
# A field that is absent or null is fine; fields not listed here do not change a forward pass.
_IMPLEMENTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu", "swish"), "silu (SwiGLU)"),
    "mlp_bias": ((False,), "false"),
    "attention_bias": ((False,), "false (Qwen2 has its own q/k/v biases)"),
    "attention_dropout": ((0,), "0"),
    "use_mrope": ((False,), "false"),
    "rope_interleaved": ((False,), "false"),
    "router_jitter_noise": ((0,), "0"),
    "qkv_bias": ((True,), "true"),
    "partial_rotary_factor": ((1,), "1.0"),
    "quantization_config": ((), "none: dequantise the checkpoint first"),
}


def _refuse_unsupported(raw: Mapping[str, Any], family: Family, source: str) -> None:
    for name, (allowed, meaning) in _IMPLEMENTED.items():
        if name in family.ignored_fields:
            continue
        value = raw.get(name)
        if value is not None and value not in allowed:
            raise ValueError(f"{source}: {name}={value!r} is not supported; supported: {meaning}")
    refuse_sliding_window(raw, family.slides, source)


def _dtype(raw: Mapping[str, Any], source: str) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"{source}: dtype {name!r} is not supported; supported: {DTYPES}")
    return name


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
