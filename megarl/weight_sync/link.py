"""Links all trainer ranks with all ranks of the servers: commands, a store, one group.

One rank speaks: it hosts the store and calls the servers. A command is an HTTP request that names
it (see receiver/megarl_receiver); what belongs to it lies in the store. SGLang answers 200 whatever
happened, as its loader must not raise, so a command has succeeded when every rank has said so in
the store.

One group holds all trainers and, after them, all server ranks. Whoever fails puts a word into the
store and closes its connections, and all others give up.
"""

from __future__ import annotations

import concurrent.futures as cf
import hashlib
import json
import threading
import time
import uuid
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from megarl.models.ops import Shape
from megarl.models.piece_table import PieceTable
from megarl.transfer.geometry import TargetTable, read_entries
from megarl.utils.env import JOB_TOKEN, job_token
from megarl.utils.http import call_json, in_thread
from megarl.utils.rendezvous import listen
from megarl.weight_sync.receiver import LOADER
from megarl.weight_sync.receiver.megarl_receiver.mailbox import Mailbox
from megarl.weight_sync.servers import (
    GRACE,
    LINGER,
    Answer,
    Calls,
    Deadline,
    absent,
    failures,
    finish,
    raise_if_lost,
    wait_for,
)
from megarl.wire import handles
from megarl.wire.process_group import destroy_update_group, init_update_group, set_group_timeout

LOOK_EVERY = 0.5  # seconds between looks whether somebody has given up
# How often, every 0.01 s, a server's reply is looked for after its answer over HTTP: it may be
# under way. Looks, not seconds: a store that is held up answers one late, and then has the reply.
REPLY_LOOKS = 500
# How much longer than a sync may take operations of NCCL live: ours is the readable error, and its
# watchdog ends the process.
MARGIN = 60.0
_SHOWN = 3  # tensors or parameters of a server
_GONE = "the rank that speaks to the servers is gone ({})"

PackedTables = dict[str, list[bytes]]  # by server, and its ranks
Spec = Sequence[tuple[str, Shape, str]]  # (name, shape, dtype) of each HF tensor, as it is sent


@dataclass(frozen=True)
class Meeting:
    """Says where the ranks of a link meet. session: of this link alone."""

    host: str
    port: int
    session: str


@dataclass(frozen=True)
class Members:
    """Names who is in a link. servers: address -> tensor-parallel size."""

    trainers: int
    servers: Mapping[str, int]
    backend: str

    @property
    def world(self) -> int:
        """Returns the number of ranks in the group."""
        return self.trainers + sum(self.servers.values())

    @cached_property
    def firsts(self) -> list[int]:
        """Returns the number in the group of each server's rank 0."""
        return list(accumulate(self.servers.values(), initial=self.trainers))[:-1]

    def server_of(self, number: int) -> str:
        """Returns the server of a number in the group."""
        return list(self.servers)[bisect_right(self.firsts, number) - 1]


def open_store(host: str, timeout: float) -> tuple[dist.TCPStore, Meeting]:
    """Returns the store of a link to come, on the rank that speaks, and where it is."""
    store = listen(host, timeout=timeout)
    return store, Meeting(host, store.port, uuid.uuid4().hex)


