"""Streams weights: shards -> flat HF buckets on their senders -> all servers.

Every bucket is gathered while the one before it is on its way and being loaded; a server gets
bucket k+1 only after it has answered for bucket k, whoever sends it. A sender reaches all servers
through a group of its own, of which it is rank 0, as SGLang wants it; the first sender speaks for
all of them where one must.

Memory beyond the parameters, all of it on senders: 2 * bucket_bytes (of which an eighth is for the
messages that a bucket is put together from), or 2 buckets where the largest tensor is larger. A
rank that gives pieces to a sender holds one message. To send changes alone also takes a copy of a
sender's buckets (see `DeltaBase`) and up to two buckets of changes; to send FP8, two of it.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from megarl.api.records import WeightUpdateMeta
from megarl.config.rollout import TRANSPORTS
from megarl.models.gather import Bucket, BucketGatherer
from megarl.weight_sync.buffers import BucketBuffers
from megarl.weight_sync.channel import UpdateChannel
from megarl.weight_sync.encoding import Changes, DeltaBase, Ready, quantize_bucket
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.plan import SyncPlan, update_body
from megarl.weight_sync.senders import split_budget, spread_senders
from megarl.weight_sync.servers import BucketTransfer, Deadline, Servers
from megarl.weight_sync.slices.fingerprints import Fingerprints
from megarl.weight_sync.slices.sync import SliceSync
from megarl.weight_sync.stream import BucketStream
from megarl.weight_sync.transports import Transport, WeightSource
from megarl.weight_sync.verify import Verifier
from megarl.wire import block_fp8

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Target:
    """Names the members of the groups: servers and senders."""

    addresses: tuple[str, ...]
    backend: str
    senders: tuple[int, ...]


class DistributedTransport(Transport):
    """Broadcasts buckets to the servers. A channel to them exists on senders only."""

    requirements = TRANSPORTS["distributed"].requirements

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source)
        self._channel: UpdateChannel | None = None
        self._buffers: dict[int, BucketBuffers] = {}
        self._met: _Target | None = None
        self._base = DeltaBase()
        self._slices = SliceSync(source)

    def upload(self, meta: WeightUpdateMeta, deadline: Deadline, phases: Phases) -> None:
        """Sends slices, or streams all buckets or their changes, to the servers. Collective. Raises
        RuntimeError where a rank or server fails, ServersLost where some are lost; the next upload
        then connects anew."""
        if meta.sharded != "off" and self._slices.upload(meta, deadline, phases):
            self._base.forget()
            phases.metrics["sharded"] = 1.0
            return
        phases.metrics["sharded"] = 0.0
        self._stream(meta, deadline, phases)

    def _stream(self, meta: WeightUpdateMeta, deadline: Deadline, phases: Phases) -> None:
        """Streams buckets. Collective."""
        agreement = self.source.agreement
        senders = agreement.together(self._senders, meta)
        bucket_bytes, staging = split_budget(meta.bucket_bytes)
        plan, gatherer = self.plan_buckets(bucket_bytes, senders, staging=staging)
        need, target = plan.sizes, self._target(plan, meta)
        self._hold(need)
        holds = [self._buffers[o].hold(n) for o, n in need.items()]
        with phases.time("session"):
            met = agreement.together(self._still_met, target, deadline)
        states = agreement.gather((holds, met))
        try:
            self._take_buffers(need, [held for held, _ in states])
            with phases.time("connect"):
                changes = self._changes(plan, meta, deadline)
                if self._met is None or not all(met for _, met in states):
                    self._connect(target, deadline)
            with phases.time("session"):
                stream = agreement.together(
                    self._open, plan, gatherer, changes, meta, deadline, phases
                )
            speaker = plan.senders[0]
            fingerprints = Fingerprints(self.source, speaker, meta, deadline, phases)
            fingerprints.record({} if self._channel is None else self._channel.info)
            stream.run()
            proved = fingerprints.compare()
            with phases.time("session"):
                agreement.together(self._close_session, deadline)
            if stream.changes is not None:
                self._base.id = stream.changes.id
            if meta.verify != "off":
                with phases.time("verify"):
                    stream.verify(proved)
            stream.account()
        except BaseException:
            self._abandon()
            raise
        if self.source.device.type == "cuda":
            self._drop_buffers()  # training needs the memory

    def close(self) -> None:
        """Drops buffers and copies, and leaves the groups. Servers may object, which is logged."""
        self._slices.close()
        self._drop_buffers()
        self._base.forget()
        self._leave(abort=False)

    # ---- buffers

    def _senders(self, meta: WeightUpdateMeta) -> tuple[int, ...]:
        layout = self.source.layout
        count = meta.senders if meta.senders is not None else layout.pp
        return spread_senders(layout, count, self.source.sender)

    def _hold(self, need: Mapping[int, int]) -> None:
        """Keeps buffers of these senders, empty where they are new, and of no others."""
        for sender in self._buffers.keys() - need.keys():
            self._buffers.pop(sender).drop()
        for sender in need.keys() - self._buffers.keys():
            self._buffers[sender] = BucketBuffers(self.source.agreement, sender, self.source.device)

    def _take_buffers(self, need: Mapping[int, int], held: Sequence[Sequence[bool]]) -> None:
        """Makes buffers large enough. held: by rank, whether it has each sender's. Collective."""
        for (sender, nbytes), ranks in zip(need.items(), zip(*held), strict=True):
            if not all(ranks):
                self._buffers[sender].take(nbytes)

    def _drop_buffers(self) -> None:
        for buffers in self._buffers.values():
            buffers.drop()

    # ---- what the servers hold already

    def _changes(
        self, plan: SyncPlan, meta: WeightUpdateMeta, deadline: Deadline
    ) -> Changes | None:
        """Returns what changes are made against; None where all weights are to be sent and none
        remembered. Collective."""
        if not meta.delta:
            self._base.forget()
            return None
        agreement, speaker = self.source.agreement, plan.senders[0]
        stale = agreement.together(self._is_stale, plan, meta, deadline)
        mine = uuid.uuid4().hex[:12] if self.source.rank == speaker else "", stale
        name, stale = agreement.gather(mine)[speaker]
        if stale:
            self._base.forget()
            self._leave(abort=True)
        base = self._base.begin(plan.digest)
        return Changes(self._base, base, f"v{meta.number}-{name}")

    def _is_stale(self, plan: SyncPlan, meta: WeightUpdateMeta, deadline: Deadline) -> bool:
        """Returns whether a server does not hold what was sent last: it may be a new process at an
        old address, in no group, so all are connected anew. Copies made by another plan are
        forgotten here."""
        if self._base.plan != plan.digest:
            self._base.forget()
        if self._base.id is None or self.source.rank != plan.senders[0]:
            return False
        infos = Servers(meta.addresses).info(deadline)
        other = [
            f"{s} (version {i.weight_version})"
            for s, i in infos.items()
            if i.weights_id != self._base.id
        ]
        if other:
            log.info("all weights are sent: %s not at update %s", ", ".join(other), self._base.id)
        return bool(other)

    # ---- to whom

    def _target(self, plan: SyncPlan, meta: WeightUpdateMeta) -> _Target:
        backend = meta.comm_backend or ("nccl" if self.source.device.type == "cuda" else "gloo")
        return _Target(meta.addresses, backend, tuple(plan.sizes))

    def _still_met(self, target: _Target, deadline: Deadline) -> bool:
        """Returns whether this rank, on the first sender also every server, is in the groups."""
        if self._met != target or self._channel is None or self.source.rank != target.senders[0]:
            return self._met == target
        again = self._channel.servers.started_again(deadline)
        if again:
            log.info("connecting to all servers again: %s started anew", ", ".join(again))
        return not again

    def _connect(self, target: _Target, deadline: Deadline) -> None:
        """Connects all senders: at first, after a failure, and when servers or senders have
        changed. One sender follows the other: a server joins one group at a time, and waits in it.
        Collective."""
        if self._met is not None:
            self._slices.ask_again()
        together = self.source.agreement.together
        together(partial(self._leave, abort=True))  # some in the group may be dead
        for sender in target.senders:
            together(self._join, sender, target, deadline)
        self._met = target

    def _join(self, sender: int, target: _Target, deadline: Deadline) -> None:
        if self.source.rank == sender:
            self._channel = UpdateChannel(
                Servers(target.addresses),
                backend=target.backend,
                device=self.source.device,
                deadline=deadline,
            )

    def _open(
        self,
        plan: SyncPlan,
        gatherer: BucketGatherer,
        changes: Changes | None,
        meta: WeightUpdateMeta,
        deadline: Deadline,
        phases: Phases,
    ) -> GroupStream:
        """Opens a session on the servers, and makes the stream."""
        channel, verifier = self._channel, None
        if channel is not None:
            speaks = self.source.rank == plan.senders[0]
            verifier = Verifier.of(meta, channel.info, plan.names)
            unable = [s for s, i in channel.info.items() if not i.applies_delta]
            if changes is not None and unable and speaks:
                log.warning(
                    "weight_sync.options.delta: all weights are sent, for %s cannot apply changes "
                    "(the embedded server can, a stock SGLang server with sharded=true)",
                    ", ".join(unable),
                )
            changes = None if unable else changes
            if speaks:
                channel.servers.begin_update(deadline)
        return GroupStream(
            source=self.source,
            plan=plan,
            gatherer=gatherer,
            meta=meta,
            deadline=deadline,
            phases=phases,
            verifier=verifier,
            channel=channel,
            changes=changes,
            buffers=self._buffers,
        )

    def _close_session(self, deadline: Deadline) -> None:
        """Ends the session on the one sender that opened it."""
        if self._channel is not None:
            self._channel.servers.end_update(deadline)

    def _abandon(self) -> None:
        """Gives up a channel in an unknown state; the next upload opens a new one, with buffers
        that no broadcast under way still reads.
        """
        self._drop_buffers()
        self._base.forget()
        self._leave(abort=True)

    def _leave(self, *, abort: bool) -> None:
        self._met = None
        if self._channel is not None:
            channel, self._channel = self._channel, None
            for objection in channel.close(abort=abort):
                log.warning("leaving the update group: %s", objection)


