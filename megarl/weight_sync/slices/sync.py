"""Sends weights by slices, where the servers can take them.

Once per server process: an update session in which every rank records what its loader does with the
HF tensors; a plan that all trainers make alike; one group. Then every sync: a session, in which
trainers send and servers receive, rounds in the plan's order; the version, when all have received.
A server that started anew, other servers, or a failure: all of it again, where servers that still
have their table answer with it. A failure to connect may pass, so that `auto` sends whole tensors
and tries again at the next sync, and after 2, 4, ... more where it fails again; what a server or
its loader cannot do lasts until the servers are others.

Memory beyond the parameters: two groups of messages of `bucket_bytes` / 2 on each trainer, and the
same on each server rank.
"""

from __future__ import annotations

import concurrent.futures as cf
import hashlib
import json
import logging
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megarl.api.records import ServersLost, WeightUpdateMeta
from megarl.models.gather import export_dtype
from megarl.models.piece_table import PieceTable
from megarl.transfer.geometry import Sources, TargetTable
from megarl.transfer.moves import lay_out, pack
from megarl.transfer.plan import Message, Receiver, TransferPlan, nearest, plan_transfer
from megarl.utils.env import is_here, is_loopback, machine
from megarl.utils.http import in_thread, split_address
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.plan import load_body
from megarl.weight_sync.servers import (
    CLOSE_TIMEOUT,
    GRACE,
    Deadline,
    ServerInfo,
    Servers,
    address_for,
)
from megarl.weight_sync.slices.changes import Group, Names, Outgoing, SliceChanges
from megarl.weight_sync.slices.link import (
    MARGIN,
    Link,
    Meeting,
    Members,
    PackedTables,
    open_store,
    record,
    spec_of,
)
from megarl.weight_sync.slices.quantized import BlockFp8
from megarl.weight_sync.transports import WeightSource
from megarl.weight_sync.verify import Fingerprints

log = logging.getLogger(__name__)

_SHOWN = 3  # parameters of a server rank
PLAN = "plan"  # its name in commands: a session has one


@dataclass(frozen=True)
class _Target:
    """Says what a link was made for."""

    addresses: tuple[str, ...]
    backend: str
    round_bytes: int
    quantization: str


