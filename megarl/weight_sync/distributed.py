"""The streaming transport: shards -> flat HF buckets on the owner -> all servers.

Every bucket is gathered while the one before it is on its way and being loaded; a server gets
bucket k+1 only after it has answered for bucket k. Memory beyond the parameters: two buckets on the
owner, and one bucket of messages there where the ranks share no host memory. To send changes alone
also takes a copy of all buckets (see `Acknowledged`) and up to two buckets of changes; to send FP8,
two buckets of it.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megarl.api.records import WeightUpdateMeta
from megarl.models.gather import Bucket, BucketGatherer
from megarl.models.piece_table import PieceTable
from megarl.parallel.layout import Layout
from megarl.weight_sync import fp8
from megarl.weight_sync.acknowledged import PAYS, Acknowledged
from megarl.weight_sync.agreement import Agreement, Deadline
from megarl.weight_sync.buffers import BucketBuffers
from megarl.weight_sync.channel import Exchange, UpdateChannel
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.plan import Dtypes, SyncPlan, check_digests, plan_sync, update_body
from megarl.weight_sync.quantize import quantize_bucket
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
        self._acknowledged = Acknowledged()

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
        phases.figures |= stream.figures()

    def close(self) -> None:
        self._buffers.drop()
        self._acknowledged.forget()
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
            self._check_acknowledged(plan, meta, deadline)
            self._connect(meta, deadline)
        stream = _Stream(
            plan, gatherer, self._channel, self._buffers, self._remembered(meta), meta, deadline,
            phases,
        )  # fmt: skip
        stream.begin()
        return stream

    def _check_acknowledged(
        self, plan: SyncPlan, meta: WeightUpdateMeta, deadline: Deadline
    ) -> None:
        """Forgets what was sent where changes to it are of no use. A server that does not hold it
        may be a new process at an old address, in no group: then everybody is connected anew.
        """
        last = self._acknowledged
        if not meta.delta or last.plan != plan.digest:
            last.forget()
        if last.id is None:
            return
        infos = Servers(meta.addresses).info(deadline)
        other = [f"{s} (version {i.weight_version})" for s, i in infos.items()
                 if i.weights_id != last.id]  # fmt: skip
        if other:
            log.info("all weights are sent: %s not at update %s", ", ".join(other), last.id)
            last.forget()
            self._leave(abort=True)

    def _remembered(self, meta: WeightUpdateMeta) -> Acknowledged | None:
        """What changes are made against, on the owner, where all servers can apply them."""
        if self._channel is None or not meta.delta:
            return None
        unable = [s for s, i in self._channel.info.items() if not i.applies_delta]
        if unable:
            log.warning(
                "weight_sync.delta: all weights are sent, for %s cannot apply changes (a stock "
                "SGLang server cannot, megarl's embedded server can)", ", ".join(unable),
            )  # fmt: skip
        return None if unable else self._acknowledged

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
        self._acknowledged.forget()
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
        remembered: Acknowledged | None,
        meta: WeightUpdateMeta,
        deadline: Deadline,
        phases: Phases,
    ) -> None:
        self.plan, self.gatherer, self.channel, self.buffers = plan, gatherer, channel, buffers
        self.meta, self.deadline, self.phases = meta, deadline, phases
        self.verifier = Verifier(channel.info) if channel and meta.verify else None
        self._in_flight: Exchange[float] | None = None
        self.sent_bytes, self.broadcasts, self.changed, self.compared = 0, 0, 0, 0
        self.remembered = remembered
        self._base = self._id = None
        if remembered is not None:
            self._base = remembered.begin(plan.digest)
            self._id = f"v{meta.version}-{uuid.uuid4().hex[:12]}"

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
        with self.phases.time("encode"):
            if self.meta.quantization == "fp8_block":
                bucket, flat = quantize_bucket(bucket, flat)
            tensors, changes = self._encode(bucket, flat)
        self._settle()
        if tensors:
            self._in_flight = self._send(self.channel, bucket, tensors, changes)
        if self.verifier is not None:
            with self.phases.time("checksum"):
                self.verifier.add(fp8.dequantized(bucket.views(flat)))

    def end(self) -> None:
        """Returns when the servers hold the whole version."""
        if self.channel is not None:
            self._settle()
            self.channel.end(self.deadline)
        if self.remembered is not None:
            self.remembered.id = self._id

    def figures(self) -> dict[str, float]:
        """changed: the part of the numbers that differ from the version before, where versions were
        compared; then bytes_whole is what all of them would have been.
        """
        figures = {
            "bytes": float(self.sent_bytes),
            "buckets": float(len(self.plan.buckets)),
            "broadcasts": float(self.broadcasts),
        }
        if self.compared:
            figures["changed"] = self.changed / self.compared
            figures["bytes_whole"] = float(self.plan.nbytes)
        return figures

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

    def _encode(
        self, bucket: Bucket, flat: torch.Tensor
    ) -> tuple[Sequence[torch.Tensor], dict[str, Any] | None]:
        """What to broadcast of a bucket, nothing where nothing changed, and how it is encoded."""
        tensors = [flat] if self.meta.flattened else [fp8.as_sent(t) for _, t in bucket.views(flat)]
        changes = None
        if self.remembered is None:
            return tensors, None
        if self._base is not None:
            delta = self.remembered.changes(bucket, flat)
            self.changed, self.compared = self.changed + delta.changed, self.compared + delta.count
            if not delta.changed and not self._is_last(bucket):
                return [], None
            if delta.payload.numel() < PAYS * bucket.nbytes:
                tensors = [delta.payload]
                changes = {"base": self._base, "chunks": delta.body()}
        self.remembered.keep(bucket, flat, on_host=self.meta.delta_on_host)
        return tensors, changes

    def _is_last(self, bucket: Bucket) -> bool:
        return bucket.index == len(self.plan.buckets) - 1

    def _send(
        self,
        channel: UpdateChannel,
        bucket: Bucket,
        tensors: Sequence[torch.Tensor],
        changes: dict[str, Any] | None,
    ) -> Exchange[float]:
        self.sent_bytes += sum(t.nbytes for t in tensors)
        self.broadcasts += len(tensors)
        body = update_body(
            bucket,
            group_name=channel.group_name,
            flattened=self.meta.flattened,
            version=self.meta.version,
            last=self._is_last(bucket),
            weights_id=self._id,
            changes=changes,
        )
        first, final = bucket.members[0].name, bucket.members[-1].name
        what = (
            f"weights of version {self.meta.version}, bucket {bucket.index + 1} of "
            f"{len(self.plan.buckets)} ({first} to {final})"
        )
        return channel.deliver(what, tensors, body, self.deadline)
