"""Runs the bucket loop: one sync, bucket by bucket, whatever carries them to the servers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from megarl.api.records import WeightUpdateMeta
from megarl.models.gather import Bucket, BucketGatherer
from megarl.weight_sync.encoding import Ready
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.plan import SyncPlan
from megarl.weight_sync.servers import BucketTransfer, Deadline
from megarl.weight_sync.transports import WeightSource
from megarl.weight_sync.verify import Verifier

# phases in which senders follow each other; in other phases they work at the same time
_IN_TURN = ("broadcast", "load_wait")


@dataclass(kw_only=True)
class BucketStream(ABC):
    """Brings all buckets of a plan to the servers. Every rank takes the same steps, together; all
    but the senders only gather.

    Step k gathers what `plan.gathers` says while bucket k-1 is under way, lets k follow, and waits
    until every server has answered for k-1. Servers get k from the sender of k-1, so they take them
    in this order. A sender that did not send k-1 waits for the answer to it, of which it hears at
    the end of the step, and one that has yet to hear from other ranks where they have bucket k
    (`exchanges`) waits for that: they send k at the beginning of the next step. The last bucket,
    with which the version arrives, leaves when the servers have all others: one that refused k-1
    could still take k.
    """

    exchanges: ClassVar[bool] = False

    source: WeightSource
    plan: SyncPlan
    gatherer: BucketGatherer
    meta: WeightUpdateMeta
    deadline: Deadline
    phases: Phases
    verifier: Verifier | None
    counts: Counter[str] = field(default_factory=Counter)
    _ready: dict[int, Ready] = field(default_factory=dict)
    _under_way: dict[int, tuple[BucketTransfer, Ready]] = field(default_factory=dict)
    _answered: float = 0.0

    @abstractmethod
    def gather(self, bucket: Bucket) -> Ready | None:
        """Gathers a bucket. Returns it on its sender, None elsewhere. Collective."""

    @abstractmethod
    def deliver(self, ready: Ready, what: str) -> BucketTransfer:
        """Starts to bring a bucket to all servers, on its sender; `what` names it in errors."""

    @abstractmethod
    def memory(self) -> int:
        """Returns the most bytes that this rank has allocated for the sync so far."""

    def exchange(self) -> None:  # noqa: B027 (most need none)
        """Tells other ranks what they need to know of the bucket of this step. Collective."""

    def run(self) -> None:
        """Takes all steps. Returns when all servers hold all buckets. Collective."""
        together = self.source.agreement.together
        for k in range(len(self.plan.buckets)):
            together(self.step, k)
            self.exchange()
        together(self.finish)

    def step(self, k: int) -> None:
        """Takes step k of as many as there are buckets."""
        if k > 0 and not self._follows_at_once(k - 1):
            self._send(k - 1)
        for index in self.plan.gathers[k]:
            ready = self.gather(self.plan.buckets[index])
            if ready is not None:
                self._ready[index] = ready
        if self._follows_at_once(k) and not self.is_last(self.plan.buckets[k]):
            self._send(k)
        self._settle(k - 1)
        if self._follows_at_once(k) and self.is_last(self.plan.buckets[k]):
            self._send(k)

    def finish(self) -> None:
        """Sends the last bucket, if it still has to be. Returns when servers have loaded it."""
        last = len(self.plan.buckets) - 1
        if not self._follows_at_once(last):
            self._send(last)
        self._settle(last)

    def verify(self, proved: Mapping[str, bool]) -> None:
        """Compares what all senders have sent with what the servers hold. proved: see
        `Verifier.check`. Collective."""
        agreement, senders, verifier = self.source.agreement, tuple(self.plan.sizes), self.verifier
        sent = agreement.gather_from(senders, verifier.sent if verifier else {})

        def check() -> bool:
            if verifier is None or self.source.rank != senders[0]:
                return False
            verifier.sent = {name: sum_ for sums in sent for name, sum_ in sums.items()}
            return verifier.check(self.deadline, proved)

        verified = agreement.gather(agreement.together(check))
        self.phases.metrics["verified"] = float(any(verified))

    def account(self) -> None:
        """Notes the metrics of all senders together, the same on every rank, at the end.
        Collective.

        changed: the part of the numbers that differ from the version before, where versions were
        compared; then bytes_whole is what all of them would have been. peak_extra_bytes: the most
        that a rank has allocated for the sync, the delta's copy aside.
        """
        seconds = self.phases.collect() if self.source.rank in self.plan.sizes else {}
        ranks = self.source.agreement.gather((self.counts, seconds, self.memory()))
        total = sum((counts for counts, _, _ in ranks), Counter())
        for phase in {p for _, own, _ in ranks for p in own}:
            values = [own.get(phase, 0.0) for _, own, _ in ranks]
            self.phases.seconds[phase] = sum(values) if phase in _IN_TURN else max(values)
        metrics: dict[str, float] = {
            "bytes": total["bytes"],
            "buckets": len(self.plan.buckets),
            "broadcasts": total["broadcasts"],
            "senders": len(self.plan.sizes),
            "peak_extra_bytes": max(extra for _, _, extra in ranks),
        }
        if total["compared"]:
            metrics["changed"] = total["changed"] / total["compared"]
            metrics["bytes_whole"] = self.plan.nbytes
        self.phases.metrics |= {name: float(value) for name, value in metrics.items()}

    def is_last(self, bucket: Bucket) -> bool:
        """Returns whether the version arrives with this bucket."""
        return bucket.index == len(self.plan.buckets) - 1

    def in_memory(self) -> list[Ready]:
        """Returns the buckets that are gathered, or under way."""
        return [*self._ready.values(), *(ready for _, ready in self._under_way.values())]

    def _follows_at_once(self, k: int) -> bool:
        senders = self.plan.senders
        return not self.exchanges and senders[k] == senders[max(0, k - 1)]

    def _send(self, k: int) -> None:
        if self.plan.senders[k] != self.source.rank:
            return
        ready = self._ready.pop(k)
        self.counts.update(compared=ready.compared, changed=ready.changed)
        if ready.tensors:
            what = self._describe(self.plan.buckets[k])
            self._under_way[k] = self.deliver(ready, what), ready
        if self.verifier is not None:
            with self.phases.time("checksum"):
                self.verifier.add(ready.bucket.views(ready.flat))

    def _describe(self, bucket: Bucket) -> str:
        first, final = bucket.members[0].name, bucket.members[-1].name
        return (
            f"weights of version {self.meta.number}, bucket {bucket.index + 1} of "
            f"{len(self.plan.buckets)} ({first} to {final})"
        )

    def _settle(self, k: int) -> None:
        """Waits until every server has loaded bucket k, if this rank has sent it."""
        if k not in self._under_way:
            return
        transfer = self._under_way[k][0]
        transfer.wait(self.deadline)
        del self._under_way[k]
        left, begun = transfer.ours.result(), max(transfer.begun, self._answered)
        if left > transfer.begun:  # else nothing had to leave
            self.phases.add("broadcast", max(0.0, left - begun))
        self._answered = transfer.answered()
        self.phases.add("load_wait", max(0.0, self._answered - max(left, begun)))
