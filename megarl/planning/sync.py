"""Estimates a weight sync on any cluster: by broadcast, and by slices.

By slices each server rank takes what it keeps, and no more; the plan is the real one, between the
trainers' pieces and the tables that the ranks of a stock SGLang server would record. In these,
names are not SGLang's, where nothing depends on them. Shapes, fusions and bytes are: q, k and v are
one matrix (key/value heads are repeated where there are more ranks), gate and up another, and all
experts of a layer a third and a fourth, cut over ranks by `tp` or dealt out to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.models.families import family_of
from megarl.models.hf_config import ModelConfig
from megarl.models.ops import FusedQKV, Segment
from megarl.models.piece_table import View, build_piece_table, hf_box, padded_vocab_size, shard_map
from megarl.parallel.layout import Layout
from megarl.planning.advice import Cluster
from megarl.planning.memory import BF16, parameters, server_weights, stage_numel
from megarl.transfer.gather import export_dtype
from megarl.transfer.geometry import Geometry, Slice, Sources, TargetTable
from megarl.transfer.plan import Receiver, TransferPlan, plan_transfer

Ints = NDArray[np.int64]

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
    tensors = len({name for p, _ in family_of(m).params(m) for name in p.hf})
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
    dtypes = {t.name: export_dtype(t, torch.bfloat16) for t in pieces.tensors}
    targets = {
        Receiver(server, rank): table
        for server in range(receivers.servers)
        for rank, table in enumerate(tables)
    }
    return plan_transfer(Sources(pieces), targets, dtypes=dtypes, round_bytes=round_bytes)


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
    trainers = plan.sources.table.layout.world_size
    rounds = max(g.rounds for g in plan.geometries)
    shares = {id(g): _shares(g, rounds, plan.senders.shape[1]) for g in plan.geometries}
    # of each GPU, trainers before servers
    nbytes = np.zeros((trainers + len(plan.geometries), rounds), dtype=np.int64)
    messages, slices = np.zeros_like(nbytes), np.zeros(len(nbytes), dtype=np.int64)
    senders = largest = 0
    for gpu, (geometry, row) in enumerate(
        zip(plan.geometries, plan.senders, strict=True), trainers
    ):
        from_source, slices_of = shares[id(geometry)]
        used = np.flatnonzero(row >= 0)
        ranks, which = np.unique(row[used], return_inverse=True)
        sent = np.zeros((len(ranks), rounds), dtype=np.int64)
        np.add.at(sent, which, from_source[used])
        nbytes[ranks] += sent
        nbytes[gpu] = sent.sum(0)
        messages[ranks] += sent > 0
        messages[gpu] = (sent > 0).sum(0)
        np.add.at(slices, row[used], slices_of[used])
        slices[gpu] = slices_of.sum()
        senders, largest = max(senders, len(ranks)), max(largest, int(sent.max(initial=0)))
    of_trainers, of_servers = np.split(nbytes.sum(1), [trainers])
    network = nbytes.max(0).sum() / (cluster.nic * cluster.link_efficiency)
    network += messages.max(0).sum() * cluster.latency
    copying = max(
        moved.max() / cluster.load + cut.max() * cluster.tensor_load
        for moved, cut in zip((of_trainers, of_servers), np.split(slices, [trainers]), strict=True)
    )
    faster, slower = sorted((float(network), float(copying)))
    return ShardedEstimate(
        total=int(of_servers.sum()),
        received=int(of_servers.max()),
        sent=int(of_trainers.max()),
        senders=senders,
        messages=int(messages[trainers:].sum(1).max()),
        largest=largest,
        rounds=rounds,
        network_seconds=float(network),
        copy_seconds=float(copying),
        seconds=REQUESTS * cluster.request + slower + faster / rounds,
    )


def _shares(g: Geometry, rounds: int, sources: int) -> tuple[Ints, Ints]:
    """Returns bytes of each source in each round, [sources, rounds], and its slices, [sources]."""
    nbytes = np.zeros((sources, rounds), dtype=np.int64)
    np.add.at(nbytes, (g.source, g.round), g.nbytes)
    return nbytes, np.bincount(g.source, minlength=sources)


# ---- tables of servers that are not there ------------------------------------------------------


def server_tables(m: ModelConfig, tp: int, ep: int = 1) -> list[TargetTable]:
    """Returns the table of each of the `tp` ranks of a server, its experts dealt out over `ep`
    groups of them and cut within a group. Raises ValueError where the model does not divide so."""
    _check(m, tp, ep)
    vocab = padded_vocab_size(m.vocab_size, tp, VOCAB_PADDING)
    entries: list[list[Slice]] = [[] for _ in range(tp)]
    cut_alike = cache(lambda op, ranks: shard_map(m, op, ranks, vocab))  # layers, and experts
    for param, _ in family_of(m).params(m):
        ranks, first, below, name = tp, 0, 0, param.name
        if param.expert is not None:
            ranks, own = tp // ep, m.experts.num_experts // ep
            first, below = param.expert // own * ranks, param.expert % own
            name = name.replace(f".local_experts.{param.expert}.", ".")
        op = param.op
        if isinstance(op, FusedQKV):
            op = _ByHeads(op.bias, op.gate)
        cut = cut_alike(op, ranks)
        offset = below * math.prod(cut.shape)
        for tensor, (_, boxes) in zip(param.hf, cut.sources, strict=True):
            for b in boxes:
                if b.rank and param.expert is not None and op.replicated:
                    continue  # an expert's bias is added on the first of its ranks
                view = View(offset + b.view.offset, b.view.shape, b.view.strides)
                entries[first + b.rank].append(Slice(tensor, *hf_box(param, b), name, (view,)))
    model = f"{m.family}-{m.num_layers}x{m.hidden_size}-tp{tp}-ep{ep}"
    return [TargetTable(e, f"{model}-rank{rank}") for rank, e in enumerate(entries)]


def _check(m: ModelConfig, tp: int, ep: int) -> None:
    if tp % ep:
        raise ValueError(f"ep={ep} does not divide the server's tp={tp}")
    sizes = [("attention heads", m.attention.heads, tp)]
    if m.recurrent is not None:
        sizes += [(name, size, tp) for name, size in m.recurrent.sizes_to_share().items()]
    if m.moe is not None:
        sizes.append(("experts", m.moe.num_experts, ep))
        sizes.append(("columns of an expert", m.moe.intermediate_size, tp // ep))
    for name, size, ranks in sizes:
        if size % ranks:
            raise ValueError(f"{size} {name} do not divide over {ranks} ranks of a server")


class _ByHeads(FusedQKV):
    """q, k and v by heads, each rank's below each other; more ranks than key/value heads share
    them. A head of q has its gate below it."""

    def segments(self, m: ModelConfig, tp: int, vocab_rows: int) -> Iterator[Segment]:
        a, cols, row = m.attention, 1 if self.bias else m.hidden_size, 0
        for source, heads in enumerate((a.heads, a.kv_heads, a.kv_heads)):
            dim = a.head_dim * (1 + (self.gate and source == 0))
            rows = max(1, heads // tp) * dim
            for rank in range(tp):
                first = rank * heads // tp * dim
                yield Segment(rank, source, row, first, rows, 0, cols)
            row += rows
