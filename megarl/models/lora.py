"""Declares which linear layers get low-rank adapters, and where these live; holds no tensors.

LoRA (https://arxiv.org/abs/2106.09685) adds scale * B A to a frozen weight W [out, in], with A [r,
in] and B [out, r]. Hugging Face's PEFT has one such pair per HF module (q_proj, k_proj, ...),
megatron-core has fused layers. The pairs of a fused layer are held as two matrices:

    A [n*r, in]       the n HF modules' A, one below the other
    B [rows, r]       the rows of the n modules' B, in the order of the fused weight's rows

A column-parallel layer cuts B as it cuts its weight's rows, and every rank holds A; a row-parallel
one cuts A along `in`, and every rank holds B. Both are parameters like any other: the piece table
of `adapter_table` says which boxes of which PEFT tensor they are made of.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megarl.config.engine import ALL_LINEAR, LoRAConfig
from megarl.models.families import family_of
from megarl.models.families.params import VALUE_HEAD, Param
from megarl.models.hf_config import ModelConfig
from megarl.models.ops import Op, Replicated, RowParallel, Segment, Shape
from megarl.models.piece_table import PieceTable, build_piece_table
from megarl.models.shapes import Wrapper
from megarl.parallel.layout import Layout

PEFT_PREFIX = "base_model.model."
_HEAD = VALUE_HEAD.name.removesuffix("weight")


@dataclass(frozen=True)
class Stacked(Op):
    """Holds A of a column-parallel layer: n matrices [r, in] below each other, on every rank."""

    base: Op
    sources: tuple[int, ...]
    r: int
    replicated = True

    def hf_shapes(self, m: ModelConfig) -> tuple[Shape, ...]:
        """Returns [r, in] for each adapted HF module."""
        shapes = self.base.hf_shapes(m)
        return tuple((self.r, shapes[s][1]) for s in self.sources)

    def segments(self, m: ModelConfig, tp: int, vocab_rows: int) -> Iterator[Segment]:
        """Yields one segment for each HF module and rank."""
        for rank in range(tp):
            for i, (rows, cols) in enumerate(self.hf_shapes(m)):
                yield Segment(rank, i, i * rows, 0, rows, 0, cols)


@dataclass(frozen=True)
class FusedRows(Op):
    """Holds B of a column-parallel layer: the base weight's rows that belong to an adapted module,
    in their order, r columns each. `check_lora` refuses layouts in which ranks hold unequally
    many."""

    base: Op
    sources: tuple[int, ...]
    r: int

    def base_rows(self, m: ModelConfig, tp: int, rank: int) -> list[Segment]:
        """Returns the base weight's segments on `rank` that have rows in B, in their order."""
        mine = (s for s in self.base.segments(m, tp, 0) if s.tp == rank)
        return sorted((s for s in mine if s.source in self.sources), key=lambda s: s.row)

    def hf_shapes(self, m: ModelConfig) -> tuple[Shape, ...]:
        """Returns [out, r] for each adapted HF module."""
        shapes = self.base.hf_shapes(m)
        return tuple((shapes[s][0], self.r) for s in self.sources)

    def segments(self, m: ModelConfig, tp: int, vocab_rows: int) -> Iterator[Segment]:
        """Yields the rows of B on every rank, in the order of the base weight's segments."""
        for rank in range(tp):
            row = 0
            for s in self.base_rows(m, tp, rank):
                source = self.sources.index(s.source)
                yield Segment(rank, source, row, s.hf_row, s.rows, 0, self.r)
                row += s.rows


@dataclass(frozen=True)
class Adapted:
    """Names the weight `base`, its adapters `a` and `b`, and the HF modules they belong to."""

    base: Param
    layer: int
    sources: tuple[int, ...]
    a: Param
    b: Param

    @property
    def row_parallel(self) -> bool:
        """Returns whether the weight is cut along its input dimension, and so A instead of B."""
        return isinstance(self.base.op, RowParallel)


