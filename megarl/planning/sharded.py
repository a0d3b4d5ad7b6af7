"""Estimates a weight sync in which each server rank takes the slices it keeps, and no more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megarl.models.hf_config import ModelConfig
from megarl.models.piece_table import build_piece_table
from megarl.parallel.layout import Layout
from megarl.planning.memory import BF16, FP32
from megarl.planning.server_tables import server_tables
from megarl.planning.traffic import Cluster, Receivers
from megarl.transfer.geometry import Geometry, Sources
from megarl.transfer.plan import Receiver, TransferPlan, plan_transfer

REQUESTS = 4  # to each server: begin, receive, accept, end


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


def report_sharded(
    m: ModelConfig,
    layout: Layout,
    receivers: Receivers,
    cluster: Cluster,
    *,
    server_ep: int,
    round_bytes: int,
) -> Iterator[str]:
    """Yields lines about one sync shard to shard, and what planning it took."""
    started = time.perf_counter()
    plan = plan_sharded(m, layout, receivers, server_ep=server_ep, round_bytes=round_bytes)
    planned = time.perf_counter() - started
    e = estimate_sharded(plan, cluster)
    yield f"\nshard to shard: {e.total / 1e9:,.1f} GB in {e.rounds} rounds of {round_bytes:,} bytes"
    yield (
        f"  a server GPU takes     {e.received / 1e9:.1f} GB in {e.messages:,} messages (largest "
        f"{e.largest / 1e6:.1f} MB), senders: {e.senders}"
    )
    yield f"  a training GPU sends   {e.sent / 1e9:.1f} GB"
    busy = f"network {e.network_seconds:.2f} s, copies {e.copy_seconds:.2f} s"
    yield f"  busy                   {busy}"
    yield f"  estimate {e.seconds:.2f} s; tables and plan took {planned:.1f} s here"
