"""Estimates what calls cost in seconds and bytes, by the planner's models of compute and memory.

Generation is a simple model: prefill is a forward pass over the prompts; then every token of the
answers reads all weights and the cache of its sequence from the GPU's memory, and all answers have
the same length. Nothing here is measured: the rates are those of `Cluster`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megarl.dataflow.call import COMPUTE, GENERATE, TRAIN_STEP, Call
from megarl.dataflow.mesh import Allocation
from megarl.models.hf_config import ModelConfig
from megarl.parallel.layout import Layout
from megarl.planning.advice import estimate_step
from megarl.planning.memory import (
    BF16,
    Workload,
    head_bytes,
    kv_bytes_per_token,
    layer_activations,
    parameters,
    stage_numel,
    training_memory,
)
from megarl.planning.traffic import Cluster

KEY_BYTES = {"input_ids": 8, "loss_mask": 1}  # of a token; other keys are numbers of 4 bytes
PER_SAMPLE = ("rewards", "group_ids", "baseline", "last_value")  # the others are per token


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Describes the data of one step: `answers` sequences, each a prompt of `prompt` tokens and an
    answer of `answer` tokens, in micro-batches of `micro_batch_tokens`."""

    answers: int = 512
    prompt: int = 1024
    answer: int = 1024
    micro_batch_tokens: int = 16384
    recompute: str = "full"

    @property
    def whole(self) -> Workload:
        """Returns the planner's view of a pass over all tokens."""
        return self.of(self.prompt + self.answer)

    def of(self, tokens: int) -> Workload:
        """Returns the planner's view of a pass over the first `tokens` tokens of each sequence."""
        return Workload(
            batch_tokens=self.answers * tokens,
            micro_batch_tokens=self.micro_batch_tokens,
            sequence=tokens,
            recompute=self.recompute,
        )


class ModelCosts:
    """Gives the costs of calls (schedule.Costs) of `models`, by role, on a cluster."""

    def __init__(self, models: Mapping[str, ModelConfig], cluster: Cluster, work: StepWork) -> None:
        self.models, self.cluster, self.work = models, cluster, work
        self.capacity = cluster.gpu_bytes - cluster.reserve

    def run(self, call: Call, where: Allocation, room: int) -> float:
        """Returns the seconds of the call itself; of computing on a batch's numbers 0."""
        m, layout = self.models[call.model], where.layout
        if call.kind == COMPUTE:
            return 0.0
        if call.kind == GENERATE:
            cached = sum(self.working(call, where)[:1]) + room
            return _generate(m, layout, self.cluster, self.work, cached)
        return _pass(m, layout, self.cluster, self.work.whole, call.kind != TRAIN_STEP)

    def reallocate(self, model: str, source: Allocation, target: Allocation) -> float:
        """Returns the seconds of the busiest device: what it lacks comes from its own node, where
        that has it, else over the network."""
        return _reallocate(self.models[model], source, target, self.cluster)

    def onload(self, call: Call, where: Allocation) -> float:
        """Returns the seconds in which the fullest device gets the model from host memory."""
        return max(self.held(call, where)) / (self.cluster.host * self.cluster.link_efficiency)

    def fetch(self, keys: Sequence[str], source: Allocation, target: Allocation) -> float:
        """Returns the seconds in which each replica of the target pulls its share of the rows."""
        tokens = self.work.answers * (self.work.prompt + self.work.answer)
        sizes = (0 if key in PER_SAMPLE else tokens * KEY_BYTES.get(key, 4) for key in keys)
        rate = self.cluster.nic * self.cluster.link_efficiency
        return self.cluster.request + sum(sizes) / target.layout.dp / rate

    def held(self, call: Call, where: Allocation) -> Sequence[int]:
        """Returns bf16 weights, and for a train step gradients and optimizer, by stage."""
        return _held(self.models[call.model], where.layout, call.kind == TRAIN_STEP)

    def working(self, call: Call, where: Allocation) -> Sequence[int]:
        """Returns the activations, or for generation the cache of one round of sequences, of which
        each replica holds one a stage at least."""
        m, layout = self.models[call.model], where.layout
        if call.kind == COMPUTE:
            return (0,)
        if call.kind == GENERATE:
            length = self.work.prompt + self.work.answer
            return (_cache_bytes(m, layout) * length * layout.pp,)
        return _activations(m, layout, self.work.whole, call.kind == TRAIN_STEP)


