"""Estimates what one weight sync moves over which links, and how long that takes, on any cluster.

The plan is that of the distributed transport: buckets of HF tensors, each gathered to a sender
and broadcast to all servers. Its cost per HF tensor is constant: the
shares of an op's tensors are worked out once, however many layers and experts have them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from operator import attrgetter

from megarl.models.families import family_of
from megarl.models.hf_config import ModelConfig
from megarl.models.ops import Op
from megarl.models.piece_table import Place, padded_vocab_size
from megarl.parallel.layout import Layout
from megarl.planning.memory import BF16, FP32, server_weights
from megarl.weight_sync.order import in_order


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
class Receivers:
    """Counts the GPUs that serve the model, `tp` of them to a server."""

    gpus: int
    tp: int

    @property
    def servers(self) -> int:
        """Returns the number of servers."""
        return self.gpus // self.tp


@dataclass(frozen=True, slots=True)
class Holding:
    """Says how many of the numbers of an HF tensor each owner of a piece has."""

    name: str
    numel: int
    itemsize: int
    parts: tuple[tuple[Place, int], ...]


def holdings(m: ModelConfig, layout: Layout) -> Iterator[Holding]:
    """Yields the holding of each HF tensor in HF order, from the piece table's owners."""
    vocab = padded_vocab_size(m.vocab_size, layout.tp)
    chunk_of = layout.chunk_of(m.num_layers)
    ends = {"first": (0, 0), "last": (layout.pp - 1, layout.vpp - 1)}

    @cache
    def place(chunk: tuple[int, int], ep: int | None, rank: int) -> Place:
        return Place(*chunk, tp=rank) if ep is None else Place(*chunk, ep=ep, etp=rank)

    for param, layer in family_of(m).params(m):
        chunk = ends[param.stage] if layer is None else chunk_of[layer]
        ep = None
        if param.expert is not None:
            ep = param.expert * layout.ep // m.experts.num_experts
        cuts = _cuts(m, param.op, layout.tp if ep is None else layout.etp, vocab)
        for name, (numel, shares) in zip(param.hf, cuts, strict=True):
            parts = tuple((place(chunk, ep, rank), n) for rank, n in shares)
            yield Holding(name, numel, FP32 if param.buffer else BF16, parts)


Cut = tuple[int, tuple[tuple[int, int], ...]]  # numbers of a tensor, and of each rank


@lru_cache(maxsize=4096)
def _cuts(m: ModelConfig, op: Op, tp: int, vocab: int) -> tuple[Cut, ...]:
    """Returns the size and the ranks' shares of each of the op's HF tensors."""
    shares: list[dict[int, int]] = [{} for _ in op.hf_shapes(m)]
    for s in op.segments(m, tp, vocab):
        if s.tp == 0 or not op.replicated:
            share = shares[s.source]
            share[s.tp] = share.get(s.tp, 0) + s.rows * s.cols
    return tuple((sum(share.values()), tuple(share.items())) for share in shares)


@dataclass(frozen=True, slots=True)
class BucketTraffic:
    """Says that bucket `index` is gathered from `sources` (rank -> bytes) to `sender`, which is
    among them."""

    index: int
    sender: int
    nbytes: int
    tensors: int
    sources: dict[int, int]


def plan_gather(
    held: Sequence[Holding], layout: Layout, *, bucket_bytes: int, sender: int = 0
) -> list[BucketTraffic]:
    """Returns the buckets of the distributed transport (weight_sync.plan.plan_sync), in order."""
    units = in_order(held, attrgetter("name"), attrgetter("itemsize"))
    return list(_buckets(units, layout, bucket_bytes, sender))


def _buckets(
    held: Sequence[Sequence[Holding]], layout: Layout, bucket_bytes: int, sender: int
) -> Iterator[BucketTraffic]:
    """Yields buckets of whole load units."""
    coords, sources = layout.coords(sender), dict[int, int]()
    index, end, tensors = 0, 0, 0

    @cache
    def source(place: Place) -> int:
        return sender if place.holds(coords) else place.rank(layout)

    for unit in held:
        if tensors and _end(unit, end) > bucket_bytes:
            yield BucketTraffic(index, sender, end, tensors, sources)
            index, sources, end, tensors = index + 1, {}, 0, 0
        for h in unit:
            for place, n in h.parts:
                rank = source(place)
                sources[rank] = sources.get(rank, 0) + n * h.itemsize
        end, tensors = _end(unit, end), tensors + len(unit)
    yield BucketTraffic(index, sender, end, tensors, sources)


