"""Sends weights by slices where the servers can take them, else buckets of HF tensors: one rank
gathers each and broadcasts it.

The sender joins a group with all servers' workers as its rank 0, as SGLang wants it. Bucket k+1 is
sent when every server has answered for bucket k, and gathered meanwhile.

Memory beyond the parameters, on the sender: two buckets, and an eighth of one for the messages that
a bucket is put together from. A rank that gives pieces holds one message. To send FP8
takes two buckets of it more.
"""

from __future__ import annotations

import concurrent.futures as cf
import contextlib
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megarl.api.records import WeightUpdateMeta
from megarl.config.rollout import TRANSPORTS
from megarl.transfer.gather import BucketGatherer
from megarl.utils.http import in_thread
from megarl.utils.rendezvous import listen
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.plan import SyncPlan, rank_offsets, update_body
from megarl.weight_sync.servers import (
    CLOSE_TIMEOUT,
    GRACE,
    BucketTransfer,
    Deadline,
    ServerInfo,
    Servers,
    address_for,
    failures,
)
from megarl.weight_sync.slices import SliceSync
from megarl.weight_sync.transports import Transport, WeightSource
from megarl.weight_sync.verify import Fingerprints
from megarl.wire import block_fp8
from megarl.wire.buckets import Bucket, Member
from megarl.wire.process_group import (
    destroy_update_group,
    init_update_group,
    set_group_timeout,
)

log = logging.getLogger(__name__)

# How much longer than a sync may take its collectives live: ours is the readable error, and NCCL's
# watchdog ends the process.
MARGIN = 60.0

Gathered = tuple[Bucket, torch.Tensor]  # and its bytes, uint8


@dataclass(kw_only=True)
class GroupStream:
    """Brings all buckets of a plan to the servers by broadcasts. Every rank takes the same steps,
    together; all but the sender only gather. The version arrives with the last bucket.

    channel: on the sender, None elsewhere; pair: its buffers.
    """

    source: WeightSource
    plan: SyncPlan
    gatherer: BucketGatherer
    meta: WeightUpdateMeta
    deadline: Deadline
    phases: Phases
    channel: UpdateChannel | None
    pair: Sequence[torch.Tensor]
    nbytes: int = 0  # that have been sent
    _encoded: int = 0  # the most bytes of FP8 that a bucket took
    _under_way: BucketTransfer | None = None

    def run(self, info: Mapping[str, ServerInfo]) -> None:
        """Sends all buckets, and compares what the servers then hold with the trainers' weights.
        info: of each server, on the sender. Collective."""
        source, together = self.source, self.source.ranks.together
        fingerprints = Fingerprints(source, source.sender, self.meta, self.deadline, self.phases)
        fingerprints.record(info)
        for bucket in self.plan.buckets:
            together(self._step, bucket)
        together(self._settle)
        fingerprints.compare()

    def account(self) -> None:
        """Notes the metrics at the end; peak_extra_bytes is the most that a rank has allocated for
        the sync: buffers, messages and (at most) encoded buckets. Collective."""
        extra = 2 * self._encoded + self.gatherer.message_bytes + sum(b.nbytes for b in self.pair)
        metrics: dict[str, float] = {
            "bytes": self.nbytes,
            "buckets": len(self.plan.buckets),
            "peak_extra_bytes": max(self.source.ranks.gather(extra)),
        }
        self.phases.metrics |= {name: float(value) for name, value in metrics.items()}

    def _gather(self, bucket: Bucket) -> Gathered | None:
        """Gathers and encodes a bucket: on the sender, else None. Collective."""
        device = self.source.device
        with self.phases.time("gather", device):
            flat = self.gatherer.gather(
                bucket,
                self.pair[bucket.index % 2] if self.pair else None,
                packing=partial(self.phases.time, "pack", device),
            )
        if flat is None or self.meta.quantization == "none":
            return None if flat is None else (bucket, flat)
        with self.phases.time("encode", device):
            bucket, flat = quantize_bucket(bucket, flat)
        self._encoded = max(self._encoded, flat.nbytes)
        return bucket, flat

    def _step(self, bucket: Bucket) -> None:
        """Gathers a bucket, and sends it when the servers have answered for the one before it."""
        gathered = self._gather(bucket)
        self._settle()
        if gathered is None:
            return
        bucket, flat = gathered
        first, final = bucket.members[0].name, bucket.members[-1].name
        what = (
            f"weights of version {self.meta.number}, bucket {bucket.index + 1} of "
            f"{len(self.plan.buckets)} ({first} to {final})"
        )
        assert self.channel is not None, "the sender has a channel"
        body = update_body(
            bucket,
            group_name=self.channel.group_name,
            version=self.meta.number,
            last=bucket.index == len(self.plan.buckets) - 1,
            flush=self.meta.flush_cache,
        )
        self.nbytes += flat.nbytes
        self._under_way = self.channel.deliver(what, flat, body, self.deadline)

    def _settle(self) -> None:
        """Waits until every server has loaded the bucket under way, if there is one."""
        transfer, self._under_way = self._under_way, None
        if transfer is None:
            return
        transfer.wait(self.deadline)
        left = max(transfer.begun, transfer.ours.result())
        self.phases.add("broadcast", left - transfer.begun)
        self.phases.add("load_wait", max(0.0, transfer.answered() - left))


