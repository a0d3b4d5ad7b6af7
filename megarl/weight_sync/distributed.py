"""The streaming transport: shards -> flat HF buckets on the owner -> all servers.

Every bucket is gathered while the one before it is on its way and being loaded; a server gets
bucket k+1 only after it has answered for bucket k. Memory beyond the parameters: two buckets on the
owner, and one bucket of messages there where the ranks share no host memory.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
import torch.distributed as dist

from megarl.api.records import WeightUpdateMeta
from megarl.models.gather import Bucket, BucketGatherer
from megarl.models.piece_table import PieceTable
from megarl.parallel.layout import Layout
from megarl.weight_sync.agreement import Agreement, Deadline
from megarl.weight_sync.buffers import BucketBuffers
from megarl.weight_sync.channel import Exchange, UpdateChannel
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.plan import Dtypes, SyncPlan, check_digests, plan_sync, update_body
from megarl.weight_sync.servers import Servers
from megarl.weight_sync.verify import Verifier

log = logging.getLogger(__name__)


class DistributedTransport:
    """Collective over the engine's ranks. The channel to the servers exists on the owner only."""

    def __init__(
        self,
        table: PieceTable,
        layout: Layout,
        rank: int,
        params: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup | None,
        *,
        dtype: Dtypes,
        owner: int,
        device: torch.device,
        agreement: Agreement,
    ) -> None:
        self.table, self.layout, self.rank, self.params = table, layout, rank, params
        self.group, self.dtype, self.owner, self.device = group, dtype, owner, device
        self.agreement = agreement
        self._planned: tuple[int, SyncPlan, BucketGatherer] | None = None
        self._channel: UpdateChannel | None = None
        self._buffers = BucketBuffers(agreement, owner, device)
        self._connected_to: tuple[tuple[str, ...], str] | None = None

    def upload(self, meta: WeightUpdateMeta, deadline: Deadline, phases: Phases) -> None:
        together = self.agreement.together
        plan, gatherer = together(self._plan, meta.bucket_bytes)
        states = self.agreement.gather((plan.digest, self._buffers.hold(plan.largest)))
        check_digests([digest for digest, _ in states])
        try:
            if not all(held for _, held in states):
                self._buffers.take(plan.largest)
            stream = together(self._open, plan, gatherer, meta, deadline, phases)
            for bucket in plan.buckets:
                together(stream.step, bucket)
            together(stream.end)
            if meta.verify:
                with phases.time("verify"):
                    together(stream.verify)
        except BaseException:
            self._abandon()
            raise
        if self.device.type == "cuda":
            self._buffers.drop()  # training needs the memory
        tensors = sum(len(b.members) for b in plan.buckets)
        phases.figures |= {
            "bytes": float(plan.nbytes),
            "buckets": float(len(plan.buckets)),
            "broadcasts": float(len(plan.buckets) if meta.flattened else tensors),
        }

    def close(self) -> None:
        self._buffers.drop()
        self._leave(abort=False)

    def _plan(self, bucket_bytes: int) -> tuple[SyncPlan, BucketGatherer]:
        if self._planned is None or self._planned[0] != bucket_bytes:
            plan = plan_sync(self.table, self.dtype, bucket_bytes, self.owner)
            gatherer = BucketGatherer(
                self.table, self.layout, self.rank, self.params, plan.buckets, owner=self.owner,
                group=self.group, device=self.device,
            )  # fmt: skip
            self._planned = bucket_bytes, plan, gatherer
        return self._planned[1:]

    def _open(
        self,
        plan: SyncPlan,
        gatherer: BucketGatherer,
        meta: WeightUpdateMeta,
        deadline: Deadline,
        phases: Phases,
    ) -> _Stream:
        with phases.time("connect"):
            self._connect(meta, deadline)
        stream = _Stream(plan, gatherer, self._channel, self._buffers, meta, deadline, phases)
        stream.begin()
        return stream

    def _connect(self, meta: WeightUpdateMeta, deadline: Deadline) -> None:
        """Lazily, and again after a failure or when the servers have changed."""
        backend = meta.comm_backend or ("nccl" if self.device.type == "cuda" else "gloo")
        if self.rank != self.owner or self._connected_to == (meta.addresses, backend):
            return
        self._leave(abort=True)  # whoever is not in the new group may be dead
        self._channel = UpdateChannel(
            Servers(meta.addresses), backend=backend, device=self.device, deadline=deadline
        )
        self._connected_to = meta.addresses, backend

    def _abandon(self) -> None:
        """Gives up a channel in an unknown state; the next upload opens a new one, with buffers
        that no broadcast under way still reads.
        """
        self._buffers.drop()
        self._leave(abort=True)

    def _leave(self, *, abort: bool) -> None:
        self._connected_to = None
        if self._channel is not None:
            channel, self._channel = self._channel, None
            for objection in channel.close(abort=abort):
                log.warning("leaving the update group: %s", objection)


