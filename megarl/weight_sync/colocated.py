"""Shares memory with servers on the trainers' own machines and GPUs, instead of sending to them.

Each worker of a server maps the memory of the trainer rank beside it, and copies its own slices out
of it. That rank collects them, from its own parameters and from the ranks that hold the others, so
that no more crosses between ranks than workers keep. Workers beside one rank that keep the same
(replicas on hosts, where all workers of a machine map the memory of one rank) share what it has
collected.

It goes round by round: a round is collected while the servers copy the one before it, and a buffer
is written again only after the servers have answered for what was in it. Memory beyond the
parameters: two rounds of `bucket_bytes` on every rank that a worker reads from, and the messages of
one that a rank sends.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from megarl.api.records import WeightUpdateMeta
from megarl.config.rollout import TRANSPORTS
from megarl.transfer.geometry import Ranks, TargetTable
from megarl.transfer.moves import Mover, Parts, lay_out, pack, pack_into
from megarl.transfer.plan import Receiver, TransferPlan, nearest
from megarl.utils.env import is_here, machine
from megarl.weight_sync.changes import Names
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.receiver.megarl_receiver.messages import ALIGN
from megarl.weight_sync.servers import Calls, Deadline, finish
from megarl.weight_sync.slices import SliceSync
from megarl.weight_sync.transports import Transport, WeightSource
from megarl.wire import handles


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
                f"server {server} is on {where} of the trainers, by its address; name it by an "
                "address of the one it is on, or use weight_sync.type=distributed or disk"
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
        self._slices = SharedSlices(source)

    def upload(self, meta: WeightUpdateMeta, deadline: Deadline, phases: Phases) -> None:
        """Shares every round with the servers. Collective. Raises RuntimeError where a server is
        not on a trainer's machine, cannot take slices, or fails; the next upload then takes new
        buffers."""
        self._slices.upload(replace(meta, sharded="on", comm_backend="gloo"), deadline, phases)
        if self.source.device.type == "cuda":
            self._slices.drop()  # training needs the memory

    def close(self) -> None:
        """Drops the buffers, and on GPUs the memory that servers have unmapped since."""
        self._slices.close()


class SharedSlices(SliceSync):
    """Hands slices over in shared memory. A receiver of the plan is the trainer rank that workers
    read from, with those workers beside it that keep the same."""

    key: ClassVar = "weight_sync.type=colocated (type=disk takes more servers)"
    # whole tensors would not fill these either
    refused: ClassVar = {k: v for k, v in SliceSync.refused.items() if k != "unfilled"}

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source)
        self._known: dict[str, int] = {}  # tp of every server there ever was, in their order
        self._spots: list[RankLocation] = []
        # of each receiver: (sender, bytes) by rounds
        self._arrivals: dict[Receiver, list[list[tuple[int, int]]]] = {}
        self._outgoing: list[list[tuple[Receiver, Parts]]] = []  # by rounds
        self._pairs: dict[Receiver, list[torch.Tensor]] = {}
        self._taken, self._most = 0, 0  # rounds so far, bytes that one sent

    def close(self, *, abort: bool = False) -> None:
        """Drops the buffers, and ends an open session."""
        if not abort:
            self._servers = None  # there is no group to leave
        super().close(abort=abort)
        self.drop()  # a server may still read from them: the next upload takes others

    def drop(self) -> None:
        """Drops the buffers."""
        self._pairs = {}
        if self.source.device.type == "cuda":
            torch.cuda.ipc_collect()

    # ---- once

    def _survey(self, target: Any, deadline: Deadline) -> None:
        """Finds which ranks are beside the servers, and asks what these are. A server that is left
        out keeps its place, as it keeps its GPUs."""
        ranks, device = self.source.ranks, self.source.device
        names = dict.fromkeys([*self._known, *target.addresses])
        near = ranks.together(lambda: tuple(map(is_here, names)))
        gpu = handles.uuid_of(device) if device.type == "cuda" else None
        self._spots = ranks.gather(RankLocation(machine(), gpu, near))
        ranks.together(ranks_beside, self._spots, names)
        super()._survey(target, deadline)
        self._known |= {server: i.tp for server, i in self._info.items()}

    def _plan(self, tables: Any, spots: Any, round_bytes: int) -> TransferPlan:
        """Plans what each rank collects, from itself what it has."""
        placed = read_from(self._spots, self._known, sender=self._speaker)
        numbers, targets = dict[Any, Receiver](), dict[Receiver, TargetTable]()
        self._workers = defaultdict(list)
        for server, address in enumerate(self._info):
            for worker, rank in enumerate(placed[address]):
                entries = tables[server][worker].entries
                to = numbers.setdefault((rank, entries.digest), Receiver(len(numbers), rank))
                targets[to] = entries
                self._workers[to].append((server, worker))
        near = nearest([spot.machine for spot in self._spots])

        def prefer(to: Receiver, ranks: Ranks) -> Ranks:
            return (to.rank,) if to.rank in ranks else near(self._spots[to.rank].machine, ranks)

        most = max(Counter(to.rank for to in targets).values())
        return self.plan(targets, max(1, 2 * round_bytes // most), prefer)

    def _join(self, plan: TransferPlan, deadline: Deadline, timeout: float) -> None:
        """Finds what arrives and what this rank sends in each round."""
        s = self.source
        self._move = Mover(plan.dtypes, range(s.layout.world_size), s.group, s.device)
        self._arrivals = {to: plan.arrivals(to) for to in plan.receivers}
        self._outgoing = [[] for _ in range(max(map(len, self._arrivals.values())))]
        for group in plan.sends(s.rank):
            for m in group:
                self._outgoing[m.round].append((m.receiver, lay_out(m.slices, plan.dtypes)))

    # ---- every sync

    def _transfer(
        self, meta: WeightUpdateMeta, deadline: Deadline, names: Names | None, phases: Phases
    ) -> tuple[int, Sequence[dict[str, Any]]]:
        """Has the servers take all rounds. Returns the bytes that this rank has sent to others and,
        on the rank that speaks, what every server rank took."""
        s, link, sent = self.source, self._link, 0
        assert link is not None
        under_way, received = dict[str, Calls](), Counter[tuple[str, int]]()
        s.ranks.together(self._allocate)

        def settle() -> None:
            with phases.time("load_wait"):
                answers = [finish(what, calls, deadline) for what, calls in under_way.items()]
            under_way.clear()
            for server, replies in (pair for answer in answers for pair in answer.items()):
                for rank, reply in enumerate(replies):
                    received[server, rank] += reply["received"]

        def step(number: int) -> int:
            with phases.time("gather", s.device):
                sent = self._collect(number)
            if s.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            self._taken += 1
            last = number == len(self._outgoing) - 1
            fields: dict[str, Any] = {"id": f"take{self._taken}", "round": number, "last": last}
            lent = s.ranks.gather(s.ranks.together(self._lend, number, deadline, fields))
            settle()
            if s.rank == self._speaker:
                text_of = {place: text for texts in lent for place, text in texts.items()}
                texts = [
                    [text_of[server, worker] for worker in range(info.tp)]
                    for server, info in enumerate(self._info.values())
                ]
                what = f"weights of version {meta.number}, round {number + 1}"
                under_way[what] = link.start("take", deadline, texts=texts, **fields)
            return sent

        for number in range(len(self._outgoing)):
            sent += s.ranks.together(step, number)
        s.ranks.together(settle)
        return sent, [{"received": n, "peak": 0} for n in received.values()]

    def _allocate(self) -> None:
        for to, rounds in self._arrivals.items():
            if to.rank == self.source.rank and to not in self._pairs:
                room = max((sum(_aligned(n) for _, n in r) for r in rounds), default=ALIGN)
                self._pairs[to] = [handles.allocate(room, self.source.device) for _ in range(2)]

    def _collect(self, number: int) -> int:
        """Fills this rank's buffers, and sends what is for others'. Returns the bytes that it has
        sent. Collective."""
        s, sent = self.source, 0
        own, messages = dict[Receiver, torch.Tensor](), list[tuple[Any, torch.Tensor, int]]()
        for to, pair in self._pairs.items():
            end, rounds = 0, self._arrivals[to]
            for sender, nbytes in rounds[number] if number < len(rounds) else ():
                part = pair[number % 2][end : end + nbytes]
                end += _aligned(nbytes)
                if sender == s.rank:
                    own[to] = part
                else:
                    messages.append((dist.irecv, part, sender))
        for to, parts in self._outgoing[number]:
            if to in own:
                pack_into(own[to], s.params, parts)
            else:
                messages.append((dist.isend, pack(s.params, parts, s.device), to.rank))
                sent += parts.nbytes
        for work in self._move.post(messages):
            self._move.wait(work)
        self._most = max(self._most, sent)
        return sent

    def _lend(
        self, number: int, deadline: Deadline, fields: Mapping[str, Any]
    ) -> dict[tuple[int, int], str]:
        """Returns the command of each worker that reads from this rank, with what it reads."""
        assert self._link is not None
        texts = {}
        for to, pair in self._pairs.items():
            for server, worker in self._workers[to]:
                command = self._link.command("take", server, deadline, **fields)
                texts[server, worker] = handles.pack(json.dumps(command), pair[number % 2])
        return texts

    def _extra(self, *, changes: bool) -> int:
        return self._most + sum(b.nbytes for pair in self._pairs.values() for b in pair)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