class DistributedTransport(Transport):
    """Sends slices where the servers can take them, else whole tensors by broadcasts. Their group
    is kept from one upload to the next; the sender alone is in it, and has the buffers."""

    requirements = TRANSPORTS["distributed"].requirements

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source)
        self._slices = SliceSync(source)
        self._channel: UpdateChannel | None = None
        self._pair: list[torch.Tensor] = []

    def upload(self, meta: WeightUpdateMeta, deadline: Deadline, phases: Phases) -> None:
        """Sends slices, or whole tensors, to the servers. Collective. Raises RuntimeError where a
        rank or server fails, ServersLost where some are lost; the next upload then connects
        anew."""
        sharded = meta.sharded != "off" and self._slices.upload(meta, deadline, phases)
        phases.metrics["sharded"] = float(sharded)
        if sharded:
            return
        reconnected = True  # as the next upload will be after a failure
        try:
            reconnected = self._broadcast(meta, deadline, phases)
        except BaseException:  # the next upload takes buffers that no broadcast still reads
            self._leave(abort=True)
            raise
        finally:
            if reconnected:  # to servers that may take slices by now
                self._slices.ask_again()
        if self.source.device.type == "cuda":
            self._pair = []  # training needs the memory

    def close(self) -> None:
        """Drops copies and buffers, and leaves the groups. Servers may object, which is logged."""
        self._slices.close()
        self._leave()

    def _broadcast(self, meta: WeightUpdateMeta, deadline: Deadline, phases: Phases) -> bool:
        """Sends all buckets. Returns whether the servers had to be connected again. Collective."""
        source = self.source
        plan, gatherer = self.plan_buckets(meta.bucket_bytes)
        again = source.from_rank(source.sender, self._open, plan.largest, meta, deadline, phases)
        stream = GroupStream(
            source=source,
            plan=plan,
            gatherer=gatherer,
            meta=meta,
            deadline=deadline,
            phases=phases,
            channel=self._channel,
            pair=self._pair,
        )
        stream.run(self._channel.info if self._channel else {})
        with phases.time("session"):
            source.ranks.together(self._close_session, deadline)
        stream.account()
        return bool(again)

    # ---- on the sender

    def _open(
        self, nbytes: int, meta: WeightUpdateMeta, deadline: Deadline, phases: Phases
    ) -> bool:
        """Opens a session on the servers, and makes room for two buckets. Returns whether their
        group replaces one. Hosts keep the room: the kernel takes longer to hand out fresh pages
        than a gather takes to fill them."""
        with phases.time("connect"):
            channel, again = self._connect(meta, deadline)
        with phases.time("session"):
            channel.servers.begin_update(deadline)
        if not self._pair or self._pair[0].numel() < nbytes:
            self._pair = []  # freed before their successors are allocated
            room = partial(torch.empty, nbytes, dtype=torch.uint8, device=self.source.device)
            self._pair = [room(), room()]
        return again

    def _connect(self, meta: WeightUpdateMeta, deadline: Deadline) -> tuple[UpdateChannel, bool]:
        """Joins a group with the servers where there is none: at first, after a failure, and when
        servers are others or started anew. Returns it, and whether it replaces one."""
        backend = meta.comm_backend or ("nccl" if self.source.device.type == "cuda" else "gloo")
        channel = self._channel
        if channel and (channel.servers.addresses, channel.backend) == (meta.addresses, backend):
            again = channel.servers.started_again(deadline)
            if not again:
                return channel, False
            log.info("connecting to all servers again: %s started anew", ", ".join(again))
        self._leave(abort=True)  # some in the group may be dead
        self._channel = UpdateChannel(
            Servers(meta.addresses),
            backend=backend,
            device=self.source.device,
            deadline=deadline,
        )
        return self._channel, channel is not None

    def _close_session(self, deadline: Deadline) -> None:
        if self._channel is not None:
            self._channel.servers.end_update(deadline)

    def _leave(self, *, abort: bool = False) -> None:
        """Drops the buffers, and leaves the group. abort: of something that failed."""
        channel, self._channel, self._pair = self._channel, None, []
        for objection in channel.close(abort=abort) if channel is not None else ():
            log.warning("leaving the update group: %s", objection)