class Link:
    """Holds one trainer rank's side of a link. store: on the rank that speaks."""

    def __init__(
        self,
        members: Members,
        rank: int,
        meeting: Meeting,
        device: torch.device,
        timeout: float,
        store: dist.TCPStore | None = None,
    ) -> None:
        """Reaches the store; other ranks and servers are not waited for."""
        self.members, self.rank, self.meeting = members, rank, meeting
        self._word = ""
        self.device = torch.device("cpu") if members.backend == "gloo" else device
        self.group: dist.ProcessGroup | None = None
        self._left, self._leaving = False, threading.Lock()
        self._store = store or self._reach(timeout)
        self.box = Mailbox(self._store, meeting.session, job_token() or "")

    def _reach(self, timeout: float) -> dist.TCPStore:
        """Returns a connection to the store. One that waits for a value is of no other use."""
        return dist.TCPStore(
            self.meeting.host,
            self.meeting.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
        )

    # ---- commands, on the rank that speaks

    def start(
        self,
        do: str,
        deadline: Deadline,
        *,
        body: Mapping[str, Any] | None = None,
        but: Collection[str] = (),
        texts: Sequence[Sequence[str]] = (),
        **fields: Any,
    ) -> dict[str, Future[Answer]]:
        """Has every rank of every server do something. A call fails with what a rank replied.
        body: of the request; but: servers that are left out; texts: for each server and rank, the
        command with what comes with it; fields: of the command."""
        fields = {"id": uuid.uuid4().hex[:12]} | fields
        commands = [
            self.command(do, n, deadline, **fields) for n in range(len(self.members.firsts))
        ]
        return {
            server: in_thread(
                self._obey,
                server,
                commands[number],
                texts[number] if texts else [handles.pack_empty(json.dumps(commands[number]))] * tp,
                body or {},
                deadline.left + LINGER,
            )
            for number, (server, tp) in enumerate(self.members.servers.items())
            if server not in but
        }

    def command(self, do: str, number: int, deadline: Deadline, **fields: Any) -> dict[str, Any]:
        """Returns a command to server `number`."""
        return {
            "do": do,
            "backend": self.members.backend,
            "timeout": deadline.left,
            "world": self.members.world,
            "server": number,
            "address": list(self.members.servers)[number],
            "first": self.members.firsts[number],
            **vars(self.meeting),
            **fields,
        }

    def call(
        self, do: str, deadline: Deadline, *, failed: dict[str, str] | None = None, **given: Any
    ) -> dict[str, list[dict[str, Any]]]:
        """Returns every server's replies by rank, once all have obeyed. Raises RuntimeError with
        the errors of the servers that failed, ServersLost where some are lost. failed: servers that
        are left out, with the reasons; a server that fails is added instead of the RuntimeError."""
        return finish(do, self.start(do, deadline, but=failed or (), **given), deadline, failed)

    def _obey(
        self,
        server: str,
        command: Mapping[str, Any],
        texts: Sequence[str],
        body: Mapping[str, Any],
        timeout: float,
    ) -> Answer:
        request = {
            "serialized_named_tensors": texts,
            "load_format": LOADER,
            "flush_cache": False,
            "selector": "target",
            **body,
        }
        call_json("POST", server, "/update_weights_from_tensor", request, timeout=timeout)
        replies = [self._reply(server, command, rank) for rank in range(len(texts))]
        return Answer(replies, time.monotonic())

    def _reply(self, server: str, command: Mapping[str, Any], rank: int) -> dict[str, Any]:
        """Returns what a rank has said, as soon as the store has it: a rank's `set` returns while
        its reply is on the way. Raises RuntimeError where it is an error, or nothing."""
        place = f"reply/{command['id']}/{command['server']}/{rank}"
        for _ in range(REPLY_LOOKS):
            if self.box.has(place):
                break
            time.sleep(0.01)  # looks, for a wait would keep the store from other threads
        else:
            raise RuntimeError(
                f"server {server}: rank {rank} did not reply through the store at "
                f"{self.meeting.host}:{self.meeting.port}; give it the job's {JOB_TOKEN} and a way "
                "to that address (its log says which of them it lacks)"
            )
        reply = json.loads(self.box.take(place))
        if not reply.pop("ok"):
            raise RuntimeError(f"{command['do']}: server {server}: rank {rank}: {reply['error']}")
        at = f"{command['id']}/{command['server']}/{rank}"
        return reply | {"at": at}

    # ---- the group

    def join(self, deadline: Deadline, group_timeout: float, receivers: Iterable[int]) -> None:
        """Enters the group with all others, and makes sure that all are there: NCCL wants the first
        use of a communicator to be everybody's, and connects two ranks at their first message, in a
        call that never returns where one of them is gone. So each of this rank's `receivers`
        (numbers in the group) gets a byte here. Blocks; call it through `alongside`.

        Each rank posts these bytes at once. NCCL then connects a pair in step (receiver - sender)
        modulo the group's size, at both ends (src/transport.cc, ncclTransportP2pSetup): of the
        pairs that are not done, both ends have got to one of the earliest step, so nothing waits in
        a circle, whatever the plan."""
        m = self.meeting
        group = init_update_group(
            master_address=m.host,
            master_port=m.port,
            rank=self.rank,
            world_size=self.members.world,
            group_name=self.box.name("group"),
            backend=self.members.backend,
            timeout=group_timeout,
            store=self._reach(deadline.left),
        )
        with self._leaving:
            self.group = None if self._left else group
        if self.group is None:
            destroy_update_group(group, abort=True)
            raise RuntimeError("the group has come together after it was left")
        self._use_device()
        work = dist.all_reduce(torch.zeros(1, device=self.device), group=group, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=deadline.left))
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        peers = sorted(set(receivers))
        greetings = [dist.P2POp(dist.isend, byte, group=group, group_peer=p) for p in peers]
        works = dist.batch_isend_irecv(greetings) if greetings else []
        for i, work in enumerate(works):
            try:
                work.wait(timedelta(seconds=deadline.left))
            except RuntimeError as e:
                # over NCCL one work stands for all bytes
                late = peers[i : i + 1] if len(works) == len(peers) else peers
                servers = ", ".join(sorted({self.members.server_of(p) for p in late}))
                raise RuntimeError(f"no byte reached {servers}: {e}") from e
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def send(self, groups: Iterable[Sequence[tuple[int, int, Any]]], deadline: Deadline) -> int:
        """Sends groups of messages (step, number of the receiver in the group, a function that
        packs it), and returns the bytes. One group is packed while the one before it is on its way.
        Blocks; call it through `alongside`."""
        assert self.group is not None, "join first"
        self._use_device()
        set_group_timeout(self.group, deadline.left + MARGIN)
        under_way: deque[tuple[list[dist.Work], list[torch.Tensor]]] = deque()
        sent = 0

        def settle() -> None:
            for work in under_way.popleft()[0]:
                work.wait(timedelta(seconds=deadline.left))

        for messages in groups:
            buffers = [pack() for _, _, pack in messages]
            ops = [
                dist.P2POp(dist.isend, b, group=self.group, tag=step, group_peer=peer)
                for b, (step, peer, _) in zip(buffers, messages, strict=True)
            ]
            sent += sum(b.nbytes for b in buffers)
            under_way.append((dist.batch_isend_irecv(ops), buffers))
            if len(under_way) > 1:
                settle()
        while under_way:
            settle()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return sent

    def alongside(
        self, what: str, ours: Future[Any], theirs: Calls | None, deadline: Deadline
    ) -> None:
        """Waits for this rank's side of something, and on the rank that speaks for the servers'
        calls. Where any rank or server fails, everybody gives up: raises RuntimeError with the word
        of the one that failed first, ServersLost where servers are lost."""
        calls, lost = theirs or {}, {}
        if theirs is not None:
            lost = wait_for(calls, deadline, also=[ours], return_when=cf.FIRST_EXCEPTION)
        while theirs is None and not (ours.done() or deadline.over or self._stopped()):
            cf.wait([ours], LOOK_EVERY)
        sides: list[Future[Any]] = [ours, *calls.values()]
        if not lost and all(f.done() and f.exception() is None for f in sides):
            return
        self.stop(self._reason(ours, calls, deadline))
        if theirs is not None and not lost and not deadline.over:
            cf.wait(sides, min(GRACE, deadline.left))
            lost = absent(calls, deadline)
        raise_if_lost(lost, what)
        raise RuntimeError(f"{what}: {self._word}")

    def _reason(self, ours: Future[Any], calls: Calls, deadline: Deadline) -> str:
        said = failures(calls)
        if ours.done() and (error := ours.exception()) is not None:
            said.append(f"rank {self.rank}: {type(error).__name__}: {error}")
        late = [s for s, f in calls.items() if not f.done()]
        late += [] if ours.done() else [f"rank {self.rank}"]
        bound = f"not done within {deadline.text}: {', '.join(late)}"
        return "; ".join(said) or bound

    def stop(self, why: str) -> None:
        """Tells everybody to give up, and why, and ends what is under way."""
        try:
            self._word = self.box.stop(why)
        except Exception as e:
            self._word = _GONE.format(e)
        self.leave(abort=True)

    def leave(self, *, abort: bool = False) -> None:
        """Leaves the group, one that is still being joined as soon as it is there."""
        with self._leaving:
            group, self.group, self._left = self.group, None, True
        if group is not None:
            destroy_update_group(group, abort=abort)

    def _stopped(self) -> str:
        """Returns the word of whoever failed first, "" where all is well."""
        try:
            return self.box.stopped()
        except Exception as e:
            return _GONE.format(e)

    def _use_device(self) -> None:
        if self.device.type == "cuda":  # threads begin with device 0
            torch.cuda.set_device(self.device)


