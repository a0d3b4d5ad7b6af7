"""Declares mixture-of-experts blocks, and reads their routers' settings from a config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megarl.models.families.fields import count, number, positive, refuse_others
from megarl.models.families.params import Param
from megarl.models.ops import GateUp, H, Replicated, RowParallel
from megarl.models.shapes import MoEShape

_EXPERTS, _SHARED = "experts.num_experts", "experts.shared_intermediate_size"

Read = Callable[[Mapping[str, Any], str], MoEShape]


@dataclass(frozen=True)
class MoE:
    """A block in place of a layer's MLP. `read`: makes the block's shape of a config.json and its
    name in errors. `block`: HF's name of it; `gate`, `up`, `down`: HF's names of an expert's
    matrices. `shared`: what every token meets, held like a dense MLP. `bias`: added to the router's
    scores when it chooses. `fp32_router`: the router's matrix is published in fp32."""

    read: Read
    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: tuple[Param, ...] = ()
    bias: Param | None = None
    fp32_router: bool = False

    def params(self, experts: int) -> tuple[Param, ...]:
        """Returns a block's parameters: router, bias, those of each of `experts`, shared ones."""
        fc1, fc2 = (f"mlp.experts.local_experts.#.linear_fc{i}.weight" for i in (1, 2))
        hf = [f"{self.block}.experts.#.{x}.weight" for x in (self.gate, self.up, self.down)]
        expert = (
            Param(fc1, (hf[0], hf[1]), GateUp("experts.intermediate_size")),
            Param(fc2, (hf[2],), RowParallel(H, "experts.intermediate_size")),
        )
        gate = f"{self.block}.gate.weight"
        router = Param("mlp.router.weight", (gate,), Replicated(_EXPERTS, H), fp32=self.fp32_router)
        bias = () if self.bias is None else (self.bias,)
        each = (p.of_expert(e) for e in range(experts) for p in expert)
        return (router, *bias, *each, *self.shared)


SHARED_GATE = Param(
    "mlp.shared_experts.gate_weight", ("mlp.shared_expert_gate.weight",), Replicated(1, H)
)
ROUTER_BIAS = Param(
    "mlp.router.expert_bias",
    ("mlp.gate.e_score_correction_bias",),
    Replicated(_EXPERTS),
    buffer=True,
    fp32=True,
    initial="zeros",
)


def shared_expert(block: str) -> tuple[Param, ...]:
    """Returns the parameters of the expert that every token meets; `block`: HF's name of it."""
    fc1, fc2 = (f"mlp.shared_experts.linear_fc{i}.weight" for i in (1, 2))
    gate_up = (f"{block}.gate_proj.weight", f"{block}.up_proj.weight")
    return (
        Param(fc1, gate_up, GateUp(_SHARED)),
        Param(fc2, (f"{block}.down_proj.weight",), RowParallel(H, _SHARED)),
    )


def softmax_experts(raw: Mapping[str, Any], source: str) -> MoEShape:
    """Reads a softmax router's block, without a shared expert. Both names of the number of experts
    are read: transformers 4 and 5 differ. Raises ValueError naming the key that is wrong or
    unsupported."""
    key = next((k for k in ("num_experts", "num_local_experts") if k in raw), "num_experts")
    return replace(_experts(raw, key, source), dense_layers=_dense_layers(raw, source))


def mixtral_experts(raw: Mapping[str, Any], source: str) -> MoEShape:
    """Reads a softmax router's block whose experts have the MLP's size, and the weights of a
    token's experts sum to 1 whatever the config says. Raises ValueError as `softmax_experts`
    does."""
    raw = {**raw, "norm_topk_prob": True, "moe_intermediate_size": raw.get("intermediate_size")}
    return softmax_experts(raw, source)