class _Stream:
    """One sync. Every rank calls the same methods; all but the owner only gather."""

    def __init__(
        self,
        plan: SyncPlan,
        gatherer: BucketGatherer,
        channel: UpdateChannel | None,
        buffers: BucketBuffers,
        meta: WeightUpdateMeta,
        deadline: Deadline,
        phases: Phases,
    ) -> None:
        self.plan, self.gatherer, self.channel, self.buffers = plan, gatherer, channel, buffers
        self.meta, self.deadline, self.phases = meta, deadline, phases
        self.verifier = Verifier(channel.info) if channel and meta.verify else None
        self._in_flight: Exchange[float] | None = None

    def begin(self) -> None:
        if self.channel is not None:
            self.channel.begin(self.deadline)

    def step(self, bucket: Bucket) -> None:
        """Gathers `bucket` while the one before it is under way, then lets it follow."""
        with self.phases.time("gather"):
            pair = self.buffers.pair
            out = pair[bucket.index % 2] if pair else None
            flat = self.gatherer.gather(bucket, out, shared=self.buffers.shared)
        if self.channel is None:
            return
        assert flat is not None
        self._settle()
        self._in_flight = self._send(self.channel, bucket, flat)
        if self.verifier is not None:
            with self.phases.time("checksum"):
                self.verifier.add(bucket.views(flat))

    def end(self) -> None:
        """Returns when the servers hold the whole version."""
        if self.channel is not None:
            self._settle()
            self.channel.end(self.deadline)

    def verify(self) -> None:
        if self.channel is not None and self.verifier is not None:
            verified = self.verifier.check(self.channel.servers, self.deadline)
            self.phases.figures["verified"] = float(verified)

    def _settle(self) -> None:
        """Waits until every server has loaded the bucket under way, if there is one."""
        exchange, self._in_flight = self._in_flight, None
        if exchange is not None:
            exchange.wait(self.deadline)
            sent, answered = exchange.ours.result(), exchange.answered()
            self.phases.add("broadcast", sent - exchange.begun)
            self.phases.add("load_wait", max(0.0, answered - sent))

    def _send(self, channel: UpdateChannel, bucket: Bucket, flat: torch.Tensor) -> Exchange[float]:
        last = bucket.index == len(self.plan.buckets) - 1
        body = update_body(
            bucket,
            group_name=channel.group_name,
            flattened=self.meta.flattened,
            version=self.meta.version,
            last=last,
        )
        tensors = [flat] if self.meta.flattened else [t for _, t in bucket.views(flat)]
        first, final = bucket.members[0].name, bucket.members[-1].name
        what = (
            f"weights of version {self.meta.version}, bucket {bucket.index + 1} of "
            f"{len(self.plan.buckets)} ({first} to {final})"
        )
        return channel.deliver(what, tensors, body, self.deadline)