class UpdateChannel:
    """Joins a group with all servers' workers as its rank 0.

    Opening joins the group while every server is asked to. A channel that failed once is closed for
    good: its group may hold half a broadcast. Raises RuntimeError where a server does not join
    before the deadline, ServersLost where some are lost.
    """

    def __init__(
        self, servers: Servers, *, backend: str, device: torch.device, deadline: Deadline
    ) -> None:
        self.servers, self.backend, self.device = servers, backend, device
        # the store's prefix, no secret: whoever reaches the store lists it, and ranks of SGLang's
        # own protocol prove nothing (docs/security.md)
        self.group_name = f"megarl_weights_{uuid.uuid4().hex}"
        self.info = servers.receivers(deadline)
        offsets, world_size = rank_offsets([i.tp for i in self.info.values()])
        address = address_for(servers.addresses)
        store = listen(address, timeout=deadline.left)
        group: dict[str, Any] = {
            "master_address": address,
            "master_port": store.port,
            "world_size": world_size,
            "group_name": self.group_name,
            "backend": backend,
        }
        bodies = [{**group, "rank_offset": n} for n in offsets]
        calls = servers.start("/init_weights_update_group", bodies, deadline.left)
        joined = in_thread(init_update_group, **group, rank=0, timeout=deadline.left, store=store)
        what = f"connecting to {len(offsets)} servers over {backend}"
        try:
            BucketTransfer(what, joined, calls).wait(deadline)
        except BaseException:
            joined.add_done_callback(_leave_late)  # at once, where it has joined already
            raise
        self.group: dist.ProcessGroup = joined.result()
        # Broadcasts have a stream of their own: what waits for one, or for a server that is gone,
        # is not in the way of the stream that gathers.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def deliver(
        self,
        what: str,
        flat: torch.Tensor,
        body: Mapping[str, Any],
        deadline: Deadline,
    ) -> BucketTransfer:
        """Starts sending a bucket's bytes to every server; `what` names them in errors. They stay
        untouched until the transfer's `wait` has returned, and so does the channel. Its `ours`
        gives the moment when they had left."""
        set_group_timeout(self.group, deadline.left + MARGIN)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        answers = self.servers.start("/update_weights_from_distributed", body, deadline.left)
        return BucketTransfer(what, in_thread(_send, flat, self.group, self._stream), answers)

    def close(self, *, abort: bool = False) -> list[str]:
        """Leaves the group, servers first, and ends an open session. Returns what the servers
        objected, for the log: after a failure they may be stuck. One that has ended has left.

        `abort` does not wait for a broadcast under way: it ends, here and at servers that wait for
        it, when the servers that are not part of it leave the group.
        """
        patience = GRACE if abort else CLOSE_TIMEOUT
        name = {"group_name": self.group_name}
        rounds = [self.servers.start("/destroy_weights_update_group", name, patience)]
        rounds.append(self.servers.abandon_update(patience))
        cf.wait([f for calls in rounds for f in calls.values()], patience)
        destroy_update_group(self.group, abort=abort)
        ended = {server for server, call in rounds[0].items() if _has_ended(call)}
        left = [{s: f for s, f in calls.items() if s not in ended} for calls in rounds]
        return [objection for calls in left for objection in failures(calls)]


