"""One sync of the streaming transport, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from megarl.api.records import WeightUpdateMeta
from megarl.models.gather import BucketGatherer
from megarl.weight_sync.agreement import Agreement, Deadline
from megarl.weight_sync.buffers import BucketBuffers
from megarl.weight_sync.channel import Exchange, UpdateChannel
from megarl.weight_sync.delta_base import PAYS, DeltaBase
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.plan import SyncPlan, update_body
from megarl.weight_sync.quantize import quantize_bucket
from megarl.weight_sync.verify import Verifier
from megarl.wire import block_fp8
from megarl.wire.buckets import Bucket

# of the same phase of several owners: these follow each other, the others are at the same time
_IN_TURN = ("broadcast", "load_wait")


@dataclass
class Counts:
    """What an owner has sent. changed, of compared: numbers that differ from the version before."""

    bytes: int = 0
    broadcasts: int = 0
    changed: int = 0
    compared: int = 0


@dataclass(frozen=True)
class Changes:
    """What the sender remembers, where all servers can apply changes to it.

    base: the servers' name for what they hold, None where it is something else; id: for what they
    will hold.
    """

    remembered: DeltaBase
    base: str | None
    id: str


@dataclass
class _Ready:
    """A gathered bucket in the form it is sent in: nothing where nothing changed."""

    bucket: Bucket
    flat: torch.Tensor
    tensors: Sequence[torch.Tensor]
    changes: dict[str, Any] | None = None

    def extra_bytes(self, buffers: BucketBuffers) -> int:
        """Of memory that is none of the buffers: FP8, changes."""
        storages = {
            s.data_ptr(): s for t in (self.flat, *self.tensors) if (s := t.untyped_storage())
        }
        for buffer in buffers.pair:
            storages.pop(buffer.untyped_storage().data_ptr(), None)
        return sum(s.nbytes() for s in storages.values())


@dataclass(kw_only=True)
class Stream:
    """Every rank takes the same steps, together; all but the owners only gather.

    Step k gathers what `plan.gathers` says while bucket k-1 is under way, waits until every server
    has answered for k-1, and lets k follow. Where k has another owner it hears of that answer from
    the others: it sends at the beginning of the next step.
    """

    plan: SyncPlan
    rank: int
    gatherer: BucketGatherer
    buffers: Mapping[int, BucketBuffers]
    channel: UpdateChannel | None
    verifier: Verifier | None
    changes: Changes | None
    meta: WeightUpdateMeta
    deadline: Deadline
    phases: Phases
    counts: Counts = field(default_factory=Counts)
    extra_bytes: int = 0  # at most, beyond buffers and messages
    _ready: dict[int, _Ready] = field(default_factory=dict)
    _under_way: tuple[Exchange[float], _Ready] | None = None

    def step(self, k: int) -> None:
        owners = self.plan.owners
        if k > 0 and owners[k - 1] != owners[max(0, k - 2)]:
            self._send(k - 1)
        for index in self.plan.gathers[k]:
            self._gather(self.plan.buckets[index])
        self._settle()
        if owners[k] == owners[max(0, k - 1)]:
            self._send(k)

    def finish(self) -> None:
        """After the last step: returns when the servers have loaded the last bucket."""
        last = len(self.plan.buckets) - 1
        if self.plan.owners[last] != self.plan.owners[max(0, last - 1)]:
            self._send(last)
        self._settle()

    def account(self, agreement: Agreement) -> None:
        """Collective, at the end. The metrics of all owners together, the same on every rank.

        changed: the part of the numbers that differ from the version before, where versions were
        compared; then bytes_whole is what all of them would have been. peak_extra_bytes: the most
        that a rank has allocated for the sync, the delta's copy aside.
        """
        extra = self.extra_bytes + self.gatherer.message_bytes
        extra += sum(b.nbytes for b in self.buffers.values())
        seconds = self.phases.collect() if self.channel is not None else {}
        ranks = agreement.gather((asdict(self.counts), seconds, extra))
        total = {key: sum(counts[key] for counts, _, _ in ranks) for key in ranks[0][0]}
        for phase in {p for _, own, _ in ranks for p in own}:
            values = [own.get(phase, 0.0) for _, own, _ in ranks]
            self.phases.seconds[phase] = sum(values) if phase in _IN_TURN else max(values)
        metrics = {
            "bytes": total["bytes"],
            "buckets": len(self.plan.buckets),
            "broadcasts": total["broadcasts"],
            "owners": len(set(self.plan.owners)),
            "peak_extra_bytes": max(extra for _, _, extra in ranks),
        }
        if total["compared"]:
            metrics["changed"] = total["changed"] / total["compared"]
            metrics["bytes_whole"] = self.plan.nbytes
        self.phases.metrics |= {name: float(value) for name, value in metrics.items()}

    def _gather(self, bucket: Bucket) -> None:
        index, device = bucket.index, self.gatherer.device
        buffers = self.buffers[self.plan.owners[index]]
        with self.phases.time_on(device, "gather"):
            flat = self.gatherer.gather(
                bucket, buffers.slot(self.plan.turns[index]), shared=buffers.shared,
                packing=partial(self.phases.time_on, device, "pack"),
            )  # fmt: skip
        if flat is not None:
            with self.phases.time_on(device, "encode"):
                self._ready[index] = self._encode(bucket, flat)
            self._count_memory()

    def _send(self, k: int) -> None:
        if self.plan.owners[k] != self.rank:
            return
        assert self.channel is not None
        ready = self._ready.pop(k)
        if ready.tensors:
            self._under_way = self._deliver(self.channel, ready), ready
        if self.verifier is not None:
            with self.phases.time("checksum"):
                self.verifier.add(ready.bucket.views(ready.flat))

    def _settle(self) -> None:
        """Waits until every server has loaded the bucket under way, if there is one."""
        if self._under_way is None:
            return
        exchange, self._under_way = self._under_way[0], None
        exchange.wait(self.deadline)
        sent, answered = exchange.ours.result(), exchange.answered()
        self.phases.add("broadcast", sent - exchange.begun)
        self.phases.add("load_wait", max(0.0, answered - sent))

    def _encode(self, bucket: Bucket, flat: torch.Tensor) -> _Ready:
        if self.meta.quantization == "fp8_block":
            bucket, flat = quantize_bucket(bucket, flat)
        whole = (
            [flat] if self.meta.flattened else [block_fp8.as_sent(t) for _, t in bucket.views(flat)]
        )
        ready = _Ready(bucket, flat, whole)
        if self.changes is None:
            return ready
        remembered, base = self.changes.remembered, self.changes.base
        if base is not None:
            delta = remembered.changes(bucket, flat)
            self.counts.changed += delta.changed
            self.counts.compared += delta.count
            if not delta.changed and not self._is_last(bucket):
                ready.tensors = []
                return ready
            if delta.payload.numel() < PAYS * bucket.nbytes:
                ready.tensors = [delta.payload]
                ready.changes = {"base": base, "chunks": delta.body()}
        remembered.keep(bucket, flat, on_host=self.meta.delta_on_host)
        return ready

    def _deliver(self, channel: UpdateChannel, ready: _Ready) -> Exchange[float]:
        bucket = ready.bucket
        self.counts.bytes += sum(t.nbytes for t in ready.tensors)
        self.counts.broadcasts += len(ready.tensors)
        body = update_body(
            bucket,
            group_name=channel.group_name,
            flattened=self.meta.flattened,
            version=self.meta.number,
            last=self._is_last(bucket),
            weights_id=None if self.changes is None else self.changes.id,
            changes=ready.changes,
        )
        first, final = bucket.members[0].name, bucket.members[-1].name
        what = (
            f"weights of version {self.meta.number}, bucket {bucket.index + 1} of "
            f"{len(self.plan.buckets)} ({first} to {final})"
        )
        return channel.deliver(what, ready.tensors, body, self.deadline)

    def _is_last(self, bucket: Bucket) -> bool:
        return bucket.index == len(self.plan.buckets) - 1

    def _count_memory(self) -> None:
        held = [*self._ready.values(), *([self._under_way[1]] if self._under_way else ())]
        extra = sum(r.extra_bytes(self.buffers[self.rank]) for r in held)
        self.extra_bytes = max(self.extra_bytes, extra)