@dataclass(kw_only=True)
class GroupStream(BucketStream):
    """Brings buckets to the servers by broadcasts. channel: on senders, None elsewhere."""

    channel: UpdateChannel | None
    changes: Changes | None
    buffers: Mapping[int, BucketBuffers]
    _encoded: int = 0  # the most bytes of FP8 and changes that there were

    def gather(self, bucket: Bucket) -> Ready | None:
        """Gathers and encodes a bucket: on its sender, else None. Collective."""
        index, device = bucket.index, self.gatherer.device
        buffers = self.buffers[self.plan.senders[index]]
        with self.phases.time_on(device, "gather"):
            lying = flat = self.gatherer.lying(bucket)
            if flat is None:
                flat = self.gatherer.gather(
                    bucket,
                    buffers.slot(self.plan.turns[index]),
                    shared=buffers.shared,
                    packing=partial(self.phases.time_on, device, "pack"),
                )
        if flat is None:
            return None
        last = self.is_last(bucket)
        with self.phases.time_on(device, "encode"):
            if self.meta.quantization == "fp8_block":
                bucket, flat = quantize_bucket(bucket, flat)
            ready = Ready(bucket, flat, [flat], lent=flat is lying)
            if not self.meta.flattened:
                ready.tensors = [block_fp8.as_sent(t) for _, t in bucket.views(flat)]
            if self.changes is not None:
                ready = self.changes.encode(ready, last=last)
        extra = sum(r.extra_bytes(buffers.pair) for r in (ready, *self.in_memory()))
        self._encoded = max(self._encoded, extra)
        return ready

    def deliver(self, ready: Ready, what: str) -> BucketTransfer:
        """Broadcasts the bucket to all servers and asks them to load it. Called on its sender."""
        assert self.channel is not None, "senders have a channel"
        nbytes = sum(t.nbytes for t in ready.tensors)
        self.counts.update(bytes=nbytes, broadcasts=len(ready.tensors))
        body = update_body(
            ready.bucket,
            group_name=self.channel.group_name,
            flattened=self.meta.flattened,
            version=self.meta.number,
            last=self.is_last(ready.bucket),
            flush=self.meta.flush_cache,
            weights_id=None if self.changes is None else self.changes.id,
            changes=ready.changes,
        )
        return self.channel.deliver(what, ready.tensors, body, self.deadline)

    def memory(self) -> int:
        """Returns the bytes of buffers, messages and (at most) encoded buckets on this rank."""
        held = sum(b.nbytes for b in self.buffers.values())
        return self._encoded + self.gatherer.message_bytes + held
