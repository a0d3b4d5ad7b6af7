"""Shares memory with servers on the trainers' own machines and GPUs, instead of sending to them.

Buckets are gathered to the sender, and from there broadcast to the ranks that share a GPU with a
worker of a server; each worker maps the memory of the rank beside it and copies what it needs. On
hosts without GPUs all workers of a machine map the memory of one rank.

Every bucket is gathered while the one before it is being loaded; a server gets bucket k+1 only
after it has answered for bucket k, and a buffer is written again only after the servers have
answered for what was in it. Memory beyond the parameters: two buckets on every rank that a worker
reads from, and one of messages on the sender.
"""

from __future__ import annotations

import concurrent.futures as cf
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megarl.api.records import WeightUpdateMeta
from megarl.config.rollout import TRANSPORTS
from megarl.transfer.gather import Bucket
from megarl.utils.env import is_here, machine
from megarl.weight_sync.broadcast import BucketStream, Gathered
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.plan import load_body
from megarl.weight_sync.servers import (
    GRACE,
    BucketTransfer,
    Deadline,
    ServerInfo,
    Servers,
    failures,
)
from megarl.weight_sync.transports import Transport, WeightSource
from megarl.wire import handles

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankLocation:
    """Says where a rank is. gpu: its uuid, None on hosts; near: whether each server is here."""

    machine: str
    gpu: str | None
    near: tuple[bool, ...]


def ranks_beside(spots: Sequence[RankLocation], servers: Iterable[str]) -> dict[str, list[int]]:
    """Returns for each server the ranks on its machine. Raises RuntimeError where there are none,
    or where they are on several machines, which a loopback address is on."""
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
    spots: Sequence[RankLocation], servers: Mapping[str, int], *, sender: int
) -> dict[str, tuple[int, ...]]:
    """Returns for each server (address -> tp) the rank whose memory each of its workers reads.

    Workers go by the GPUs of a machine's ranks, in the order of both, round and round: as the local
    launcher places them. Without GPUs it is the same rank for all, the sender where it is there.
    """
    sources: dict[str, tuple[int, ...]] = {}
    taken = Counter[str]()
    for server, here in ranks_beside(spots, servers).items():
        tp, host = servers[server], spots[here[0]].machine
        if spots[here[0]].gpu is None:
            sources[server] = (sender if sender in here else here[0],) * tp
            continue
        first_on = {spots[rank].gpu: rank for rank in reversed(here)}
        each = sorted(first_on.values())
        sources[server] = tuple(each[(taken[host] + k) % len(each)] for k in range(tp))
        taken[host] += tp
    return sources


class ColocatedTransport(Transport):
    """Hands over weights in shared memory. The sender alone speaks to the servers."""

    requirements = TRANSPORTS["colocated"].requirements

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source)
        self._pair: list[torch.Tensor] = []
        self._known: dict[str, int] = {}  # tp of every server there ever was, in their order

    def upload(self, meta: WeightUpdateMeta, deadline: Deadline, phases: Phases) -> None:
        """Shares every bucket with the servers. Collective. Raises RuntimeError where a server is
        not on a trainer's machine or fails; the next upload then takes new buffers."""
        plan, gatherer = self.plan_buckets(meta.bucket_bytes)
        source, sender, servers = self.source, self.lead, Servers(meta.addresses)
        with phases.time("connect"):
            info, sources = self._meet(meta, deadline)
        feeding = {sender, *(rank for ranks in sources for rank in ranks)}
        source.ranks.together(self._allocate, plan.largest, source.rank in feeding)
        session = ColocatedSession(
            source=source,
            plan=plan,
            gatherer=gatherer,
            meta=meta,
            deadline=deadline,
            phases=phases,
            sources=sources,
            pair=self._pair,
            spread=len(feeding) > 1,
            servers=servers,
        )
        try:
            source.from_rank(sender, servers.begin_update, deadline)
            session.run(info)
            source.from_rank(sender, servers.end_update, deadline)
            session.account()
        except BaseException:
            calls = servers.abandon_update(GRACE)
            cf.wait(calls.values(), GRACE)
            for objection in failures(calls):
                log.warning("ending a failed weight update: %s", objection)
            self.close()  # a server may still read from the buffers: the next upload takes others
            raise
        if source.device.type == "cuda":
            self.close()  # training needs the memory
        phases.metrics["readers"] = float(sum(len(ranks) for ranks in sources))

    def close(self) -> None:
        """Drops the buffers, and on GPUs the memory that servers have unmapped since."""
        self._pair = []
        if self.source.device.type == "cuda":
            torch.cuda.ipc_collect()

    def _meet(
        self, meta: WeightUpdateMeta, deadline: Deadline
    ) -> tuple[dict[str, ServerInfo], list[tuple[int, ...]]]:
        """Returns what the servers say of themselves, and for each server the ranks that
        `read_from` gives. A server that is left out keeps its place, as it keeps its GPUs.
        Collective."""
        ranks, device, sender = self.source.ranks, self.source.device, self.lead
        names = dict.fromkeys([*self._known, *meta.addresses])
        near = ranks.together(lambda: tuple(map(is_here, names)))
        gpu = handles.uuid_of(device) if device.type == "cuda" else None
        spots = ranks.gather(RankLocation(machine(), gpu, near))
        ranks.together(ranks_beside, spots, names)
        info = self.source.from_rank(sender, lambda: Servers(meta.addresses).receivers(deadline))
        self._known |= {server: i.tp for server, i in info.items()}
        placed = read_from(spots, self._known, sender=sender)
        return info, [placed[server] for server in meta.addresses]

    def _allocate(self, nbytes: int, feeds: bool) -> None:
        if not feeds:
            self._pair = []
        elif not self._pair or self._pair[0].numel() < nbytes:
            self._pair = []  # freed before their successors are allocated
            self._pair = [handles.allocate(nbytes, self.source.device) for _ in range(2)]