def _experts(raw: Mapping[str, Any], key: str, source: str) -> MoEShape:
    """Reads the sizes of a block whose config has the number of its experts under `key`."""
    experts, top_k = positive(raw, key, source), positive(raw, "num_experts_per_tok", source)
    if top_k > experts:
        raise ValueError(f"{source}: num_experts_per_tok={top_k} of {key}={experts} experts")
    normed = bool(raw["norm_topk_prob"])
    if normed and top_k == 1:
        raise ValueError(
            f"{source}: num_experts_per_tok=1 with norm_topk_prob=true is not supported: every "
            "weight is the same, so the router has no gradient; supported: norm_topk_prob=false"
        )
    size = positive(raw, "moe_intermediate_size", source)
    return MoEShape(num_experts=experts, top_k=top_k, intermediate_size=size, norm_topk_prob=normed)


def gated_shared_experts(raw: Mapping[str, Any], source: str) -> MoEShape:
    """Reads a softmax router's block with a gated expert that every token meets. Raises ValueError
    as `softmax_experts` does."""
    size = positive(raw, "shared_expert_intermediate_size", source)
    shape = softmax_experts(raw, source)
    return replace(shape, shared_intermediate_size=size, shared_gate=True)


def _dense_layers(raw: Mapping[str, Any], source: str) -> tuple[int, ...]:
    layers = range(positive(raw, "num_hidden_layers", source))
    step = positive(raw, "decoder_sparse_step", source)
    plain = raw.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(isinstance(i, int) for i in plain):
        raise ValueError(f"{source}: mlp_only_layers={plain!r}; expected a list of layer numbers")
    dense = {i for i in layers if (i + 1) % step} | set(plain)
    if len(dense.intersection(layers)) == len(layers):
        raise ValueError(
            f"{source}: decoder_sparse_step={step} and mlp_only_layers leave no layer with experts"
        )
    return tuple(sorted(dense.intersection(layers)))


def leading_dense_experts(raw: Mapping[str, Any], source: str) -> MoEShape:
    """Reads the block that DeepSeek-V2 began: shared experts, and dense layers before the first
    layer with experts. Its router is a plain softmax, without groups. Raises ValueError naming the
    key that is wrong or unsupported."""
    shape = _experts(raw, "n_routed_experts", source)
    refuse_others(raw, {"moe_layer_freq": (1, None)}, source)
    layers = positive(raw, "num_hidden_layers", source)
    dense = count(raw, "first_k_dense_replace", source)
    if dense >= layers:
        raise ValueError(
            f"{source}: first_k_dense_replace={dense} leaves no layer of {layers} with experts"
        )
    shared = positive(raw, "n_shared_experts", source)
    return replace(
        shape,
        dense_layers=tuple(range(dense)),
        shared_intermediate_size=shape.intermediate_size * shared,
        scale=number(raw, "routed_scaling_factor", source),
    )


def sigmoid_experts(raw: Mapping[str, Any], source: str) -> MoEShape:
    """Reads DeepSeek-V3's block (2024, arXiv 2412.19437, section 2.1.2): a sigmoid router with a
    bias, and groups of experts, each judged by its best two. Raises ValueError naming the key that
    is wrong or unsupported."""
    refuse_others(  # Hugging Face's models read none of these but norm_topk_prob
        raw,
        {
            "scoring_func": ("sigmoid", None),
            "topk_method": ("noaux_tc", None),
            "norm_topk_prob": (True,),
        },
        source,
    )
    shape = leading_dense_experts(raw, source)
    shape = replace(shape, norm_topk_prob=True, sigmoid=True, score_bias=True)
    return in_groups(shape, raw, source, best=2)


def in_groups(shape: MoEShape, raw: Mapping[str, Any], source: str, *, best: int) -> MoEShape:
    """Returns `shape` with the groups of `raw`, each judged by its `best` experts, or `shape`
    itself where all groups are open to a token. Raises ValueError for groups that do not fit the
    experts."""
    groups = positive(raw, "n_group", source, default=1)
    top = positive(raw, "topk_group", source, default=groups)
    if top >= groups:
        return shape
    experts, size = shape.num_experts, shape.num_experts // groups
    if experts % groups or top * size < shape.top_k or size < best:
        raise ValueError(
            f"{source}: n_group={groups} with topk_group={top} does not fit n_routed_experts="
            f"{experts} and num_experts_per_tok={shape.top_k}"
        )
    return replace(shape, groups=groups, top_groups=top, group_best=best)