def scale(cfg: LoRAConfig) -> float:
    """Returns the factor of B A: alpha / r, or alpha / sqrt(r) with rank-stabilised LoRA
    (https://arxiv.org/abs/2312.03732)."""
    return cfg.alpha / (math.sqrt(cfg.r) if cfg.use_rslora else cfg.r)


def adapted_layers(m: ModelConfig, cfg: LoRAConfig) -> Iterator[Adapted]:
    """Yields every adapted weight of the model, in HF order. Raises ValueError for a target that
    the model does not have."""
    targets = resolve_targets(m, cfg)
    for param, layer in family_of(m).params(m):
        if layer is None or not _is_adaptable(param):
            continue
        sources = tuple(i for i, hf in enumerate(param.hf) if _module(hf) in targets)
        if sources:
            yield _adapted(param, layer, sources, cfg.r, m.wrapper)


def _adapted(
    base: Param, layer: int, sources: tuple[int, ...], r: int, wrapper: Wrapper | None
) -> Adapted:
    stem = base.name.removesuffix(".weight") + "_lora."
    a: Op
    b: Op
    if isinstance(base.op, RowParallel):
        a, b = RowParallel(r, base.op.cols), Replicated(base.op.rows, r)
    else:
        a, b = Stacked(base.op, sources, r), FusedRows(base.op, sources, r)

    def part(name: str, op: Op) -> Param:
        weights = (base.hf[s] if wrapper is None else wrapper.module(base.hf[s]) for s in sources)
        modules = (weight.removesuffix(".weight") for weight in weights)
        hf = tuple(f"{PEFT_PREFIX}{module}.lora_{name}.weight" for module in modules)
        return replace(base, name=stem + name, hf=hf, op=op)

    return Adapted(base, layer, sources, part("A", a), part("B", b))


def _is_adaptable(param: Param) -> bool:
    """Returns whether the parameter is a linear map that ranks cut."""
    return param.op.linear and not param.op.replicated


def _module(hf: str) -> str:
    """Returns a weight's module: model.layers.0.self_attn.q_proj.weight -> q_proj."""
    return hf.split(".")[-2]


def resolve_targets(m: ModelConfig, cfg: LoRAConfig) -> tuple[str, ...]:
    """Returns the HF modules that get adapters. Raises ValueError for one that the model lacks."""
    layers = (p for p, layer in family_of(m).params(m) if layer is not None and _is_adaptable(p))
    known = tuple(dict.fromkeys(_module(hf) for p in layers for hf in p.hf))
    if cfg.target_modules == [ALL_LINEAR]:
        return known
    unknown = [t for t in cfg.target_modules if t not in known]
    if unknown:
        raise ValueError(
            f"lora.target_modules: a {m.family} model has no linear layer {unknown[0]!r}; use "
            f"{', '.join(known)}, or [{ALL_LINEAR}] for all of them"
        )
    return tuple(t for t in known if t in cfg.target_modules)


def check_lora(m: ModelConfig, tp: int, cfg: LoRAConfig) -> None:
    """Raises ValueError if these adapters do not fit the model or its cut over `tp` ranks."""
    for layer in adapted_layers(m, cfg):
        op = layer.b.op
        if layer.base.expert is None and isinstance(op, FusedRows):
            counts = {sum(s.rows for s in op.base_rows(m, tp, rank)) for rank in range(tp)}
            if len(counts) > 1:
                names = [_module(hf) for hf in layer.base.hf]
                raise ValueError(
                    f"lora.target_modules has only part of {', '.join(names)}, which tp={tp} ranks "
                    f"hold unequal parts of (there are {m.attention.kv_heads} key/value heads); "
                    "name all of them or none, or use a smaller tp"
                )


def is_adapter(name: str) -> bool:
    """Returns whether the parameter of this name belongs to an adapter."""
    return "_lora." in name


def is_trained(name: str, m: ModelConfig) -> bool:
    """Returns whether LoRA trains the parameter `name`: an adapter, or part of a value head."""
    return is_adapter(name) or (m.head == "value" and name.startswith(_HEAD))


