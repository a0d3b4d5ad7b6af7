"""The transport for servers on the trainers' own machines and GPUs: memory is shared, not sent.

Buckets are gathered to the owner, and from there broadcast to those ranks that share a GPU with a
worker of a server; each worker maps the memory of the rank beside it and copies what it needs. On
hosts without GPUs all workers of a machine map the memory of one rank.

Every bucket is gathered while the one before it is being loaded; a server gets bucket k+1 only
after it has answered for bucket k, and a buffer is written again only after the servers have
answered for what was in it. Memory beyond the parameters: two buckets on every rank that a worker
reads from, and one of messages on the owner.
"""

from __future__ import annotations

import concurrent.futures as cf
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megarl.api.records import WeightUpdateMeta
from megarl.models.gather import BucketGatherer
from megarl.utils.env import is_here
from megarl.weight_sync.agreement import Deadline
from megarl.weight_sync.channel import GRACE, Exchange
from megarl.weight_sync.distributed import check_plans
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.plan import SyncPlan, plan_sync
from megarl.weight_sync.servers import ServerInfo, Servers, failures
from megarl.weight_sync.transport import Transport
from megarl.weight_sync.verify import Verifier, sample
from megarl.wire import handles
from megarl.wire.buckets import Bucket
from megarl.wire.shared_memory import machine

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankLocation:
    """Where a rank is. gpu: its uuid, None on hosts; near: for each server, whether it is here."""

    machine: str
    gpu: str | None
    near: tuple[bool, ...]


def ranks_beside(spots: Sequence[RankLocation], servers: Iterable[str]) -> dict[str, list[int]]:
    """For each server, the ranks on its machine. RuntimeError where there are none, or where they
    are on several machines, which a loopback address is on.
    """
    beside = {}
    for i, server in enumerate(servers):
        here = [rank for rank, spot in enumerate(spots) if spot.near[i]]
        machines = {spots[rank].machine for rank in here}
        if len(machines) != 1:
            where = f"{len(machines)} machines" if machines else "no machine"
            raise RuntimeError(
                f"weight_sync.type=colocated: server {server} is on {where} of the trainers, by "
                "its address; name it by an address of the one it is on, or use type=distributed "
                "or disk"
            )
        beside[server] = here
    return beside


def read_from(
    spots: Sequence[RankLocation], servers: Mapping[str, int], *, owner: int
) -> dict[str, tuple[int, ...]]:
    """For each server (address -> tp), the rank whose memory each of its workers reads.

    Workers go by the GPUs of a machine's ranks, in the order of both, round and round: as the local
    launcher places them. Without GPUs it is the same rank for all, the owner where it is there.
    """
    sources: dict[str, tuple[int, ...]] = {}
    taken = Counter[str]()
    for server, here in ranks_beside(spots, servers).items():
        tp, host = servers[server], spots[here[0]].machine
        if spots[here[0]].gpu is None:
            sources[server] = (owner if owner in here else here[0],) * tp
            continue
        first_on = {spots[rank].gpu: rank for rank in reversed(here)}
        each = sorted(first_on.values())
        sources[server] = tuple(each[(taken[host] + k) % len(each)] for k in range(tp))
        taken[host] += tp
    return sources