@dataclass(frozen=True)
class RankTable:
    """Holds a server rank's table. params: the digest of the parameters that it was recorded of.
    refusal: what the loader does that slices cannot repeat, "" where there is nothing."""

    entries: TargetTable
    params: str
    refusal: str

    @classmethod
    def of(cls, packed: bytes, refused: Mapping[str, str], *, nested: bool = False) -> RankTable:
        """Reads a table. refused: what a loader may not do, by its name in the table. nested: the
        model stands beside another, whose parameters no tensor fills."""
        table = json.loads(zlib.decompress(packed))
        if nested:
            reached = {*table["computed"], *(param for _, _, _, param, *_ in table["entries"])}
            table["unfilled"] = [p for p in table["unfilled"] if p in reached]
        entries = TargetTable(read_entries(table["entries"]), hashlib.sha256(packed).hexdigest())
        refusals = [f"{kind}: {few([*table[n]])}" for n, kind in refused.items() if table[n]]
        return cls(entries, table["digest"], ", ".join(refusals))


def spec_of(table: PieceTable, dtype_of: Callable[[str], torch.dtype]) -> Spec:
    """Returns the spec of a table's HF tensors. dtype_of: that a tensor is sent in, by name."""
    return [(t.name, t.shape, str(dtype_of(t.name)).removeprefix("torch.")) for t in table.tensors]


def record(
    link: Link, spec: Spec, deadline: Deadline, failed: dict[str, str] | None = None
) -> PackedTables:
    """Returns the tables of all ranks, packed; a server that still has them answers at once. On the
    rank that speaks, in an update session, which undoes what is packed in place. Raises, and takes
    `failed`, as `Link.call` does."""
    link.box.put("spec", zlib.compress(json.dumps(spec).encode()))
    replies = link.call("record", deadline, failed=failed)
    distinct: dict[bytes, bytes] = {}  # equal tables become one object, which is pickled once
    tables: PackedTables = {}
    for server, ranks in replies.items():
        packed = [link.box.take(f"table/{reply['at']}") for reply in ranks]
        tables[server] = [distinct.setdefault(table, table) for table in packed]
    return tables


def few(names: Sequence[str]) -> str:
    """Words the first names, and how many more there are."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