@dataclass(kw_only=True)
class ColocatedSession(BucketStream):
    """Brings buckets to the servers by telling where they lie.

    servers: the sender alone speaks to them. sources: for each server, the ranks its workers read
    from. spread: there are such ranks beside the sender. pair: the buffers of ranks that are read.
    """

    servers: Servers
    sources: Sequence[tuple[int, ...]]
    spread: bool
    pair: Sequence[torch.Tensor]
    # (server, worker) -> where it finds the last bucket
    _places: dict[tuple[int, int], str] = field(default_factory=dict)

    def gather(self, bucket: Bucket) -> Gathered | None:
        """Gathers a bucket to the sender, broadcasts it to ranks that are read from, and notes
        where it lies. Returns it on the sender, None elsewhere. Collective."""
        source = self.source
        device, sends = source.device, source.rank == source.sender
        flat = self.pair[bucket.index % 2][: bucket.nbytes] if self.pair else None
        with self.phases.time("gather", device):
            self.gatherer.gather(bucket, flat if sends else None)
            if self.spread:
                # the engine's group wants all ranks; those that no worker reads from throw it away
                if flat is None:
                    flat = torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)
                dist.broadcast(flat, group=source.group, group_src=source.sender)
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        places = source.ranks.gather(source.ranks.together(self._lend, bucket, flat))
        self._places = {place: text for lent in places for place, text in lent.items()}
        return (bucket, flat) if sends and flat is not None else None

    def _lend(self, bucket: Bucket, flat: torch.Tensor | None) -> dict[tuple[int, int], str]:
        """Returns where each worker that reads from this rank finds the bucket."""
        places = {}
        for s, ranks in enumerate(self.sources):
            for w, rank in enumerate(ranks):
                if rank == self.source.rank:
                    assert flat is not None, "a rank that is read from has buffers"
                    places[s, w] = handles.pack(bucket, flat)
        return places

    def deliver(self, gathered: Gathered, what: str) -> BucketTransfer:
        """Tells every server where its workers find the bucket. Called on the sender."""
        body: dict[str, Any] = {"load_format": "flattened_bucket"} | load_body(
            version=self.meta.number,
            last=self.is_last(gathered[0]),
            flush=self.meta.flush_cache,
        )
        bodies = [
            body | {"serialized_named_tensors": [self._places[s, w] for w in range(len(ranks))]}
            for s, ranks in enumerate(self.sources)
        ]
        ours: cf.Future[float] = cf.Future()
        ours.set_result(time.monotonic())  # all there is to do on this side is to leave it alone
        calls = self.servers.start("/update_weights_from_tensor", bodies, self.deadline.left)
        return BucketTransfer(what, ours, calls)

    def memory(self) -> int:
        """Returns the bytes of this rank's buffers and of the messages it has taken."""
        return sum(b.nbytes for b in self.pair) + self.gatherer.message_bytes