class ColocatedTransport(Transport):
    """Collective over the engine's ranks. The owner alone speaks to the servers."""

    def __post_init__(self) -> None:
        self._planned: tuple[int, SyncPlan, BucketGatherer] | None = None
        self._pair: list[torch.Tensor] = []
        self._known: dict[str, int] = {}  # tp of every server there ever was, in their order

    def upload(self, meta: WeightUpdateMeta, deadline: Deadline, phases: Phases) -> None:
        together = self.agreement.together
        plan, gatherer = together(self._plan, meta.bucket_bytes)
        check_plans(self.agreement, plan, self.agreement.gather(plan.digest))
        with phases.time("connect"):
            info, sources = self._meet(meta, deadline)
        feeding = {self.owner, *(rank for ranks in sources for rank in ranks)}
        together(self._allocate, plan.largest, self.rank in feeding)
        handover = together(
            lambda: ColocatedSession(
                self, plan, gatherer, sources, len(feeding) > 1, meta, phases, info
            )
        )
        try:
            together(handover.begin, deadline)
            for bucket in plan.buckets:
                texts = self.agreement.gather(together(handover.fill, bucket))
                together(handover.give, bucket, texts, deadline)
            together(handover.end, deadline)
            if meta.verify != "off":
                with phases.time("verify"):
                    together(handover.verify, deadline)
        except BaseException:
            handover.abandon()
            self.close()  # a server may still read from the buffers: the next upload takes others
            raise
        if self.device.type == "cuda":
            self.close()  # training needs the memory
        extra = sum(b.nbytes for b in self._pair) + gatherer.message_bytes
        phases.metrics |= {
            "bytes": float(plan.nbytes),
            "buckets": float(len(plan.buckets)),
            "readers": float(sum(len(ranks) for ranks in sources)),
            "peak_extra_bytes": float(extra),
        }

    def close(self) -> None:
        self._pair = []
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()

    def _plan(self, bucket_bytes: int) -> tuple[SyncPlan, BucketGatherer]:
        if self._planned is None or self._planned[0] != bucket_bytes:
            plan = plan_sync(self.table, self.dtype, bucket_bytes, (self.owner,))
            gatherer = BucketGatherer(
                self.table, self.layout, self.rank, self.params, plan.buckets, self.owner,
                group=self.group, device=self.device,
            )  # fmt: skip
            self._planned = bucket_bytes, plan, gatherer
        return self._planned[1:]

    def _meet(
        self, meta: WeightUpdateMeta, deadline: Deadline
    ) -> tuple[dict[str, ServerInfo], list[tuple[int, ...]]]:
        """Collective. What the servers say of themselves, on the owner, and for each server what
        `read_from` says. A server that is left out keeps its place, as it keeps its GPUs.
        """
        together, gather = self.agreement.together, self.agreement.gather
        names = dict.fromkeys([*self._known, *meta.addresses])
        near = together(lambda: tuple(map(is_here, names)))
        gpu = handles.uuid_of(self.device) if self.device.type == "cuda" else None
        spots = gather(RankLocation(machine(), gpu, near))
        together(ranks_beside, spots, names)
        info = together(
            lambda: Servers(meta.addresses).info(deadline) if self.rank == self.owner else {}
        )
        self._known |= gather({server: i.tp for server, i in info.items()})[self.owner]
        placed = read_from(spots, self._known, owner=self.owner)
        return info, [placed[server] for server in meta.addresses]

    def _allocate(self, nbytes: int, feeds: bool) -> None:
        if not feeds:
            self._pair = []
        elif not self._pair or self._pair[0].numel() < nbytes:
            self._pair = []  # freed before their successors are allocated
            self._pair = [handles.allocate(nbytes, self.device) for _ in range(2)]


