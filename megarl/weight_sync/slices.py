"""Sends weights by slices, where the servers can take them.

Once per server process: an update session in which every rank records what its loader does with the
HF tensors; a plan that all trainers make alike; one group. Then every sync: a session, in which
trainers send and servers receive, rounds in the plan's order; the version, when all have received.
After a restart, a change of servers or a failure all of this is repeated; servers keep their
tables. What a server or its loader cannot do lasts until the servers are others; a failure to
connect may pass, so that the next sync tries again. `auto` sends whole tensors meanwhile, and says
so at every sync.

Memory beyond the parameters: two groups of messages of `bucket_bytes` / 2 on each trainer, and the
same on each server rank.
"""

from __future__ import annotations

import concurrent.futures as cf
import json
import logging
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch

from megarl.api.records import ServersLost, WeightUpdateMeta
from megarl.models.piece_table import PieceTable
from megarl.transfer.gather import export_dtype
from megarl.transfer.geometry import Sources, TargetTable
from megarl.transfer.moves import lay_out, pack
from megarl.transfer.plan import (
    Preference,
    Receiver,
    TransferPlan,
    nearest,
    plan_together,
    plan_transfer,
)
from megarl.utils.env import is_here, is_loopback, machine
from megarl.utils.http import in_thread, split_address
from megarl.weight_sync.changes import Group, Names, Outgoing, SliceChanges
from megarl.weight_sync.fp8 import BlockFp8
from megarl.weight_sync.link import (
    MARGIN,
    Link,
    Meeting,
    Members,
    PackedTables,
    RankTable,
    open_store,
    record,
    spec_of,
)
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.plan import load_body
from megarl.weight_sync.proof import why_unproved
from megarl.weight_sync.servers import (
    CLOSE_TIMEOUT,
    GRACE,
    Deadline,
    ServerInfo,
    Servers,
    address_for,
)
from megarl.weight_sync.transports import WeightSource
from megarl.weight_sync.verify import Fingerprints

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Target:
    """Says what a link was made for."""

    addresses: tuple[str, ...]
    backend: str
    round_bytes: int
    quantization: str


_Tables = Sequence[Sequence[RankTable]]  # by server and rank
_Spot = tuple[str, tuple[bool, ...]]  # a rank's machine, and whether each server is there


class _Refused(Exception):
    """Tells why slices cannot be sent to these servers. Raised on every rank alike."""


