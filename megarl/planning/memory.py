"""Computes bytes per GPU of training and of serving, from a config and a layout alone.

Weights are counted from the family's declaration, equal layers once. Activations follow Korthikanti
et al., "Reducing Activation Recomputation in Large Transformer Models" (2022, arXiv 2205.05198),
sections 4 and 5, term by term, for a layer with a gated MLP, no dropout and a fused attention that
keeps no scores; numbers are of two bytes (bf16). The memory of kernels, libraries and the
allocator's gaps is left out (`Cluster.reserve`).

T tokens of a micro-batch on a rank's share of the sequence, H hidden.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megarl.models.families import family_of
from megarl.models.hf_config import ModelConfig
from megarl.models.ops import Op
from megarl.models.piece_table import padded_vocab_size
from megarl.parallel.layout import Layout

BF16, FP32 = 2, 4


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Describes one optimizer step: `batch_tokens` in packed micro-batches of `micro_batch_tokens`,
    made of sequences of `sequence` tokens.

    state_bytes: of a parameter's optimizer state on the GPU. fp8: Transformer Engine multiplies in
    FP8 and keeps quantised copies of weights. others: bytes of other models on the same GPU;
    resting: of a frozen model that is there for its own pass alone, which keeps no activations.
    """

    batch_tokens: int = 1 << 22
    micro_batch_tokens: int = 16384
    sequence: int = 8192
    recompute: str = "none"  # or "full": every layer
    head_chunk_tokens: int = 4096
    head_keep_bytes: int = 1 << 30
    state_bytes: float = 3 * FP32
    fp8: bool = False
    others: int = 0
    resting: int = 0

    def micro_batches(self, layout: Layout) -> int:
        """Returns the micro-batches of each data-parallel rank in a step, at least 1."""
        return max(1, -(-self.batch_tokens // (layout.dp * self.micro_batch_tokens)))


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Gives the bytes of a GPU of one pipeline stage, by use, as Workload has the last two."""

    weights: int
    grads: int
    optimizer: int
    fp8: int
    activations: int
    head: int
    others: int
    resting: int

    @property
    def held(self) -> int:
        """Returns the bytes that the trained model keeps between passes."""
        return self.weights + self.grads + self.optimizer + self.fp8

    @property
    def total(self) -> int:
        """Returns the most that is there at a time, in bytes."""
        return self.held + self.others + max(self.activations + self.head, self.resting)


@dataclass(frozen=True)
class Numel:
    """Counts a rank's parameters: `dense` are replicated over dp * cp, `expert` over edp ranks."""

    dense: int
    expert: int

    @property
    def total(self) -> int:
        """Returns the sum of both."""
        return self.dense + self.expert


def parameters(m: ModelConfig) -> tuple[int, int]:
    """Returns the number of all parameters and of those that a token meets, without buffers and the
    layers that predict further tokens."""
    total = active = 0
    for (_, _, op, expert, _, buffer), count in _census(m).items():
        n = 0 if buffer else count * sum(math.prod(s) for s in op.hf_shapes(m))
        total += n
        active += n * m.moe.top_k // m.moe.num_experts if expert and m.moe else n
    return total, active


def stage_numel(m: ModelConfig, layout: Layout, *, linear: bool = False) -> list[Numel]:
    """Returns the parameters of a rank of each pipeline stage; its ranks hold equally many. With
    `linear` only those of the layers' linear maps."""
    vocab = padded_vocab_size(m.vocab_size, layout.tp)
    stage_of = {i: pp for i, (pp, _) in layout.chunk_of(m.num_layers).items()}
    local: dict[tuple[Op, bool], int] = {}
    dense, expert = [0] * layout.pp, [0] * layout.pp
    for (layer, stage, op, is_expert, tied, _), count in _census(m).items():
        if linear and not op.linear:
            continue
        if (op, is_expert) not in local:
            tp = layout.etp if is_expert else layout.tp
            local[op, is_expert] = math.prod(op.local_shape(m, tp, vocab))
        n = local[op, is_expert]
        pp = stage_of[layer] if layer is not None else 0 if stage == "first" else layout.pp - 1
        if is_expert:
            expert[pp] += n * count // layout.ep
        else:
            dense[pp] += n * count
            if tied and layout.pp > 1:
                dense[-1] += n
    return [Numel(*x) for x in zip(dense, expert, strict=True)]


@lru_cache(maxsize=8)
def _census(m: ModelConfig) -> Counter[tuple[int | None, str, Op, bool, bool, bool]]:
    """Returns the number of parameters of each (layer, stage, op, expert?, tied?, buffer?)."""
    return Counter(
        (layer, p.stage, p.op, p.expert is not None, p.copy_on_last is not None, p.buffer)
        for p, layer in family_of(m).params(m)
    )


def training_memory(m: ModelConfig, layout: Layout, work: Workload) -> list[StageMemory]:
    """Returns the memory of each pipeline stage: bf16 weights, fp32 gradients, and Adam, by default
    in fp32 with fp32 main weights. These are the 6 + 12/d bytes per parameter of megatron-core's
    distributed optimizer. A quantised copy has two bytes a weight, by rows and by columns."""
    stages = []
    counts = zip(stage_numel(m, layout), stage_numel(m, layout, linear=True), strict=True)
    for pp, (numel, linear) in enumerate(counts):
        states = -(-numel.dense // (layout.dp * layout.cp)) + -(-numel.expert // layout.edp)
        stages.append(
            StageMemory(
                weights=BF16 * numel.total,
                grads=FP32 * numel.total,
                optimizer=int(work.state_bytes * states),
                fp8=2 * linear.total if work.fp8 else 0,
                activations=stage_activations(m, layout, work, pp),
                head=head_bytes(m, layout, work) if pp == layout.pp - 1 else 0,
                others=work.others,
                resting=work.resting,
            )
        )
    return stages


def model_bytes(
    m: ModelConfig, layout: Layout, work: Workload, *, trained: bool, average: bool = False
) -> int:
    """Returns the bytes of the fullest GPU of a model between its passes: with gradients and
    optimizer if it is `trained`, with its weights in fp32 besides if it is the moving `average` of
    another, and half as large FP8 copies where there is no backward pass."""
    if trained:
        return max(s.held for s in training_memory(m, layout, work))
    own = BF16 + (FP32 if average else 0)
    counts = zip(stage_numel(m, layout), stage_numel(m, layout, linear=True), strict=True)
    return max(own * all_.total + work.fp8 * linear.total for all_, linear in counts)


def turn_memory(
    stages: Sequence[StageMemory], *, weights: int, kv_cache: int, buckets: int
) -> dict[str, int]:
    """Returns the bytes of the fullest GPU in each turn of servers and trainers that use the same
    GPUs in turn (server.release_memory).

    weights, kv_cache: of a server on a GPU; buckets: what the sync takes."""
    return {
        "generate": weights + kv_cache,
        "train": max(s.total for s in stages),
        "sync": weights + max(s.weights for s in stages) + buckets,
    }


def chunks_in_flight(layout: Layout, pp: int, micro_batches: int) -> int:
    """Returns the most forward passes of a chunk whose backward is still to come: 1F1B, or
    interleaved with its longer warm-up, which makes L (1 + (pp - 1) / (pp vpp)) layers on the first
    stage."""
    after = layout.pp - pp - 1
    if layout.vpp == 1:
        return min(micro_batches, after + 1)
    return min(micro_batches * layout.vpp, 2 * after + (layout.vpp - 1) * layout.pp + 1)


def stage_activations(m: ModelConfig, layout: Layout, work: Workload, pp: int) -> int:
    """Returns the most bytes that a rank of the stage keeps for backward, in its layers."""
    tokens = -(-work.micro_batch_tokens // layout.cp)
    chunks = [layout.layers(m.num_layers, pp, v) for v in range(layout.vpp)]
    kept = [sum(layer_activations(m, layout, i, tokens) for i in chunk) for chunk in chunks]
    largest = 0
    if work.recompute == "full":  # every layer's input, and all of the layer that is being redone
        inputs = BF16 * tokens * m.hidden_size // (layout.tp if layout.sequence_parallel else 1)
        largest = max(layer_activations(m, layout, i, tokens) for c in chunks for i in c)
        kept = [len(chunk) * inputs for chunk in chunks]
    in_flight = chunks_in_flight(layout, pp, work.micro_batches(layout))
    return in_flight * sum(kept) // layout.vpp + largest


def layer_activations(m: ModelConfig, layout: Layout, layer: int, tokens: int) -> int:
    """Returns the bytes per rank that backward needs of layer `layer`, for `tokens` tokens."""
    return int((_mixer(m, layout, layer) + _mlp(m, layout, layer)) * tokens)


def _mixer(m: ModelConfig, layout: Layout, layer: int) -> float:
    """Returns the bytes per token of both norms' inputs and all of attention, or of what is in its
    place. Sequence parallelism shards the tensors that tensor parallelism leaves whole."""
    whole = layout.tp if layout.sequence_parallel else 1
    shared, own = m.mixer(layer).kept(layout.tp)
    # the inputs of two norms and of the projection
    return BF16 * ((3 * m.hidden_size + shared) / whole + own)


def _mlp(m: ModelConfig, layout: Layout, layer: int) -> float:
    tp, whole = layout.tp, layout.tp if layout.sequence_parallel else 1
    if m.moe is None or layer in m.moe.dense_layers:
        return BF16 * (m.hidden_size / whole + 3 * m.intermediate_size / tp)
    e = m.moe
    shared = m.hidden_size / whole + 3 * e.shared_intermediate_size / tp
    routed = e.top_k * (m.hidden_size * layout.etp + 3 * e.intermediate_size) / whole
    return BF16 * (shared + routed) + FP32 * e.num_experts / whole


def head_bytes(m: ModelConfig, layout: Layout, work: Workload) -> int:
    """Returns the bytes of the LM head in backward, as kernels compute it: gathered hidden states
    and their gradient, the weight's gradient in fp32 and rounded, one chunk's logits in bf16, over
    which their gradient is written, and those of the whole micro-batch where they are few enough to
    be kept."""
    tokens = -(-work.micro_batch_tokens // layout.cp)
    rows = padded_vocab_size(m.vocab_size, layout.tp) // layout.tp
    logits = BF16 * tokens * rows
    chunk = BF16 * min(tokens, work.head_chunk_tokens) * rows
    hidden = 2 * BF16 * tokens * m.hidden_size
    largest = logits if logits <= work.head_keep_bytes else chunk
    return hidden + (FP32 + BF16) * rows * m.hidden_size + largest


def server_weights(m: ModelConfig, tp: int) -> int:
    """Returns the bytes of weights per GPU of a bf16 server; key/value heads are repeated where tp
    exceeds their number."""
    layout = Layout(tp=tp, etp=tp if m.moe and m.moe.intermediate_size % tp == 0 else 1)
    if m.moe and layout.etp == 1:
        layout = Layout(tp=tp, ep=tp)
    mixers = [m.mixer(i) for i in range(m.num_layers)]
    repeated = sum(mixer.repeated_weights(m.hidden_size, tp) for mixer in mixers)
    return BF16 * (stage_numel(m, layout)[0].total + repeated)


def kv_bytes_per_token(m: ModelConfig, tp: int) -> int:
    """Returns the bytes of one token on one GPU of a server; a sliding window is not taken off. A
    latent is whole on every GPU, of key/value heads there is one at least."""
    return BF16 * sum(m.mixer(i).cached(tp) for i in range(m.num_layers))


def state_bytes_per_sequence(m: ModelConfig, tp: int) -> int:
    """Returns the bytes of one sequence's states on one GPU of a server, whatever its length."""
    return 0 if m.recurrent is None else FP32 * len(m.recurrent.layers) * m.recurrent.state // tp