def _has_ended(call: cf.Future[Any]) -> bool:
    """Tells whether nothing listens at the server's address any more."""
    error = call.exception() if call.done() else None
    return error is not None and isinstance(error.__cause__, ConnectionRefusedError)


def _leave_late(joined: cf.Future[dist.ProcessGroup]) -> None:
    """Leaves a group that was joined when nobody waited for it any more."""
    if joined.exception() is None:
        destroy_update_group(joined.result(), abort=True)


def _send(flat: torch.Tensor, group: dist.ProcessGroup, stream: torch.cuda.Stream | None) -> float:
    """Sends from rank 0, and blocks until everything has left. Runs in a thread of its own: NCCL
    connects at the first broadcast, and without a receiver that call never returns. On a GPU it
    broadcasts on `stream`: a thread's current stream is the device's default one, which the main
    thread's work is queued on. The host waits for the end, not the stream: with one hardware queue
    (CUDA_DEVICE_MAX_CONNECTIONS=1) a stream that waits holds up what all others queue after it.
    """
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        work = dist.broadcast(flat, src=0, group=group, async_op=True)
        assert work is not None
        while stream is not None and not work.is_completed():
            time.sleep(0.001)
        work.wait()
    if stream is not None:
        stream.synchronize()
    return time.monotonic()


def quantized(bucket: Bucket) -> Bucket:
    """Returns the bucket with its linear maps in block-wise FP8, their scales beside them."""
    specs = sorted(_fp8_specs(bucket), key=lambda s: -s[2].itemsize)  # keeps offsets aligned
    members, end = [], 0
    for name, shape, dtype in specs:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        members.append(Member(name, shape, dtype, end, nbytes))
        end += nbytes
    return Bucket(bucket.index, tuple(members), end)


def quantize_bucket(bucket: Bucket, flat: torch.Tensor) -> tuple[Bucket, torch.Tensor]:
    """Returns `quantized(bucket)` and its bytes, uint8 [nbytes] in memory of their own."""
    target = quantized(bucket)
    out = torch.empty(target.nbytes, dtype=torch.uint8, device=flat.device)
    views = dict(target.views(out))
    linear = {m.name for m in bucket.members if m.linear}
    for name, tensor in bucket.views(flat):
        if name in linear:
            q, s = block_fp8.quantize(tensor)
            views[name].copy_(q)
            views[name + block_fp8.SUFFIX].copy_(s)
        else:
            views[name].copy_(tensor)
    return target, out


def _fp8_specs(bucket: Bucket) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    for m in bucket.members:
        if m.linear:
            yield m.name, m.shape, torch.float8_e4m3fn
            yield m.name + block_fp8.SUFFIX, block_fp8.scale_shape(m.shape), torch.float32
        else:
            yield m.name, m.shape, m.dtype
