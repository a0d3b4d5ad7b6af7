"""Estimates a weight sync on any cluster: by broadcast, and by slices.

By slices each server rank takes what it keeps, and no more; the plan is the real one, between the
trainers' pieces and the tables that the ranks of a stock SGLang server would record. In these,
names are not SGLang's, where nothing depends on them. Shapes, fusions and bytes are: q, k and v are
one matrix (key/value heads are repeated where there are more ranks), gate and up another, and all
experts of a layer a third and a fourth, cut over ranks by `tp` or dealt out to them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megarl.models.families import family_of
from megarl.models.hf_config import ModelConfig
from megarl.models.ops import FusedQKV, Op
from megarl.models.piece_table import (
    SliceMap,
    View,
    build_piece_table,
    padded_vocab_size,
    shard_map,
)
from megarl.parallel.layout import Layout
from megarl.planning.advice import Cluster
from megarl.planning.memory import BF16, FP32, parameters, server_weights, stage_numel
from megarl.transfer.geometry import Geometry, Slice, Sources, TargetTable
from megarl.transfer.plan import Receiver, TransferPlan, plan_transfer

REQUESTS = 4  # of slices, to each server: begin, receive, accept, end
VOCAB_PADDING = 64  # rows of a server's rank are a multiple of this


@dataclass(frozen=True, kw_only=True)
class Receivers:
    """Counts the GPUs that serve the model, `tp` of them to a server."""

    gpus: int
    tp: int

    @property
    def servers(self) -> int:
        """Returns the number of servers."""
        return self.gpus // self.tp


@dataclass(frozen=True, kw_only=True)
class BroadcastEstimate:
    """Gives the bytes over all links of a kind in one sync by broadcast, and seconds.

    gather_seconds, broadcast_seconds, load_seconds: sums over buckets. bound: links at their full
    speed and nothing else; sharded_bound: the same where each server GPU fetches no more than the
    slice it keeps, from all training GPUs at once.
    """

    nbytes: int
    buckets: int
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
        parts = {
            "gather": self.gather_seconds,
            "broadcast": self.broadcast_seconds,
            "servers' loading": self.load_seconds,
        }
        return max(parts, key=lambda name: parts[name])


def estimate_broadcast(
    m: ModelConfig, layout: Layout, receivers: Receivers, cluster: Cluster, bucket_bytes: int
) -> BroadcastEstimate:
    """Estimates one sync in buckets of equal size, gathered to rank 0 and broadcast to all servers.

    A bucket is gathered while servers take the one before: the slower of the two counts for every
    bucket, the other one once.
    """
    total = BF16 * parameters(m)[0]
    buckets = -(-total // bucket_bytes)
    tensors = sum(len(p.hf) for p, _ in family_of(m).params(m))
    nvlink, nic = _gathered(m, layout, cluster)
    nodes = math.ceil(receivers.gpus / cluster.gpus_per_node)
    gather = (nic / cluster.nic + nvlink / cluster.nvlink) / cluster.link_efficiency
    gather += buckets * cluster.latency
    broadcast = total / (cluster.nic * cluster.link_efficiency)
    broadcast += buckets * cluster.latency * receivers.gpus
    load = buckets * cluster.request + tensors * cluster.tensor_load + total / cluster.load
    faster, slower = sorted((gather, broadcast + load))
    kept = server_weights(m, receivers.tp)
    return BroadcastEstimate(
        nbytes=total,
        buckets=buckets,
        gather_nvlink=nvlink,
        gather_nic=nic,
        broadcast_nvlink=total * (receivers.gpus - nodes),
        broadcast_nic=total * nodes,
        gather_seconds=gather,
        broadcast_seconds=broadcast,
        load_seconds=load,
        seconds=slower + faster / buckets,
        bound=max(total / cluster.nic, nvlink / cluster.nvlink),
        sharded_bound=max(kept, kept * receivers.gpus / layout.world_size) / cluster.nic,
    )


def _gathered(m: ModelConfig, layout: Layout, cluster: Cluster) -> tuple[int, int]:
    """Returns the bytes that reach rank 0 from its node, and over the network. What tensor
    parallelism repeats (norms, routers) is counted with every rank."""
    near = far = 0
    stages = stage_numel(m, layout)
    if m.tie_word_embeddings and layout.pp > 1:  # the last stage's copy is not gathered
        copy = padded_vocab_size(m.vocab_size, layout.tp) // layout.tp * m.hidden_size
        stages[-1] = replace(stages[-1], dense=stages[-1].dense - copy)
    for pp, numel in enumerate(stages):
        dense = [layout.dense_rank(pp=pp, tp=tp) for tp in range(layout.tp)]
        expert = [
            layout.expert_rank(pp=pp, ep=ep, etp=etp)
            for ep in range(layout.ep)
            for etp in range(layout.etp)
        ]
        for ranks, n in ((dense, numel.dense), (expert, numel.expert)):
            near += BF16 * n * sum(0 < rank < cluster.gpus_per_node for rank in ranks)
            far += BF16 * n * sum(rank >= cluster.gpus_per_node for rank in ranks)
    return near, far


# ---- slices ------------------------------------------------------------------------------------


def plan_sharded(
    m: ModelConfig, layout: Layout, receivers: Receivers, *, server_ep: int, round_bytes: int
) -> TransferPlan:
    """Plans slices from trainers in `layout` to stock SGLang servers, alike, on nodes of their own.
    Raises ValueError where the model does not divide over a server."""
    tables = server_tables(m, receivers.tp, server_ep)
    pieces = build_piece_table(m, layout)
    itemsizes = {t.name: FP32 if t.buffer else BF16 for t in pieces.tensors}
    targets = {
        Receiver(server, rank): table
        for server in range(receivers.servers)
        for rank, table in enumerate(tables)
    }
    return plan_transfer(Sources(pieces), targets, itemsizes=itemsizes, round_bytes=round_bytes)


@dataclass(frozen=True, kw_only=True)
class ShardedEstimate:
    """Gives bytes, counts and seconds of one sync.

    received, messages, senders: of the server GPU that has most. sent: of such a trainer GPU.
    total: the bytes of all. largest: the bytes of the largest message. network_seconds: as if
    nobody began a round before the busiest GPU had ended the one before. copy_seconds: out of
    parameters or into them, of the busiest GPU; while one round is copied, the next is under way.
    """

    total: int
    received: int
    sent: int
    senders: int
    messages: int
    largest: int
    rounds: int
    network_seconds: float
    copy_seconds: float
    seconds: float


def estimate_sharded(plan: TransferPlan, cluster: Cluster) -> ShardedEstimate:
    """Estimates one sync by a plan in which nothing stays on a node."""
    rounds = max(g.rounds for g in plan.geometries)
    shares = {id(g): _shares(g, rounds, plan.senders.shape[1]) for g in plan.geometries}
    sent = np.zeros((plan.sources.table.layout.world_size, rounds), dtype=np.int64)
    posted, packed = np.zeros_like(sent), np.zeros(len(sent), dtype=np.int64)
    received, taken, unpacked, senders, largest = [], [], [], 0, 0
    for geometry, row in zip(plan.geometries, plan.senders, strict=True):
        nbytes, slices = shares[id(geometry)]
        used = np.flatnonzero(row >= 0)
        ranks, which = np.unique(row[used], return_inverse=True)
        messages = np.zeros((len(ranks), rounds), dtype=np.int64)
        np.add.at(messages, which, nbytes[used])
        sent[ranks] += messages
        posted[ranks] += messages > 0
        np.add.at(packed, row[used], slices[used])
        received.append(messages.sum(0))
        taken.append((messages > 0).sum(0))
        unpacked.append(int(slices.sum()))
        senders, largest = max(senders, len(ranks)), max(largest, int(messages.max(initial=0)))
    got, counts = np.array(received), np.array(taken)
    network = _seconds(cluster, sent, posted, got, counts)
    copying = max(
        _copying(cluster, int(sent.sum(1).max()), int(packed.max())),
        _copying(cluster, int(got.sum(1).max()), max(unpacked)),
    )
    slower, faster = max(network, copying), min(network, copying)
    return ShardedEstimate(
        total=int(got.sum()),
        received=int(got.sum(1).max()),
        sent=int(sent.sum(1).max()),
        senders=senders,
        messages=int(counts.sum(1).max()),
        largest=largest,
        rounds=rounds,
        network_seconds=network,
        copy_seconds=copying,
        seconds=REQUESTS * cluster.request + slower + faster / rounds,
    )


Ints = NDArray[np.int64]


def _shares(g: Geometry, rounds: int, sources: int) -> tuple[Ints, Ints]:
    """Returns bytes of each source in each round, [sources, rounds], and its slices, [sources]."""
    nbytes = np.zeros((sources, rounds), dtype=np.int64)
    np.add.at(nbytes, (g.source, g.round), g.nbytes)
    return nbytes, np.bincount(g.source, minlength=sources)


def _seconds(c: Cluster, sent: Ints, posted: Ints, got: Ints, taken: Ints) -> float:
    nbytes = np.maximum(sent.max(0), got.max(0))
    messages = np.maximum(posted.max(0), taken.max(0))
    return float(nbytes.sum() / (c.nic * c.link_efficiency) + messages.sum() * c.latency)


def _copying(c: Cluster, nbytes: int, slices: int) -> float:
    return nbytes / c.load + slices * c.tensor_load


# ---- tables of servers that are not there ------------------------------------------------------


def server_tables(m: ModelConfig, tp: int, ep: int = 1) -> list[TargetTable]:
    """Returns the table of each of the `tp` ranks of a server, its experts dealt out over `ep`
    groups of them and cut within a group. Raises ValueError where the model does not divide so."""
    _check(m, tp, ep)
    found: list[list[Slice]] = [[] for _ in range(tp)]
    cuts: dict[tuple[Op, int], _Cut] = {}  # layers and experts are cut alike
    for param, _ in family_of(m).params(m):
        ranks, first, offset, name = tp, 0, 0, param.name
        if param.expert is not None:
            ranks, own = tp // ep, m.experts.num_experts // ep
            first, offset = param.expert // own * ranks, param.expert % own
            name = name.replace(f".local_experts.{param.expert}.", ".")
        if (param.op, ranks) not in cuts:
            cuts[param.op, ranks] = _cut(m, param.op, ranks)
        size, boxes_of = cuts[param.op, ranks]
        for tensor, boxes in zip(param.hf, boxes_of, strict=True):
            for b in boxes:
                at = offset * size + b.view.offset
                view = View(at, b.view.shape, b.view.strides)
                entry = Slice(tensor, b.start, b.stop, name, (view,))
                found[first + b.rank].append(entry)
    made = f"{m.family}-{m.num_layers}x{m.hidden_size}-tp{tp}-ep{ep}"
    return [TargetTable(entries, f"{made}-rank{rank}") for rank, entries in enumerate(found)]


_Cut = tuple[int, list[tuple[SliceMap, ...]]]  # numbers of a rank, and boxes of each HF tensor


def _check(m: ModelConfig, tp: int, ep: int) -> None:
    if tp % ep:
        raise ValueError(f"ep={ep} does not divide the server's tp={tp}")
    sizes = {"attention heads": (m.num_attention_heads, tp), **_expert_sizes(m, tp, ep)}
    for name, (size, ranks) in sizes.items():
        if size % ranks:
            raise ValueError(f"{size} {name} do not divide over {ranks} ranks of a server")


def _expert_sizes(m: ModelConfig, tp: int, ep: int) -> dict[str, tuple[int, int]]:
    if m.moe is None:
        return {}
    width = m.moe.intermediate_size
    return {"experts": (m.moe.num_experts, ep), "columns of an expert": (width, tp // ep)}


def _cut(m: ModelConfig, op: Op, ranks: int) -> _Cut:
    vocab = padded_vocab_size(m.vocab_size, ranks, VOCAB_PADDING)
    if isinstance(op, FusedQKV):
        return _queries_keys_values(m, op, ranks)
    found = shard_map(m, op, ranks, vocab)
    return math.prod(found.shape), [boxes for _, boxes in found.sources]


def _queries_keys_values(m: ModelConfig, op: FusedQKV, ranks: int) -> _Cut:
    """Cuts q, k and v by heads, each rank's below each other; more ranks than key/value heads
    share them."""
    cols = 1 if op.bias else m.hidden_size
    kv = m.num_key_value_heads
    heads = (m.num_attention_heads, kv, kv)
    found: list[tuple[SliceMap, ...]] = []
    row = 0
    for n in heads:
        own = max(1, n // ranks)
        rows = own * m.head_dim
        boxes = []
        for rank in range(ranks):
            first = rank * n // ranks * m.head_dim
            start, stop = (first, 0), (first + rows, cols)
            shape, strides = (rows, cols), (cols, 1)
            dims = 1 if op.bias else 2
            view = View(row * cols, shape[:dims], strides[:dims])
            boxes.append(SliceMap(rank, view, start[:dims], stop[:dims]))
        found.append(tuple(boxes))
        row += rows
    return row * cols, found
