"""The streaming transport: shards -> flat HF buckets on their owners -> all servers.

Every bucket is gathered while the one before it is on its way and being loaded; a server gets
bucket k+1 only after it has answered for bucket k, whoever sends it. An owner sends to all servers
through a group of its own, of which it is rank 0, as SGLang wants it; the first owner speaks for
all of them where one must.

Memory beyond the parameters, all of it on owners: 2 * bucket_bytes (of which an eighth is for the
messages that a bucket is put together from), or 2 buckets where the largest tensor is larger. A
rank that sends pieces to an owner holds one message. To send changes alone also takes a copy of an
owner's buckets (see `DeltaBase`) and up to two buckets of changes; to send FP8, two of it.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from megarl.api.records import WeightUpdateMeta
from megarl.models.gather import BucketGatherer
from megarl.weight_sync import plan as plans
from megarl.weight_sync.agreement import Agreement, Deadline
from megarl.weight_sync.buffers import BucketBuffers
from megarl.weight_sync.channel import UpdateChannel
from megarl.weight_sync.delta_base import DeltaBase
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.plan import SyncPlan
from megarl.weight_sync.senders import split_budget, spread_senders
from megarl.weight_sync.servers import Servers
from megarl.weight_sync.stream import Changes, Stream
from megarl.weight_sync.transport import Transport
from megarl.weight_sync.verify import Verifier, sample

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Target:
    """Who meets in the groups."""

    addresses: tuple[str, ...]
    backend: str
    owners: tuple[int, ...]


class DistributedTransport(Transport):
    """Collective over the engine's ranks. A channel to the servers exists on owners only."""

    def __post_init__(self) -> None:
        self._planned: tuple[tuple[int, int], SyncPlan, BucketGatherer] | None = None
        self._channel: UpdateChannel | None = None
        self._buffers: dict[int, BucketBuffers] = {}
        self._met: _Target | None = None
        self._acknowledged = DeltaBase()

    def upload(self, meta: WeightUpdateMeta, deadline: Deadline, phases: Phases) -> None:
        together = self.agreement.together
        plan, gatherer = together(self._plan, meta)
        need, target = plan.sizes, self._target(plan, meta)
        self._hold(need)
        holds = [self._buffers[o].hold(n) for o, n in need.items()]
        met = together(self._still_met, target, deadline)
        states = self.agreement.gather((plan.digest, holds, met))
        check_plans(self.agreement, plan, [digest for digest, _, _ in states])
        try:
            self._take_buffers(need, [held for _, held, _ in states])
            with phases.time("connect"):
                changes = self._changes(plan, meta, deadline)
                if self._met is None or not all(met for _, _, met in states):
                    self._connect(target, deadline)
            stream = together(self._open, plan, gatherer, changes, meta, deadline, phases)
            for k in range(len(plan.buckets)):
                together(stream.step, k)
            together(stream.finish)
            together(self._close_session, deadline)
            if stream.changes is not None:
                self._acknowledged.id = stream.changes.id
            if meta.verify != "off":
                with phases.time("verify"):
                    self._verify(stream, deadline, phases)
            stream.account(self.agreement)
        except BaseException:
            self._abandon()
            raise
        if self.device.type == "cuda":
            self._drop_buffers()  # training needs the memory

    def close(self) -> None:
        self._drop_buffers()
        self._acknowledged.forget()
        self._leave(abort=False)

    # ---- what is sent

    def _plan(self, meta: WeightUpdateMeta) -> tuple[SyncPlan, BucketGatherer]:
        key = meta.bucket_bytes, meta.owners if meta.owners is not None else self.layout.pp
        if self._planned is None or self._planned[0] != key:
            owners = spread_senders(self.layout, key[1], self.owner)
            bucket_bytes, staging = split_budget(meta.bucket_bytes)
            plan = plans.plan_sync(self.table, self.dtype, bucket_bytes, owners)
            gatherer = BucketGatherer(
                self.table, self.layout, self.rank, self.params, plan.buckets, plan.owners,
                group=self.group, device=self.device, staging=staging,
            )  # fmt: skip
            self._planned = key, plan, gatherer
        return self._planned[1:]

    def _hold(self, need: Mapping[int, int]) -> None:
        """Buffers of these owners, empty where they are new, and of no others."""
        for owner in self._buffers.keys() - need.keys():
            self._buffers.pop(owner).drop()
        for owner in need.keys() - self._buffers.keys():
            self._buffers[owner] = BucketBuffers(self.agreement, owner, self.device)

    def _take_buffers(self, need: Mapping[int, int], held: Sequence[Sequence[bool]]) -> None:
        """Collective. held: by rank, whether it has an owner's as large as needed."""
        for (owner, nbytes), ranks in zip(need.items(), zip(*held), strict=True):
            if not all(ranks):
                self._buffers[owner].take(nbytes)

    def _drop_buffers(self) -> None:
        for buffers in self._buffers.values():
            buffers.drop()

    # ---- what the servers hold already

    def _changes(
        self, plan: SyncPlan, meta: WeightUpdateMeta, deadline: Deadline
    ) -> Changes | None:
        """Collective. What changes are made against, None where everything is to be sent and
        nothing remembered.
        """
        if not meta.delta:
            self._acknowledged.forget()
            return None
        speaks = self.rank == plan.owners[0]
        stale = self.agreement.together(self._check_acknowledged, plan, meta, deadline)
        mine = uuid.uuid4().hex[:12] if speaks else "", stale
        name, stale = self.agreement.gather(mine)[plan.owners[0]]
        if stale:
            self._acknowledged.forget()
            self._leave(abort=True)
        base = self._acknowledged.begin(plan.digest)
        return Changes(self._acknowledged, base, f"v{meta.number}-{name}")

    def _check_acknowledged(
        self, plan: SyncPlan, meta: WeightUpdateMeta, deadline: Deadline
    ) -> bool:
        """Forgets what was sent where changes to it are of no use. Whether a server does not hold
        it: it may be a new process at an old address, in no group, so all are connected anew.
        """
        last = self._acknowledged
        if last.plan != plan.digest:
            last.forget()
        if last.id is None or self.rank != plan.owners[0]:
            return False
        infos = Servers(meta.addresses).info(deadline)
        other = [f"{s} (version {i.weight_version})" for s, i in infos.items()
                 if i.weights_id != last.id]  # fmt: skip
        if other:
            log.info("all weights are sent: %s not at update %s", ", ".join(other), last.id)
        return bool(other)

    # ---- to whom

    def _target(self, plan: SyncPlan, meta: WeightUpdateMeta) -> _Target:
        backend = meta.comm_backend or ("nccl" if self.device.type == "cuda" else "gloo")
        return _Target(meta.addresses, backend, tuple(dict.fromkeys(plan.owners)))

    def _still_met(self, target: _Target, deadline: Deadline) -> bool:
        """Whether this rank is in the groups; on the first owner, whether all servers still are."""
        if self._met != target or self._channel is None or self.rank != target.owners[0]:
            return self._met == target
        again = self._channel.servers.started_again(deadline)
        if again:
            log.info("connecting to all servers again: %s started anew", ", ".join(again))
        return not again

    def _connect(self, target: _Target, deadline: Deadline) -> None:
        """Collective. At first, after a failure, and when servers or owners have changed. One owner
        after the other: a server joins one group at a time, and waits in it.
        """
        self.agreement.together(partial(self._leave, abort=True))  # some in the group may be dead
        for owner in target.owners:
            self.agreement.together(self._join, owner, target, deadline)
        self._met = target

    def _join(self, owner: int, target: _Target, deadline: Deadline) -> None:
        if self.rank == owner:
            self._channel = UpdateChannel(
                Servers(target.addresses), backend=target.backend, device=self.device,
                deadline=deadline,
            )  # fmt: skip

    def _open(
        self,
        plan: SyncPlan,
        gatherer: BucketGatherer,
        changes: Changes | None,
        meta: WeightUpdateMeta,
        deadline: Deadline,
        phases: Phases,
    ) -> Stream:
        channel = self._channel
        speaks = self.rank == plan.owners[0]
        if channel is not None and changes is not None:
            unable = [s for s, i in channel.info.items() if not i.applies_delta]
            changes = None if unable else changes
            if unable and speaks:
                log.warning(
                    "weight_sync.delta: all weights are sent, for %s cannot apply changes (a stock "
                    "SGLang server cannot, megarl's embedded server can)", ", ".join(unable),
                )  # fmt: skip
        verifier = None
        if channel is not None and meta.verify != "off":
            names = [m.name for b in plan.buckets for m in b.members]
            verifier = Verifier(
                channel.info, sample(names, meta.number) if meta.verify == "sample" else None
            )
        if channel is not None and speaks:
            channel.begin(deadline)
        return Stream(
            plan=plan, rank=self.rank, gatherer=gatherer, buffers=self._buffers, channel=channel,
            verifier=verifier, changes=changes, meta=meta, deadline=deadline, phases=phases,
        )  # fmt: skip

    def _close_session(self, deadline: Deadline) -> None:
        """On the one owner that opened it."""
        if self._channel is not None:
            self._channel.end(deadline)

    def _abandon(self) -> None:
        """Gives up a channel in an unknown state; the next upload opens a new one, with buffers
        that no broadcast under way still reads.
        """
        self._drop_buffers()
        self._acknowledged.forget()
        self._leave(abort=True)

    def _leave(self, *, abort: bool) -> None:
        self._met = None
        if self._channel is not None:
            channel, self._channel = self._channel, None
            for objection in channel.close(abort=abort):
                log.warning("leaving the update group: %s", objection)

    # ---- what came of it

    def _verify(self, stream: Stream, deadline: Deadline, phases: Phases) -> None:
        """Collective. The first owner asks the servers about what all of them have sent."""
        verifier, owners = stream.verifier, tuple(dict.fromkeys(stream.plan.owners))
        sent = self.agreement.gather_from(owners, verifier.sent if verifier else {})
        asks = verifier is not None and self.rank == owners[0]

        def check() -> bool:
            assert verifier is not None and self._channel is not None
            verifier.sent = {name: sum_ for sums in sent for name, sum_ in sums.items()}
            return verifier.check(deadline)

        verified = self.agreement.together(check if asks else lambda: False)
        phases.metrics["verified"] = float(any(self.agreement.gather(verified)))


def check_plans(agreement: Agreement, plan: SyncPlan, digests: Sequence[str]) -> None:
    """Collective. RuntimeError naming the first entry in which a rank's plan is not rank 0's.

    digests: every rank's.
    """
    if len(set(digests)) == 1:
        return
    found = plans.first_difference(agreement.gather(plan.digests))
    assert found is not None, "digests of plans differ, those of their buckets do not"
    rank, bucket = found
    entries = agreement.gather(plan.entries(bucket))
    raise RuntimeError(plans.difference(rank, bucket, entries[rank], entries[0]))