def _end(unit: Sequence[Holding], start: int) -> int:
    """Returns the byte behind tensors that follow each other from byte `start` on."""
    for h in unit:
        start = -(-start // h.itemsize) * h.itemsize + h.numel * h.itemsize
    return start


@dataclass(frozen=True, kw_only=True)
class SyncEstimate:
    """Gives the bytes over all links of a kind in one sync, and seconds.

    bound: links at their full speed and nothing else, for this transport; sharded_bound: the same
    where each server GPU fetches no more than the slice it keeps, from all training GPUs at once.
    """

    nbytes: int
    buckets: int
    largest: int
    gather_nvlink: int
    gather_nic: int
    broadcast_nvlink: int
    broadcast_nic: int
    gather_seconds: float
    broadcast_seconds: float
    load_seconds: float
    seconds: float
    bound: float
    sharded_bound: float

    @property
    def bottleneck(self) -> str:
        """Returns the name of the part that takes the most seconds."""
        steps = {
            "gather": self.gather_seconds,
            "broadcast": self.broadcast_seconds,
            "the servers' loading": self.load_seconds,
        }
        return max(steps, key=lambda name: steps[name])


def estimate_sync(
    m: ModelConfig,
    layout: Layout,
    receivers: Receivers,
    cluster: Cluster,
    buckets: Sequence[BucketTraffic],
) -> SyncEstimate:
    """Estimates one sync. Gathers overlap with sending earlier buckets: a sender holds two, and
    bucket k+1 goes out after the servers' answer for k. gather_seconds, broadcast_seconds and
    load_seconds are sums over buckets."""
    gathers = [_gather(b, cluster) for b in buckets]
    rate = cluster.nic * cluster.link_efficiency
    sends = [b.nbytes / rate + cluster.latency * receivers.gpus for b in buckets]
    loads = [
        cluster.request + b.tensors * cluster.tensor_load + b.nbytes / cluster.load for b in buckets
    ]
    nic, nvlink = ([_incoming(b, cluster)[i] for b in buckets] for i in (0, 1))
    total = sum(b.nbytes for b in buckets)
    nodes = math.ceil(receivers.gpus / cluster.gpus_per_node)
    return SyncEstimate(
        nbytes=total,
        buckets=len(buckets),
        largest=max(b.nbytes for b in buckets),
        gather_nvlink=sum(nvlink),
        gather_nic=sum(nic),
        broadcast_nvlink=total * (receivers.gpus - nodes),
        broadcast_nic=total * nodes,
        gather_seconds=sum(gathers),
        broadcast_seconds=sum(sends),
        load_seconds=sum(loads),
        seconds=_pipelined(gathers, [s + x for s, x in zip(sends, loads)]),
        bound=max(total / cluster.nic, sum(nic) / cluster.nic, sum(nvlink) / cluster.nvlink),
        sharded_bound=_sharded_bound(m, layout, receivers) / cluster.nic,
    )


def _sharded_bound(m: ModelConfig, layout: Layout, receivers: Receivers) -> float:
    """Returns the bytes that the busiest GPU receives or sends where each server GPU fetches its
    slice from all training GPUs at once."""
    slice_bytes = server_weights(m, receivers.tp)
    return max(slice_bytes, slice_bytes * receivers.gpus / layout.world_size)


def _incoming(b: BucketTraffic, cluster: Cluster) -> tuple[int, int]:
    """Returns the bytes that reach the sender over the network, and from its node."""
    node = b.sender // cluster.gpus_per_node
    near = sum(n for r, n in b.sources.items() if r // cluster.gpus_per_node == node)
    return sum(b.sources.values()) - near, near - b.sources.get(b.sender, 0)


def _gather(b: BucketTraffic, cluster: Cluster) -> float:
    nic, nvlink = _incoming(b, cluster)
    seconds = max(nic / cluster.nic, nvlink / cluster.nvlink) / cluster.link_efficiency
    return seconds + cluster.latency * len(b.sources)


def _pipelined(gathers: Sequence[float], sends: Sequence[float]) -> float:
    """Returns when the last bucket is answered for, in seconds from the start: bucket k is gathered
    once k-1 is sent off, and sent when k-1 is answered for."""
    sent_off = answered = 0.0
    for gather, send in zip(gathers, sends, strict=True):
        sent_off = max(sent_off + gather, answered)
        answered = sent_off + send
    return answered
