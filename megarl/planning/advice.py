"""Describes a cluster, finds the layouts of a model that fit it, and estimates a training step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from megarl.config.engine import ParallelConfig
from megarl.models.hf_config import ModelConfig, check_layout
from megarl.parallel.layout import Layout
from megarl.planning.memory import BF16, FP32, Workload, stage_numel, training_memory


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Describes GPUs and links in bytes/s, one way: `nvlink` of a GPU, `nic` of the adapter each
    GPU has to itself. The reached share of each (`link_efficiency`) and the times are assumptions
    to be replaced by measurements."""

    gpus_per_node: int = 8
    gpu_bytes: int = 80 << 30
    peak_flops: float = 989.4e12
    nvlink: float = 450e9
    nic: float = 50e9
    link_efficiency: float = 0.8
    compute_efficiency: float = 0.5
    reserve: int = 6 << 30  # of a GPU: CUDA context, NCCL, workspaces, fragmentation
    latency: float = 5e-6  # of a message, and of each hop of a broadcast's ring
    request: float = 3e-3  # a server's HTTP round trip for one bucket
    tensor_load: float = 20e-6  # a server's work per tensor, besides
    load: float = 500e9  # its copying


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """Gives the seconds of one optimizer step, by part.

    tp, cp, ep, dp: the time of their collectives, none of it hidden behind computation. bubble:
    idle time of the pipeline, and of stages with fewer layers.
    """

    compute: float
    tp: float
    cp: float
    ep: float
    dp: float
    bubble: float

    @property
    def seconds(self) -> float:
        """Returns the seconds of the whole step."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class Candidate:
    """Describes a layout with the memory and the time of a step in it. `bytes` are those of the
    fullest GPU, `Cluster.reserve` among them."""

    layout: Layout
    recompute: str
    bytes: int
    step: StepEstimate


def even_split(num_layers: int, chunks: int) -> tuple[int, ...] | None:
    """Returns the layers of each pipeline chunk, None where they divide evenly. Layers left over go
    to the chunks after the first, which keeps most activations; the last has the LM head. Raises
    ValueError where a chunk would have no layer."""
    size, more = divmod(num_layers, chunks)
    if size == 0:
        raise ValueError(f"{num_layers} layers do not fill pp*vpp={chunks} chunks: lower pp")
    return tuple(size + (0 < i <= more) for i in range(chunks)) if more else None


def make_layout(m: ModelConfig, gpus: int, parallel: ParallelConfig) -> Layout:
    """Returns the layout, with an even pipeline split where none is given. Raises ValueError naming
    the degrees that do not fit."""
    chunks = parallel.pp * parallel.vpp
    if parallel.pipeline_split is None and (split := even_split(m.num_layers, chunks)):
        parallel = replace(parallel, pipeline_split=list(split))
    check_layout(m, parallel)
    return Layout.from_config(parallel, gpus)


def candidates(
    m: ModelConfig, gpus: int, cluster: Cluster, work: Workload, *, cp: int = 1
) -> Iterator[Candidate]:
    """Yields every layout in powers of two that `m` and `gpus` allow (tp within a node, etp = vpp =
    1), with and without recomputation, whether it fits into memory or not."""
    experts = m.moe.num_experts if m.moe else 1
    degrees = product(
        _powers(cluster.gpus_per_node), _powers(min(gpus, m.num_layers)), _powers(experts)
    )
    for (tp, pp, ep), recompute in product(degrees, ("none", "full")):
        parallel = ParallelConfig(tp=tp, pp=pp, ep=ep, cp=cp, sequence_parallel=tp > 1)
        try:
            layout = make_layout(m, gpus, parallel)
        except ValueError:  # it does not exist
            continue
        if layout.dp * work.micro_batch_tokens > work.batch_tokens:
            continue  # replicas without work
        job = replace(work, recompute=recompute)
        fullest = max(s.total for s in training_memory(m, layout, job)) + cluster.reserve
        yield Candidate(layout, recompute, fullest, estimate_step(m, layout, cluster, job))


def best(found: list[Candidate], cluster: Cluster) -> list[Candidate]:
    """Returns the candidates that fit into a GPU's memory, the fastest first."""
    fit = [c for c in found if c.bytes <= cluster.gpu_bytes]
    return sorted(fit, key=lambda c: c.step.seconds)