class ColocatedSession:
    """One sync. The owner speaks to the servers; ranks that are read from say where."""

    def __init__(
        self,
        transport: ColocatedTransport,
        plan: SyncPlan,
        gatherer: BucketGatherer,
        sources: Sequence[tuple[int, ...]],
        spread: bool,
        meta: WeightUpdateMeta,
        phases: Phases,
        info: Mapping[str, ServerInfo],
    ) -> None:
        self.plan, self.gatherer, self.sources, self.spread = plan, gatherer, sources, spread
        self.meta, self.phases = meta, phases
        self.rank, self.owner, self.group = transport.rank, transport.owner, transport.group
        self.device, self.pair = transport.device, transport._pair
        self.servers = Servers(meta.addresses) if self.rank == self.owner else None
        self.verifier: Verifier | None = None
        if self.servers is not None and meta.verify != "off":
            names = [m.name for b in plan.buckets for m in b.members]
            sampled = sample(names, meta.number) if meta.verify == "sample" else None
            self.verifier = Verifier(info, sampled)
        self._in_session = False
        self._under_way: Exchange[float] | None = None

    def begin(self, deadline: Deadline) -> None:
        if self.servers is not None:
            self._in_session = True
            self._in_session = self.servers.begin_update(deadline)

    def fill(self, bucket: Bucket) -> dict[tuple[int, int], str]:
        """Where this rank has the bucket, for every (server, worker) that is to read it here."""
        with self.phases.time_on(self.device, "gather"):
            flat = self._buffer(bucket)
            self.gatherer.gather(bucket, flat if self.rank == self.owner else None)
            if self.spread:
                # the engine's group wants all ranks; those that no worker reads from throw it away
                if flat is None:
                    flat = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self.device)
                dist.broadcast(flat, group=self.group, group_src=self.owner)
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        places = [
            (s, w)
            for s, ranks in enumerate(self.sources)
            for w, rank in enumerate(ranks)
            if rank == self.rank
        ]
        if not places:
            return {}
        assert flat is not None
        flattened = self.meta.flattened
        return {place: handles.pack(bucket, flat, flattened=flattened) for place in places}

    def give(
        self,
        bucket: Bucket,
        texts: Sequence[Mapping[tuple[int, int], str]],
        deadline: Deadline,
    ) -> None:
        """Waits until the servers have loaded the bucket before, then has them load this one.
        texts: what `fill` returned, by rank.
        """
        if self.servers is None:
            return
        self._settle(deadline)
        where = {place: text for mine in texts for place, text in mine.items()}
        last = bucket.index == len(self.plan.buckets) - 1
        body: dict[str, Any] = {"flush_cache": last}
        if self.meta.flattened:
            body["load_format"] = "flattened_bucket"
        if last:  # before, the server's weights are no version at all
            body["weight_version"] = str(self.meta.number)
        bodies = [
            body | {"serialized_named_tensors": [where[s, w] for w in range(len(ranks))]}
            for s, ranks in enumerate(self.sources)
        ]
        first, final = bucket.members[0].name, bucket.members[-1].name
        what = (
            f"weights of version {self.meta.number}, bucket {bucket.index + 1} of "
            f"{len(self.plan.buckets)} ({first} to {final})"
        )
        ours: cf.Future[float] = cf.Future()
        ours.set_result(time.monotonic())  # all there is to do on this side is to leave it alone
        calls = self.servers.start("/update_weights_from_tensor", bodies, deadline.left)
        self._under_way = Exchange(what, ours, calls)
        if self.verifier is not None:
            flat = self._buffer(bucket)
            assert flat is not None
            with self.phases.time("checksum"):
                self.verifier.add(bucket.views(flat))

    def end(self, deadline: Deadline) -> None:
        """Returns when the servers hold the whole version."""
        if self.servers is not None:
            self._settle(deadline)
            if self._in_session:
                self._in_session = False
                self.servers.end_update(deadline)

    def verify(self, deadline: Deadline) -> None:
        if self.verifier is not None:
            self.phases.metrics["verified"] = float(self.verifier.check(deadline))

    def abandon(self) -> None:
        """Ends the session of what failed, or the servers would refuse the next one."""
        if self.servers is not None and self._in_session:
            calls = self.servers.start("/end_weight_update", {}, GRACE)
            cf.wait(calls.values(), GRACE)
            for objection in failures(calls):
                log.warning("ending a failed weight update: %s", objection)

    def _buffer(self, bucket: Bucket) -> torch.Tensor | None:
        return self.pair[bucket.index % 2][: bucket.nbytes] if self.pair else None

    def _settle(self, deadline: Deadline) -> None:
        exchange, self._under_way = self._under_way, None
        if exchange is not None:
            exchange.wait(deadline)
            self.phases.add("load_wait", exchange.answered() - exchange.begun)