def lora_fields(m: ModelConfig, cfg: LoRAConfig | None) -> dict[str, Any]:
    """Returns the TransformerConfig's fields that adapters change: experts with adapters run one by
    one, as Transformer Engine's grouped product has no place for them; frozen routers leave their
    biases alone too."""
    if cfg is None or m.moe is None:
        return {}
    fields: dict[str, object] = {"moe_router_bias_update_rate": 0.0}
    if any(layer.base.expert is not None for layer in adapted_layers(m, cfg)):
        fields["moe_grouped_gemm"] = False
    return fields


def trained_params(m: ModelConfig, cfg: LoRAConfig) -> Iterator[tuple[Param, int | None]]:
    """Yields the parameters that LoRA trains and their layers, by PEFT's names: adapters, and a
    value head as a whole."""
    for layer in adapted_layers(m, cfg):
        yield layer.a, layer.layer
        yield layer.b, layer.layer
    for param, number in family_of(m).params(m):
        if is_trained(param.name, m):
            yield replace(param, hf=tuple(PEFT_PREFIX + h for h in param.hf)), number


def adapter_table(m: ModelConfig, layout: Layout, cfg: LoRAConfig) -> PieceTable:
    """Builds the piece table of the trained tensors, by PEFT's names."""
    return build_piece_table(m, layout, params=trained_params(m, cfg))


def meaning(m: ModelConfig, cfg: LoRAConfig) -> dict[str, object]:
    """Returns the settings that decide what adapters of this config compute, in PEFT's words."""
    return {
        "r": cfg.r,
        "lora_alpha": cfg.alpha,
        "use_rslora": cfg.use_rslora,
        "target_modules": sorted(resolve_targets(m, cfg)),
    }


def adapter_config(m: ModelConfig, cfg: LoRAConfig, base_model_path: str) -> dict[str, object]:
    """Returns the contents of PEFT's adapter_config.json."""
    value = m.head == "value"
    return {
        "peft_type": "LORA",
        "task_type": ("TOKEN_CLS" if m.score_bias else "SEQ_CLS") if value else "CAUSAL_LM",
        "base_model_name_or_path": base_model_path,
        **meaning(m, cfg),
        "lora_dropout": 0.0,
        "modules_to_save": ["score"] if value else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


# Keys of PEFT's LoraConfig that do not change what a saved adapter computes, or that are compared
# with the engine's `lora` or with the tensors of the file.
_NEUTRAL = frozenset({
    "peft_type", "peft_version", "auto_mapping", "task_type", "base_model_name_or_path", "revision",
    "inference_mode", "lora_dropout", "r", "lora_alpha", "use_rslora", "target_modules",
    "modules_to_save",
})  # fmt: skip
# Supported values of the other keys. PEFT's defaults; of init_lora_weights all values that leave
# the base model as it is (PiSSA, OLoRA, CorDA and LoftQ change it when PEFT loads the adapter).
_SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal"),
    "qalora_group_size": (16, None),
    "megatron_core": ("megatron.core", None),
}
# PEFT's defaults of all other keys, and of keys of a newer PEFT
_OFF: tuple[object, ...] = (None, False, {}, [])


def check_adapter_config(found: Mapping[str, object], cfg: LoRAConfig, source: str) -> None:
    """Raises ValueError if the adapter_config.json `source` does not mean the same as `cfg`, or has
    a key whose value is not supported."""
    if found.get("peft_type") != "LORA":
        raise ValueError(f"{source}: peft_type={found.get('peft_type')!r}; only LORA is supported")
    for name in sorted(found.keys() - _NEUTRAL):
        if found[name] not in _SUPPORTED.get(name, _OFF):
            raise ValueError(
                f"{source}: {name}={found[name]!r} is not supported; merge that adapter into its "
                "model with PEFT (merge_and_unload) and start from the merged model"
            )
    own = {"r": cfg.r, "lora_alpha": cfg.alpha, "use_rslora": cfg.use_rslora}
    for name, value in own.items():
        if found.get(name, False) != value:
            key = {"lora_alpha": "alpha"}.get(name, name)
            raise ValueError(
                f"{source}: {name}={found.get(name)!r}, but lora.{key}={value!r}; set lora.{key} "
                "to what the adapter was trained with"
            )