def estimate_step(m: ModelConfig, layout: Layout, cluster: Cluster, work: Workload) -> StepEstimate:
    """Estimates the seconds of forward, backward and collectives over `batch_tokens`.

    T tokens of a micro-batch on a rank's share of the sequence, H hidden; a collective of n ranks
    over B bytes moves B (n - 1) / n through each rank's link.
    """
    from megarl.models.flops import train_flops  # here, as it imports torch

    again = 1 if work.recompute == "full" else 0  # forward a second time
    passes, gathers, routings = 3 + again, 5 + 2 * again, 4 + 2 * again
    flops = train_flops(m, [work.sequence]) * work.batch_tokens / work.sequence
    compute = flops * passes / 3 / layout.world_size
    compute /= cluster.peak_flops * cluster.compute_efficiency
    n = work.micro_batches(layout)
    layers = m.num_layers / layout.pp
    moe_layers = (m.num_layers - len(m.moe.dense_layers)) / layout.pp if m.moe else 0.0
    tokens = work.micro_batch_tokens / layout.cp
    hidden = BF16 * tokens * m.hidden_size

    # all-gathers and reduce-scatters before and after attention and MLP: 4 forward, and backward 4
    # and 2 more all-gathers of what sequence parallelism did not keep; experts do without
    blocks = 2 * layers - moe_layers
    tp = blocks * gathers * hidden / _rate(cluster, layout.tp, layout.tp)
    a = m.attention
    kv = BF16 * tokens * a.kv_heads / layout.tp * (a.head_dim + a.v_head_dim)
    # keys and values go round, and with their gradients once more
    cp = layers * passes * kv * layout.cp / _rate(cluster, layout.cp, layout.tp * layout.cp)
    ep = 0.0
    if m.moe is not None:  # dispatch and combine, forward and backward
        share = layout.tp if layout.sequence_parallel else 1
        routed = hidden / share * m.moe.top_k
        rate = _rate(cluster, layout.ep, layout.etp * layout.ep)
        ep = moe_layers * routings * routed / rate
    busy = compute + n * (tp + cp + ep)
    chunks = layout.pp * layout.vpp
    fullest = max(layout.split) * chunks / m.num_layers if layout.split else 1.0
    return StepEstimate(
        compute=compute,
        tp=n * tp,
        cp=n * cp,
        ep=n * ep,
        dp=_reduce(m, layout, cluster),
        bubble=busy * (fullest * (1 + (layout.pp - 1) / (layout.vpp * n)) - 1),
    )


def _reduce(m: ModelConfig, layout: Layout, cluster: Cluster) -> float:
    """Returns the seconds in which the fullest stage reduce-scatters fp32 gradients and all-gathers
    bf16 weights."""
    copies = layout.dp * layout.cp
    dense = _rate(cluster, copies, copies * layout.tp)
    expert = _rate(cluster, layout.edp, layout.edp * layout.etp * layout.ep)
    seconds = (numel.dense / dense + numel.expert / expert for numel in stage_numel(m, layout))
    return (FP32 + BF16) * max(seconds)


def _rate(cluster: Cluster, n: int, span: int) -> float:
    """Returns the bytes/s of a collective over `n` ranks that lie among `span` neighbours."""
    link = cluster.nvlink if span <= cluster.gpus_per_node else cluster.nic
    return link * cluster.link_efficiency * n / (n - 1) if n > 1 else float("inf")


def _powers(limit: int) -> list[int]:
    return [1 << i for i in range(limit.bit_length())]