@lru_cache(maxsize=1 << 14)
def _held(m: ModelConfig, layout: Layout, trained: bool) -> tuple[int, ...]:
    if not trained:
        return tuple(BF16 * numel.total for numel in stage_numel(m, layout))
    stages = training_memory(m, layout, Workload())
    return tuple(s.weights + s.grads + s.optimizer for s in stages)


@lru_cache(maxsize=1 << 14)
def _activations(m: ModelConfig, layout: Layout, work: Workload, trained: bool) -> tuple[int, ...]:
    if trained:
        return tuple(s.activations + s.head for s in training_memory(m, layout, work))
    layer = layer_activations(m, layout, 0, work.micro_batch_tokens)  # one layer at a time
    return (*(layer for _ in range(layout.pp - 1)), layer + head_bytes(m, layout, work))


@lru_cache(maxsize=1 << 14)
def _pass(
    m: ModelConfig, layout: Layout, cluster: Cluster, work: Workload, forward_only: bool
) -> float:
    return estimate_step(m, layout, cluster, work, forward_only=forward_only).seconds


def _cache_bytes(m: ModelConfig, layout: Layout) -> int:
    """Returns the bytes of a token's keys and values on a GPU of one stage."""
    return -(-kv_bytes_per_token(m, layout.tp) // layout.pp)


@lru_cache(maxsize=1 << 14)
def _generate(
    m: ModelConfig, layout: Layout, cluster: Cluster, work: StepWork, cached: int
) -> float:
    """Returns the seconds of prefill and decoding. A replica's sequences go through in rounds of as
    many as their cache fits into `cached` bytes; with pp stages a token passes all of them, which
    work on as many parts of the round."""
    prefill = _pass(m, layout, cluster, work.of(work.prompt), True)
    length = work.prompt + work.answer
    mine = -(-work.answers // layout.dp)
    at_once = max(1, min(mine, cached // (_cache_bytes(m, layout) * length)))
    rounds = -(-mine // at_once)
    rate = cluster.hbm * cluster.link_efficiency
    weights = max(_held(m, layout, False)) / rate
    cache = _cache_bytes(m, layout) * (work.prompt + work.answer / 2) / rate
    flops = 2 * parameters(m)[1] / (layout.tp * layout.pp)
    compute = flops / (cluster.peak_flops * cluster.compute_efficiency)
    sends = 2 * m.num_layers / layout.pp * cluster.latency if layout.tp > 1 else 0.0
    step = layout.pp * (weights + sends) + -(-mine // rounds) * (cache + compute)
    return prefill + rounds * work.answer * step


@lru_cache(maxsize=1 << 16)
def _reallocate(m: ModelConfig, source: Allocation, target: Allocation, cluster: Cluster) -> float:
    seconds = [
        near / cluster.nvlink + far / cluster.nic
        for near, far in incoming(m, source, target, cluster.gpus_per_node)
    ]
    # what all devices get leaves those of the source
    return max(*seconds, sum(seconds) / source.mesh.count) / cluster.link_efficiency


def incoming(
    m: ModelConfig, source: Allocation, target: Allocation, per_node: int
) -> list[tuple[float, float]]:
    """Returns the bytes of weights that reach each device of `target` from its own node, and over
    the network. A layer counts as much as any other, with the embedding and the head spread over
    all; a device keeps what it has, and takes the rest from its node where that has the layer."""
    layer = BF16 * parameters(m)[0] / m.num_layers
    theirs, ours = source.layers(m.num_layers), target.layers(m.num_layers)
    on_node: dict[int, set[int]] = {}
    for device, layers in theirs.items():
        on_node.setdefault(device // per_node, set()).update(layers)
    found = []
    for device, wanted in ours.items():
        part = _slice(target, device)
        kept = _overlap(_slice(source, device), part) if device in theirs else 0.0
        near = far = 0.0
        for i in wanted:
            lacks = layer * ((part[1] - part[0]) - (kept if i in theirs.get(device, ()) else 0.0))
            if i in on_node.get(device // per_node, ()):
                near += lacks
            else:
                far += lacks
        found.append((near, far))
    return found


def _slice(where: Allocation, device: int) -> tuple[float, float]:
    """Returns the part of each tensor that the device holds, of 1; tp is the innermost degree."""
    tp = where.layout.tp
    rank = (device - where.mesh.first) % tp
    return rank / tp, (rank + 1) / tp


def _overlap(a: tuple[float, float], b: tuple[float, float]) -> float:
    return max(0.0, min(a[1], b[1]) - max(a[0], b[0]))