class SliceSync:
    """Sends slices, on every rank of an engine alike. One of them speaks to the servers."""

    def __init__(self, source: WeightSource) -> None:
        self.source, self._speaker = source, source.sender
        self._target: _Target | None = None
        self._why = ""
        self._failures = self._syncs_to_next = 0  # of connecting, in a row; 0 syncs: does not try
        self._link: Link | None = None
        self._info: dict[str, ServerInfo] = {}
        self._servers: Servers | None = None
        self._groups: list[Group] = []
        self._sent = SliceChanges()
        self._fp8: BlockFp8 | None = None

    def upload(self, meta: WeightUpdateMeta, deadline: Deadline, phases: Phases) -> bool:
        """Sends the weights, and returns True; or returns False, with nothing sent, where whole
        tensors have to be sent instead. Collective. Raises RuntimeError where a rank or server
        fails, or meta.sharded is "on" and slices cannot be sent, ServersLost where some are lost;
        servers then keep their old version, and the next upload connects anew."""
        try:
            with phases.time("connect"):
                why = self._prepare(meta, deadline)
            if why:
                if meta.sharded == "on":
                    raise RuntimeError(f"weight_sync.options.sharded=true: {why}")
                return False
            self._stream(meta, deadline, phases)
        except BaseException:
            self.close(abort=True)
            raise
        return True

    def ask_again(self) -> None:
        """Has the next upload find out anew whether slices can be sent, as servers are others."""
        self._target = None

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
            log.warning("leaving the group of slices: %s", e)
        link.leave(abort=abort)

    # ---- once

    def _prepare(self, meta: WeightUpdateMeta, deadline: Deadline) -> str:
        """Connects where that is needed. Returns why slices cannot be sent, "" where they can."""
        backend = meta.comm_backend or ("nccl" if self.source.device.type == "cuda" else "gloo")
        if why := refusal_of_meta(meta, backend):
            return why
        agreement = self.source.agreement
        half = max(1, meta.bucket_bytes // 2)
        target = _Target(meta.addresses, backend, half, meta.quantization)
        if self._syncs_to_next == 1:
            self.ask_again()
        self._syncs_to_next = max(0, self._syncs_to_next - 1)
        kept = agreement.together(self._still_met, target, deadline)
        if all(agreement.gather(kept)):
            return self._why
        self.close(abort=True)
        try:
            self._why = self._connect(target, meta, deadline)
            self._failures = self._syncs_to_next = 0
        except ServersLost:
            raise
        except RuntimeError as e:
            self._why, self._syncs_to_next = str(e), 2**self._failures
            self._failures += 1
        if self._why:
            self.close(abort=True)
        self._target = target
        if self.source.rank == self._speaker:
            self._say(meta)
        return self._why

    def _say(self, meta: WeightUpdateMeta) -> None:
        """Says in the log how weights go from now on."""
        servers = len(meta.addresses)
        if self._syncs_to_next and meta.sharded == "auto":
            how = "weights go to %d server(s) as whole tensors, and by slices after %d sync(s): %s"
            log.warning(how, servers, self._syncs_to_next, self._why)
        else:
            how = f"whole tensors: {self._why}" if self._why else "slices"
            log.info("weights go to %d server(s) as %s", servers, how)

    def _still_met(self, target: _Target, deadline: Deadline) -> bool:
        """Returns whether this rank, on the one that speaks also every server, is in the group, or
        whole tensors are sent."""
        if self._target != target or self._servers is None:
            return self._target == target
        again = self._servers.started_again(deadline)
        if again:
            log.info("recording anew: %s started again", ", ".join(again))
        return not again

    def _connect(self, target: _Target, meta: WeightUpdateMeta, deadline: Deadline) -> str:
        """Records, plans and joins. Returns why slices cannot be sent. Collective."""
        s, agreement = self.source, self.source.agreement
        why, self._info = self.source.from_rank(self._speaker, self._survey, target, deadline)
        if why:
            return why
        servers = {a: i.tp for a, i in self._info.items()}
        members = Members(s.layout.world_size, servers, target.backend)
        hosts = [split_address(a)[0] for a in servers]
        spots = agreement.gather((machine(), tuple(is_here(h) for h in hosts)))
        if is_loopback(address_for(servers)) and len({where for where, _ in spots}) > 1:
            return "servers are at 127.0.0.1 and trainers on several machines; name their address"
        self._fp8 = BlockFp8(s) if target.quantization == "fp8_block" else None
        self._open(members, deadline)
        tables = self.source.from_rank(self._speaker, self._record, deadline)
        # servers alike have equal tables: each is read once
        distinct = {raw for _, ranks in tables for raw in ranks}
        read = {raw: json.loads(zlib.decompress(raw)) for raw in distinct}
        made = {
            raw: TargetTable.from_rows(table["entries"], hashlib.sha256(raw).hexdigest())
            for raw, table in read.items()
        }
        by_rank = {a: [read[raw] for raw in ranks] for a, ranks in tables}
        if why := refusal_of_tables(by_rank):
            return why
        nodes = [next((w for w, near in spots if near[i]), None) for i in range(len(hosts))]
        plan = plan_transfer(
            Sources(self._table),
            {
                Receiver(i, rank): made[raw]
                for i, (_, ranks) in enumerate(tables)
                for rank, raw in enumerate(ranks)
            },
            itemsizes={t.name: self._dtype(t.name).itemsize for t in self._table.tensors},
            round_bytes=target.round_bytes,
            prefer=nearest([where for where, _ in spots], lambda to: nodes[to.target]),
        )
        if len(set(agreement.gather(plan.digest))) > 1:
            return "the ranks plan otherwise than each other: give all of them the same model"
        agreement.together(self._share, plan, by_rank)
        self._groups = [
            [(m.round, self._number(members, m), lay_out(m.slices, self._dtype)) for m in group]
            for group in plan.sends(s.rank)
        ]
        agreement.together(self._join, deadline, meta.timeout)
        agreement.together(self._end_session, deadline)
        return ""

    def _survey(self, target: _Target, deadline: Deadline) -> tuple[str, dict[str, ServerInfo]]:
        """Asks the servers what they are."""
        self._servers = Servers(target.addresses)
        info = self._servers.info(deadline)
        return refusal_of_servers(info), info

    def _open(self, members: Members, deadline: Deadline) -> None:
        """Opens the store, and reaches it from every rank. Collective."""
        stores: list[Any] = []

        def meeting() -> Meeting:
            store, where = open_store(address_for(members.servers), deadline.left)
            stores.append(store)
            return where

        where = self.source.from_rank(self._speaker, meeting)

        def reach() -> None:
            s = self.source
            self._link = Link(members, s.rank, where, s.device, deadline.left, *stores)

        self.source.agreement.together(reach)

    def _record(self, deadline: Deadline) -> PackedTables:
        """Has all servers record, and returns their tables."""
        assert self._servers is not None and self._link is not None
        self._servers.begin_update(deadline)
        return record(self._link, spec_of(self._table, self._dtype), deadline)

    def _share(self, plan: TransferPlan, tables: dict[str, list[dict[str, Any]]]) -> None:
        """Puts the plans of some receivers into the store; the others are other ranks' to put."""
        assert self._link is not None
        by_number, size = list(tables.values()), self.source.layout.world_size
        for receiver in plan.receivers[self.source.rank :: size]:
            (server, rank), rounds = receiver, plan.receives(receiver)
            text = json.dumps({"digest": by_number[server][rank]["digest"], "rounds": rounds})
            self._link.box.put(f"plan/{PLAN}/{server}/{rank}", zlib.compress(text.encode()))

    def _join(self, deadline: Deadline, timeout: float) -> None:
        """Enters the group together with all others."""
        link = self._link
        assert link is not None
        bound = timeout + MARGIN if link.members.backend != "gloo" else deadline.left
        what = f"connecting to {len(link.members.servers)} servers over {link.members.backend}"
        theirs = None
        try:
            if self._servers is not None:
                theirs = link.start("join", deadline, group_timeout=bound, plan=PLAN)
            receivers = [peer for group in self._groups for _, peer, _ in group]
            ours = in_thread(link.join, deadline, bound, receivers)
            link.alongside(what, ours, theirs, deadline)
        except BaseException as e:  # or others would wait for this rank
            link.stop(f"rank {self.source.rank}: {type(e).__name__}: {e}")
            raise

    def _end_session(self, deadline: Deadline) -> None:
        if self._servers is not None:
            self._servers.end_update(deadline)

    def _number(self, members: Members, message: Message) -> int:
        return members.firsts[message.receiver.target] + message.receiver.rank

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
        agreement = self.source.agreement
        names = self.source.from_rank(self._speaker, self._begin, meta, deadline)
        if self._fp8 is not None:
            with phases.time("encode"):
                self._fp8.measure()
        with phases.time("broadcast"):
            sent, received = agreement.together(self._transfer, meta, deadline, names)
        fingerprints = Fingerprints(self.source, self._speaker, meta, deadline, phases)
        fingerprints.record(self._info, self._link)
        fingerprints.compare()
        agreement.together(self._accept, meta, deadline)
        if names is None:
            self._sent.forget()
        else:
            keep = self._sent.keep
            agreement.together(keep, names.id, self._groups, self.source.params)
            phases.add("encode", self._sent.seconds)
        mine = self._sent.counts + Counter(bytes=sent)
        extra = _memory(self._groups, changes=names is not None)
        figures = agreement.gather((mine, extra, received))
        phases.metrics |= _metrics([f[:2] for f in figures], figures[self._speaker][2])

    def _begin(self, meta: WeightUpdateMeta, deadline: Deadline) -> Names | None:
        """Opens a session. Returns the names of the weights before and after, None where changes
        are not asked for."""
        assert self._servers is not None and self._link is not None
        self._servers.begin_update(deadline)
        return self._sent.ask(self._link, meta.number, deadline) if meta.delta else None

    def _transfer(
        self, meta: WeightUpdateMeta, deadline: Deadline, names: Names | None
    ) -> tuple[int, Sequence[dict[str, Any]]]:
        """Sends this rank's messages. Returns its bytes and, on the rank that speaks, what every
        server rank received."""
        link = self._link
        assert link is not None
        theirs = None
        try:
            if self._servers is not None:
                changes = None if names is None else names._asdict()
                theirs = link.start("receive", deadline, plan=PLAN, changes=changes)
            if link.device.type == "cuda":  # this thread's stream computed the parameters
                torch.cuda.synchronize(link.device)
            ours = in_thread(link.send, self._messages(names), deadline)
            link.alongside(f"weights of version {meta.number}", ours, theirs, deadline)
        except BaseException as e:  # or others would wait for this rank
            link.stop(f"rank {self.source.rank}: {type(e).__name__}: {e}")
            raise
        answers = [f.result().value for f in (theirs or {}).values()]
        return ours.result(), [reply for ranks in answers for reply in ranks]

    def _messages(self, names: Names | None) -> Iterator[Sequence[Outgoing]]:
        """Returns groups of messages, which are packed as they are asked for."""
        assert self._link is not None
        params, device = self.source.params, self._link.device
        if names is None:
            params = params if self._fp8 is None else self._fp8.params()
            quantize = self._fp8.quantize if self._fp8 else None
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


# ---- why whole tensors are sent instead


def refusal_of_meta(meta: WeightUpdateMeta, backend: str) -> str:
    """Returns why an update is not sent by slices whatever the servers are, "" where it may be."""
    if backend == "nccl" and meta.sharded == "auto":
        return "slices have not been measured over NCCL yet; sharded=true sends them"
    if meta.bucket_bytes < 1:
        return f"bucket_bytes={meta.bucket_bytes}: use at least 1"
    return ""


def refusal_of_servers(info: Mapping[str, ServerInfo]) -> str:
    """Returns which servers cannot receive slices, and why, "" where all can."""
    return "; ".join(f"server {s} {why}" for s, i in info.items() if (why := i.refuses_slices))


def refusal_of_tables(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Returns what the servers' loaders do that slices cannot repeat, "" where there is nothing.
    tables: by server and rank, as `megarl_receiver` records them."""
    return "; ".join(
        f"server {server}, rank {rank}, {why}"
        for server, ranks in tables.items()
        for rank, table in enumerate(ranks)
        if (why := _of_table(table))
    )


def _of_table(table: Mapping[str, Any]) -> str:
    """Names parameters that are not filled by copies of HF elements, each exactly once."""
    kinds = {
        "computes instead of copying": table["computed"],
        "writes twice": table["twice"],
        "fills from no HF tensor": table["unfilled"],
    }
    return ", ".join(
        f"{kind}: {', '.join(list(found)[:_SHOWN])}"
        + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
        for kind, found in kinds.items()
        if found
    )


# ---- figures


def _memory(groups: Sequence[Group], *, changes: bool) -> int:
    """Returns the bytes of two groups of messages, the largest that follow each other; with
    `changes` also of the largest message as it was and of what differs, but not of what is kept."""
    sizes = [sum(parts.nbytes for _, _, parts in group) for group in groups]
    two = max((a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=True)), default=0)
    largest = max((parts.nbytes for group in groups for _, _, parts in group), default=0)
    return two + (2 * largest if changes else 0)


def _metrics(
    ranks: Sequence[tuple[Counter[str], int]], received: Sequence[dict[str, Any]]
) -> dict[str, float]:
    """Returns the metrics of a sync. ranks: what each trainer rank counted, and its memory;
    received: the replies of all server ranks.

    changed: the part of the numbers that differ from the version before, where versions were
    compared; then bytes_whole is what all of them would have been.
    """
    total = sum((counts for counts, _ in ranks), Counter[str]())
    found = {
        "bytes": float(total["bytes"]),
        "senders": float(sum(counts["bytes"] > 0 for counts, _ in ranks)),
        "peak_extra_bytes": float(max(extra for _, extra in ranks)),
        "slice_bytes": float(max(r["received"] for r in received)),
        "server_extra_bytes": float(max(r["peak"] for r in received)),
    }
    if total["compared"]:
        found["changed"] = total["changed"] / total["compared"]
        found["bytes_whole"] = float(total["whole"])
    return found