class SliceSync:
    """Sends slices, on every rank of an engine alike. One of them speaks to the servers.

    key: of the configuration, where slices are wanted and cannot be sent. refused: what a loader
    may not do with tensors.
    """

    key: ClassVar = "weight_sync.options.sharded=true"
    refused: ClassVar = {
        "computed": "computes instead of copying",
        "twice": "writes twice",
        "unfilled": "fills from no HF tensor",
    }

    def __init__(self, source: WeightSource) -> None:
        self.source, self._speaker = source, source.sender
        self._target: _Target | None = None  # of the link
        self._refused: tuple[_Target, str] | None = None
        self._link: Link | None = None
        self._info: dict[str, ServerInfo] = {}
        self._servers: Servers | None = None
        self._groups: list[Group] = []
        # (server, rank) that take what a receiver gets, where that is none of them
        self._workers: dict[Receiver, list[tuple[int, int]]] = {}
        self._sent = SliceChanges()
        self._fp8: BlockFp8 | None = None

    def upload(self, meta: WeightUpdateMeta, deadline: Deadline, phases: Phases) -> bool:
        """Sends the weights, and returns True; or returns False, with nothing sent, where whole
        tensors have to be sent instead. Collective. Raises RuntimeError where a rank or server
        fails, or meta.sharded is "on" and slices cannot be sent, ServersLost where some are lost;
        servers then keep their old version, and the next upload connects anew."""
        try:
            with phases.time("connect"):
                level, why = self._prepare(meta, deadline)
            if why and meta.sharded == "on":
                raise RuntimeError(f"{self.key}: {why}")
            if not why:
                self._stream(meta, deadline, phases)
        except BaseException:
            self.close(abort=True)
            raise
        if why and self.source.rank == self._speaker:
            how = "weights of version %d go to %d server(s) as whole tensors: %s"
            log.log(level, how, meta.number, len(meta.addresses), why)
        return not why

    def ask_again(self) -> None:
        """Has the next upload find out anew whether slices can be sent, as servers are others."""
        self._target = self._refused = None

    def close(self, *, abort: bool = False) -> None:
        """Leaves the group, and ends an open session. abort: of something that failed. Servers may
        object, which is logged."""
        link, servers = self._link, self._servers
        self._target, self._link, self._servers, self._groups = None, None, None, []
        self._sent.forget()
        if link is None:
            return
        try:
            if abort:
                link.stop("another rank has failed")
                calls = servers.abandon_update(GRACE) if servers is not None else {}
                cf.wait(calls.values(), GRACE)
            elif servers is not None:
                deadline = Deadline(CLOSE_TIMEOUT)
                servers.begin_update(deadline)
                link.call("leave", deadline)
                servers.end_update(deadline)
        except RuntimeError as e:
            refused = [w for w in getattr(e, "servers", {}).values() if "ConnectionRefused" in w]
            if servers is None or len(refused) < len(servers.addresses):  # else all have ended
                log.warning("leaving the group of slices: %s", e)
        link.leave(abort=abort)

    # ---- once

    def _prepare(self, meta: WeightUpdateMeta, deadline: Deadline) -> tuple[int, str]:
        """Connects where that is needed. Returns why slices cannot be sent, "" where they can, and
        the level of a line that says so: a warning where it may pass."""
        backend = meta.comm_backend or ("nccl" if self.source.device.type == "cuda" else "gloo")
        if meta.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={meta.bucket_bytes}: use at least 1")
        ranks = self.source.ranks
        half = max(1, meta.bucket_bytes // 2)
        target = _Target(meta.addresses, backend, half, meta.quantization)
        if meta.sharded == "auto" and self._refused and self._refused[0] == target:
            return logging.INFO, self._refused[1]
        if all(ranks.gather(ranks.together(self._still_met, target, deadline))):
            return logging.INFO, ""
        self.close(abort=True)
        if meta.sharded == "auto":  # whole tensors need time, too
            deadline = Deadline(deadline.left / 2, patience=deadline.patience)
            deadline.text = f"half of the rest of weight_sync.timeout, {deadline.timeout:g} s"
        try:
            self._connect(target, meta, deadline)
        except ServersLost:
            raise
        except _Refused as e:
            self._refused = target, str(e)
            self.close(abort=True)
            return logging.INFO, str(e)
        except (RuntimeError, OSError) as e:  # OSError here is an OtherRankFailed elsewhere
            self.close(abort=True)
            return logging.WARNING, str(e)
        self._target = target
        if self.source.rank == self._speaker:
            log.info("weights go to %d server(s) as slices", len(meta.addresses))
        return logging.INFO, ""

    def _still_met(self, target: _Target, deadline: Deadline) -> bool:
        """Returns whether this rank, on the one that speaks also every server, is in the group."""
        if self._target != target or self._servers is None:
            return self._target == target
        again = self._servers.started_again(deadline)
        if again:
            log.info("recording anew: %s started again", ", ".join(again))
        return not again

    def _connect(self, target: _Target, meta: WeightUpdateMeta, deadline: Deadline) -> None:
        """Connects all trainer ranks with all server ranks, in steps that each are collective.
        Raises _Refused where slices cannot be sent, RuntimeError for what may pass."""
        self._survey(target, deadline)
        if target.backend == "nccl" and meta.sharded == "auto":
            self._look_for_proof()
        spots = self._locate_ranks()
        self._open_link(target, deadline)
        tables = self._record(target, deadline)
        plan = self._plan(tables, spots, target.round_bytes)
        self.source.ranks.together(self._put_plan, plan, tables)
        self._join(plan, deadline, meta.timeout)
        self.source.from_rank(self._speaker, Servers.end_update, self._servers, deadline)

    def _survey(self, target: _Target, deadline: Deadline) -> None:
        """Asks the servers what they are."""

        def ask() -> dict[str, ServerInfo]:
            self._servers = Servers(target.addresses)
            return self._servers.info(deadline)

        self._info = self.source.from_rank(self._speaker, ask)
        own = [server for server, i in self._info.items() if i.embedded]
        if own and target.quantization != "none":
            raise _Refused(f"megarl's own servers keep no FP8: {', '.join(own)}")
        if why := refusal_of_servers(self._info):
            raise _Refused(why)

    def _look_for_proof(self) -> None:
        """Looks whether slices have passed on every rank's machine with such servers."""
        s, versions = self.source, {i.version for i in self._info.values()}
        missing = s.ranks.gather(s.ranks.together(why_unproved, s.device, versions))
        if why := next(filter(None, missing), ""):
            raise _Refused(f"{why}, and sharded=true sends them untried")

    def _locate_ranks(self) -> list[_Spot]:
        """Returns where each trainer rank is."""
        hosts = [split_address(a)[0] for a in self._info]
        spots = self.source.ranks.gather((machine(), tuple(is_here(h) for h in hosts)))
        address = self.source.from_rank(self._speaker, address_for, self._info)
        if is_loopback(address) and len({where for where, _ in spots}) > 1:
            raise _Refused(
                "servers are at 127.0.0.1 and trainers on several machines; name their address"
            )
        return spots

    def _open_link(self, target: _Target, deadline: Deadline) -> None:
        """Opens the store, and reaches it from every rank."""
        s, stores = self.source, list[Any]()
        servers = {a: i.tp for a, i in self._info.items()}
        members = Members(s.layout.world_size, servers, target.backend)

        def meeting() -> Meeting:
            store, where = open_store(address_for(servers), deadline.left)
            stores.append(store)
            return where

        def reach() -> None:
            self._link = Link(members, s.rank, where, s.device, deadline.left, *stores)

        where = s.from_rank(self._speaker, meeting)
        s.ranks.together(reach)

    def _record(self, target: _Target, deadline: Deadline) -> _Tables:
        """Has all servers record. Returns the tables by server and rank; servers alike have equal
        tables, which are one object."""
        self._fp8 = BlockFp8(self.source) if target.quantization == "fp8_block" else None

        def ask() -> PackedTables:
            assert self._servers is not None and self._link is not None
            self._servers.begin_update(deadline)
            return record(self._link, spec_of(self._table, self._dtype), deadline)

        packed = self.source.from_rank(self._speaker, ask)
        nested = self._table.model.wrapper is not None
        read = partial(RankTable.of, refused=self.refused, nested=nested)
        tables = {raw: read(raw) for ranks in packed.values() for raw in ranks}
        why = [
            f"server {server}, rank {rank}, {tables[raw].refusal}"
            for server, ranks in packed.items()
            for rank, raw in enumerate(ranks)
            if tables[raw].refusal
        ]
        if why:
            raise _Refused("; ".join(why))
        return [[tables[raw] for raw in ranks] for ranks in packed.values()]

    def _plan(self, tables: _Tables, spots: Sequence[_Spot], round_bytes: int) -> TransferPlan:
        """Returns who sends what to whom, the same on all ranks, which raise where one cannot."""
        nodes = [next((w for w, here in spots if here[i]), None) for i in range(len(tables))]
        near = nearest([where for where, _ in spots])
        targets = {
            Receiver(server, rank): table.entries
            for server, ranks in enumerate(tables)
            for rank, table in enumerate(ranks)
        }
        return self.plan(targets, round_bytes, lambda to, ranks: near(nodes[to.target], ranks))

    def plan(
        self, targets: Mapping[Receiver, TargetTable], round_bytes: int, prefer: Preference
    ) -> TransferPlan:
        """Returns `plan_transfer`'s plan, the same on all ranks. Collective. Raises ValueError."""
        plan_slices = partial(
            plan_transfer,
            Sources(self._table),
            targets,
            dtypes={t.name: self._dtype(t.name) for t in self._table.tensors},
            round_bytes=round_bytes,
            prefer=prefer,
        )
        try:
            return plan_together("planning slices", plan_slices, self.source.ranks)
        except RuntimeError as e:  # after which some ranks would go on with whole tensors
            raise ValueError(f"planning slices: {e}") from e

    def _put_plan(self, plan: TransferPlan, tables: _Tables) -> None:
        """Puts this rank's share of the receivers' parts of the plan into the store."""
        assert self._link is not None
        for receiver in plan.receivers[self.source.rank :: self.source.layout.world_size]:
            rounds = plan.receives(receiver)
            for server, rank in self._workers.get(receiver, [receiver]):
                text = json.dumps({"digest": tables[server][rank].params, "rounds": rounds})
                self._link.box.put(f"plan/{server}/{rank}", zlib.compress(text.encode()))

    def _join(self, plan: TransferPlan, deadline: Deadline, timeout: float) -> None:
        """Enters the group together with all others."""
        link = self._link
        assert link is not None
        firsts, members = link.members.firsts, link.members
        self._groups = [
            [
                (
                    m.round,
                    firsts[m.receiver.target] + m.receiver.rank,
                    lay_out(m.slices, plan.dtypes),
                )
                for m in group
            ]
            for group in plan.sends(self.source.rank)
        ]
        bound = timeout + MARGIN if members.backend != "gloo" else deadline.left
        receivers = [peer for group in self._groups for _, peer, _ in group]
        self.source.ranks.together(
            partial(self._alongside, group_timeout=bound),
            f"connecting to {len(members.servers)} servers over {members.backend}",
            partial(link.join, deadline, bound, receivers),
            deadline,
            "join",
        )

    def _alongside(
        self,
        what: str,
        ours: Callable[[], Any],
        deadline: Deadline,
        command: str,
        **fields: Any,
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Does this rank's side of something while the servers obey a command. Returns
        its result and, on the rank that speaks, what every server rank replied."""
        link, calls = self._link, None
        assert link is not None
        try:
            if self._servers is not None:
                calls = link.start(command, deadline, **fields)
            side = in_thread(ours)
            link.alongside(what, side, calls, deadline)
        except BaseException as e:  # or others would wait for this rank
            link.stop(f"rank {self.source.rank}: {type(e).__name__}: {e}")
            raise
        answers = [f.result().value for f in (calls or {}).values()]
        return side.result(), [reply for ranks in answers for reply in ranks]

    @property
    def _table(self) -> PieceTable:
        """Returns the table of the tensors as they are sent."""
        return self._fp8.table if self._fp8 else self.source.table

    def _dtype(self, name: str) -> torch.dtype:
        if self._fp8 is not None:
            return self._fp8.dtype(name)
        return export_dtype(self.source.table.by_name[name], self.source.dtype)

    # ---- every sync

    def _stream(self, meta: WeightUpdateMeta, deadline: Deadline, phases: Phases) -> None:
        """Sends everything or what has changed, then names the version. Collective."""
        ranks = self.source.ranks
        names = self.source.from_rank(self._speaker, self._begin, meta, deadline)
        if self._fp8 is not None:
            with phases.time("encode"):
                self._fp8.measure()
        with phases.time("broadcast"):
            sent, received = ranks.together(self._transfer, meta, deadline, names, phases)
        fingerprints = Fingerprints(self.source, self._speaker, meta, deadline, phases)
        fingerprints.record(self._info, self._link)
        fingerprints.compare()
        ranks.together(self._accept, meta, deadline)
        if names is None:
            self._sent.forget()
        else:
            keep = self._sent.keep
            ranks.together(keep, names.id, self._groups, self.source.params)
            phases.add("encode", self._sent.seconds)
        self._account(phases, sent, received, changes=names is not None)

    def _begin(self, meta: WeightUpdateMeta, deadline: Deadline) -> Names | None:
        """Opens a session. Returns the names of the weights before and after, None where changes
        are not asked for."""
        assert self._servers is not None and self._link is not None
        self._servers.begin_update(deadline)
        return self._sent.ask(self._link, meta.number, deadline) if meta.delta else None

    def _transfer(
        self, meta: WeightUpdateMeta, deadline: Deadline, names: Names | None, phases: Phases
    ) -> tuple[int, Sequence[dict[str, Any]]]:
        """Sends this rank's messages. Returns its bytes and, on the rank that speaks, what every
        server rank received."""
        link = self._link
        assert link is not None
        if link.device.type == "cuda":  # this thread's stream computed the parameters
            torch.cuda.synchronize(link.device)
        return self._alongside(
            f"weights of version {meta.number}",
            lambda: link.send(self._messages(names), deadline),
            deadline,
            "receive",
            changes=None if names is None else names._asdict(),
        )

    def _messages(self, names: Names | None) -> Iterator[Sequence[Outgoing]]:
        """Returns groups of messages, which are packed as they are asked for."""
        assert self._link is not None
        params, device = self.source.params, self._link.device
        if names is None:
            quantize = None
            if fp8 := self._fp8:
                params, quantize = fp8.params(), fp8.quantize
            return (
                [(n, to, partial(pack, params, parts, device, quantize)) for n, to, parts in group]
                for group in self._groups
            )
        return self._sent.messages(self._groups, params, device, whole=names.base is None)

    def _accept(self, meta: WeightUpdateMeta, deadline: Deadline) -> None:
        """Names the version, once every rank has received, and ends the session."""
        if self._servers is not None and self._link is not None:
            body = load_body(version=meta.number, last=True, flush=meta.flush_cache)
            self._link.call("accept", deadline, body=body)
            self._servers.end_update(deadline)

    def _account(
        self, phases: Phases, sent: int, received: Sequence[dict[str, Any]], *, changes: bool
    ) -> None:
        """Notes the metrics of a sync. received: the replies of all server ranks, on the rank that
        speaks. changed: the part of the numbers that differ from the version before, where versions
        were compared; then bytes_whole is what all of them would have been. Collective."""
        counts = self._sent.counts + Counter(bytes=sent)
        extra = self._extra(changes=changes)
        ranks = self.source.ranks.gather((counts, extra, received))
        total, replies = sum((c for c, _, _ in ranks), Counter[str]()), ranks[self._speaker][2]
        metrics: dict[str, float] = {
            "bytes": total["bytes"],
            "senders": sum(c["bytes"] > 0 for c, _, _ in ranks),
            "peak_extra_bytes": max(extra for _, extra, _ in ranks),
            "slice_bytes": max(r["received"] for r in replies),
            "server_extra_bytes": max(r["peak"] for r in replies),
        }
        if total["compared"]:
            metrics["changed"] = total["changed"] / total["compared"]
            metrics["bytes_whole"] = total["whole"]
        phases.metrics |= {name: float(value) for name, value in metrics.items()}

    def _extra(self, *, changes: bool) -> int:
        """Returns the most bytes that this rank needs for a sync: two groups of messages, the
        largest that follow each other; with `changes` also the largest message as it was and what
        differs, but not what is kept."""
        sizes = [[parts.nbytes for _, _, parts in group] for group in self._groups]
        groups = [sum(group) for group in sizes]
        extra = max((a + b for a, b in pairwise([*groups, 0])), default=0)  # it may send nothing
        return extra + 2 * changes * max((size for group in sizes for size in group), default=0)


# ---- why whole tensors are sent instead


def refusal_of_servers(info: Mapping[str, ServerInfo]) -> str:
    """Returns which servers cannot receive slices, and why, "" where all can."""
    return "; ".join(f"server {s} {why}" for s, i in info.items() if (why := i.refuses_slices))
