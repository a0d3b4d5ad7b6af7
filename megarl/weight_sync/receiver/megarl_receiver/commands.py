"""Obeys the trainers' commands on every rank of a server.

`POST /update_weights_from_tensor` with load_format="megarl_receiver.load" calls `load` on every
tensor-parallel rank, with the real module. Its one tensor has a JSON command for a name, and is
empty but for `take`; everything else goes through a store of the trainers:

    record   learn where every element of every HF tensor lands in this rank's parameters
    join     enter the group of all trainers and server ranks
    holds    the trainers' name for the weights that are here, if nothing else has come since
    receive  take this rank's slices, round by round, and copy them in place as a plan says; or
             their changes against the weights that it holds
    take     copy the messages of one round in place, out of the memory of a trainer beside this
             rank, which the one tensor is
    hash     the hash of each part of an HF tensor here, of all or of "names", read back from the
             parameters
    accept   nothing; the request carries the version, once every rank has received
    leave    leave the group

No command raises: an exception in a custom loader ends SGLang's scheduler, and a rank that leaves
early leaves the others in a barrier. Errors are replied through the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .fingerprint import Holding, tensor_hash
from .mailbox import TOKEN, Mailbox
from .messages import ALIGN, HEAD, HEADS, laid_out, land
from .recording import Table, digest_of, record, state

CONNECT_TIMEOUT = 30.0  # seconds to reach the store
POLL = 0.002  # seconds between looks after messages under way
LOOK_EVERY = 1.0  # seconds between looks whether the trainers have given up
_NEVER_SENT = 0x6E65  # tag of a message nobody sends


@dataclass
class Held:
    """Keeps what outlives a command. spec: the HF tensors of the table, (name, shape, dtype), as
    they are sent; dtypes: theirs by name. plan: of a session, with its name. wrote: whether the
    latest command has changed parameters."""

    spec: Sequence[Any] = ()
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    table: Table | None = None
    group: dist.ProcessGroup | None = None
    plan: tuple[str, Any] = ("", None)
    weights: Holding = field(default_factory=Holding)
    wrote: bool = False


held = Held()


@dataclass(frozen=True)
class Order:
    """Holds a command, and the rank of this server that obeys it. memory: what comes with it."""

    command: Mapping[str, Any]
    memory: torch.Tensor
    box: Mailbox
    rank: int
    model: torch.nn.Module

    def place(self, kind: str) -> str:
        """Returns the name under which this rank puts or finds something of this command."""
        return f"{kind}/{self.command['id']}/{self.command['server']}/{self.rank}"

    @property
    def who(self) -> str:
        """Returns how errors name this rank."""
        return f"server {self.command['address']}, rank {self.rank}"

    @property
    def device(self) -> torch.device:
        """Returns where messages arrive: the parameters' device, but for gloo the host."""
        gloo = self.command["backend"] == "gloo"
        return torch.device("cpu") if gloo else next(self.model.parameters()).device


def load(
    model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]
) -> Mapping[str, Any]:
    """Obeys one command; SGLang calls it on every rank. Returns the reply, which says whether
    parameters were written. Never raises."""
    order, reply, held.wrote = None, dict[str, Any](), False
    try:
        (name, memory), *_ = named_tensors
        command = json.loads(name)
        order = Order(command, memory, _mailbox(command), _rank(), model)
        reply = {"ok": True, **COMMANDS[command["do"]](order)}
    except BaseException as e:
        traceback.print_exc()
        reply = {"ok": False, "error": f"{type(e).__name__}: {e}"}
    reply["wrote"] = held.wrote
    try:
        if order is not None:
            order.box.put(order.place("reply"), json.dumps(reply).encode())
    except BaseException:  # the trainers are gone, and will miss the reply
        traceback.print_exc()
    return reply


def _mailbox(command: Mapping[str, Any]) -> Mailbox:
    """Connects to the trainers' store, which says within seconds that it is not there."""
    most = timedelta(seconds=min(CONNECT_TIMEOUT, command["timeout"]))
    store = dist.TCPStore(command["host"], command["port"], is_master=False, timeout=most)
    return Mailbox(store, command["session"], os.environ.get(TOKEN, ""))


def _rank() -> int:
    if "sglang" not in sys.modules:  # megarl's own server, which has one rank
        return 0
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)


def _finish(model: torch.nn.Module) -> None:
    """Recomputes what is derived from parameters. SGLang does it at the end of an update session
    only if nothing was loaded in it, and counts a custom loader as loading."""
    if "sglang" not in sys.modules:
        return
    from sglang.srt.model_loader.loader import post_load_weights

    post_load_weights(model)


# ---- the commands


def _record(order: Order) -> dict[str, Any]:
    """Replies the table, the one there is where it still holds."""
    spec = json.loads(zlib.decompress(order.box.take("spec")))
    table = held.table
    if table is None or held.spec != spec or table.digest != digest_of(order.model):
        held.table = None
        table = record(order.model, spec)
        held.table, held.spec, held.plan = table, spec, ("", None)
        held.dtypes = {name: getattr(torch, dtype) for name, _, dtype in spec}
    order.box.put(order.place("table"), zlib.compress(json.dumps(vars(table)).encode()))
    return {"entries": len(table.entries)}


def _join(order: Order) -> dict[str, Any]:
    """Leaves the group of before and enters a new one, in which this rank then meets the others.
    NCCL's calls for that do not return where one of them is gone, so a thread makes them, and this
    one waits no longer than the time or until the trainers give up."""
    _leave(order, abort=True)
    c = order.command
    senders = sorted({sender for messages in _plan(order)["rounds"] for sender, _ in messages})
    with _loopback_gloo(c["host"]), _independent_of_default_group(c["backend"]):
        group, _ = c10d._new_process_group_helper(
            c["world"],
            c["first"] + order.rank,
            [],
            dist.Backend(c["backend"]),
            # on its own connection, which a thread blocks while it waits for a value
            _mailbox(c).within("group", c["timeout"]),
            group_name=order.box.name("group"),  # type: ignore[arg-type]
            timeout=timedelta(seconds=c["group_timeout"]),
        )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(c["world"])}
    held.group = group
    until, met = time.monotonic() + c["timeout"], Future[None]()

    def meet() -> None:
        try:
            _meet(order, group, senders, until)
            met.set_result(None)
        except BaseException as e:
            met.set_exception(e)

    try:
        threading.Thread(target=meet, daemon=True).start()
        while not wait([met], LOOK_EVERY).done:
            if (why := order.box.stopped()) or time.monotonic() > until:
                raise RuntimeError(why or f"no word of all ranks, or of senders {senders}")
        met.result()
    except BaseException as e:
        _give_up(order, e)
        raise
    return {}


def _meet(order: Order, group: dist.ProcessGroup, senders: Sequence[int], until: float) -> None:
    """Exchanges something with all ranks, and takes a byte from each sender of the plan: NCCL wants
    the first use of a communicator to be everybody's, and connects two ranks at their first
    message."""
    if order.device.type == "cuda":
        torch.cuda.set_device(order.device)  # threads begin with device 0
    work = dist.all_reduce(torch.zeros(1, device=order.device), group=group, async_op=True)
    _wait(order, [work], until)
    greetings = [torch.empty(1, dtype=torch.uint8, device=order.device) for _ in senders]
    _wait(order, _listen(group, greetings, senders, 0), until)
    if order.device.type == "cuda":
        torch.cuda.synchronize(order.device)


def _holds(order: Order) -> dict[str, Any]:
    """Replies the name of the weights, None for others than trainers have sent."""
    return {"weights": held.weights.look(state(order.model))}


def _receive(order: Order) -> dict[str, Any]:
    """Takes the rounds of a plan; the messages of one are on their way while those of the one
    before are copied.

    A round: [[sender, slices], ...]. A slice: the number of an entry of the table, or where it is a
    part of one, [number, [[offset, shape, strides], ...]]. A plan can write into parameters alone.
    With "changes" in the command a head comes before every message (see messages.py), which may be
    changes of the weights named "base"; what is held afterwards has the name "id".
    """
    plan, until = _plan(order), time.monotonic() + order.command["timeout"]
    changes, here = order.command.get("changes"), held.weights.id
    if changes and changes["base"] not in (None, here):
        raise RuntimeError(f"these are changes to {changes['base']}, and {here} is held")
    held.weights.forget()
    params, received, peak = state(order.model), 0, 0
    under_way: deque[Any] = deque()
    try:
        with torch.no_grad():
            for number, messages in enumerate(plan["rounds"]):
                heads = _heads(order, messages, number, until) if changes else None
                under_way.append(_post(order, messages, number, heads))
                size = sum(b.numel() for b in under_way[-1][1])
                now = sum(b.numel() for _, buffers, _ in under_way for b in buffers)
                received, peak = received + size, max(peak, now)
                if len(under_way) > 1:
                    _land(params, under_way.popleft(), order, until)
            while under_way:
                _land(params, under_way.popleft(), order, until)
            _finish(order.model)
            held.wrote = True  # all of it, also where nothing has changed
            if changes and held.table is not None:
                held.weights.note(changes["id"], params, (e.param for e in held.table.entries))
    except BaseException as e:
        _give_up(order, e)
        raise
    if order.device.type == "cuda":
        torch.cuda.synchronize(order.device)
    return {"received": received, "peak": peak}


def _plan(order: Order) -> Any:
    """Returns this rank's part of the plan, which comes once a session. Raises RuntimeError where
    the parameters have become others."""
    session = order.command["session"]
    if held.plan[0] != session:
        raw = order.box.take(f"plan/{order.command['server']}/{order.rank}")
        held.plan = session, json.loads(zlib.decompress(raw))
    plan = held.plan[1]
    if plan["digest"] != digest_of(order.model):
        raise RuntimeError("the parameters have changed since their table was recorded")
    return plan


def _heads(order: Order, messages: Sequence[Any], number: int, until: float) -> list[list[int]]:
    """Returns the bytes and the chunks of each message of a round, when their heads are there."""
    kind = dict(dtype=torch.int64, device=order.device)
    heads = [torch.empty(HEAD, **kind) for _ in messages]  # type: ignore[call-overload]
    senders = [sender for sender, _ in messages]
    _wait(order, _listen(held.group, heads, senders, HEADS + number), until)
    return [head.tolist() for head in heads]


def _post(
    order: Order, messages: Sequence[Any], number: int, heads: Sequence[Sequence[int]] | None
) -> Any:
    """Starts to receive a round's messages, all at once."""
    assert held.table is not None, "record first"
    whole = [laid_out(slices, held.table.entries, held.dtypes) for _, slices in messages]
    heads = heads or [(n, 0) for n, _ in whole]
    parts, buffers = [], []
    for (n, views), (nbytes, chunks) in zip(whole, heads, strict=True):
        if not 0 <= nbytes <= n:
            raise ValueError(f"a message of {nbytes} bytes, which would be {n} whole")
        parts.append((views, chunks))
        buffers.append(torch.empty(nbytes, dtype=torch.uint8, device=order.device))
    senders = [sender for sender, _ in messages]
    return parts, buffers, _listen(held.group, buffers, senders, number)


def _listen(
    group: dist.ProcessGroup | None,
    buffers: Sequence[torch.Tensor],
    senders: Sequence[int],
    tag: int,
) -> list[Any]:
    """Starts to receive a buffer of each sender, where something is to come."""
    if group is None:
        raise RuntimeError("this server is in no group: connect again")
    ops = [
        dist.P2POp(dist.irecv, b, group=group, tag=tag, group_peer=sender)
        for b, sender in zip(buffers, senders, strict=True)
        if b.numel()
    ]
    return list(dist.batch_isend_irecv(ops)) if ops else []


def _land(params: Mapping[str, Any], posted: Any, order: Order, until: float) -> None:
    """Copies a round's messages into parameters when they are there."""
    parts, buffers, works = posted
    _wait(order, works, until)
    for buffer, (views, chunks) in zip(buffers, parts, strict=True):
        held.wrote |= buffer.numel() > 0
        land(params, views, buffer, chunks)


def _wait(order: Order, works: Sequence[Any], until: float) -> None:
    """Waits for messages. Trainers that give up close gloo's connections, which is an error here;
    NCCL would wait for ever, so that their word in the store is looked for."""
    look = time.monotonic() + LOOK_EVERY
    while order.command["backend"] != "gloo" and not all(w.is_completed() for w in works):
        time.sleep(POLL)
        if time.monotonic() > look:
            look = time.monotonic() + LOOK_EVERY
            if time.monotonic() > until or order.box.stopped():
                raise RuntimeError(order.box.stopped() or "a message never came")
    for work in works:
        work.wait(timedelta(seconds=max(0.001, until - time.monotonic())))


def _take(order: Order) -> dict[str, Any]:
    """Copies a round's messages, each of which begins at a multiple of ALIGN bytes. Replies whether
    it was the last round."""
    assert held.table is not None, "record first"
    rounds, number, start = _plan(order)["rounds"], order.command["round"], 0
    params = state(order.model)
    held.weights.forget()
    with torch.no_grad():
        for _, slices in rounds[number] if number < len(rounds) else ():
            nbytes, views = laid_out(slices, held.table.entries, held.dtypes)
            held.wrote = True
            land(params, views, order.memory[start : start + nbytes], 0)
            start += -(-nbytes // ALIGN) * ALIGN
        if order.command["last"]:
            _finish(order.model)
            held.wrote = True
    if order.memory.is_cuda:
        torch.cuda.synchronize(order.memory.device)  # then trainers write there again
    return {"received": start, "whole": order.command["last"]}


def _hash(order: Order) -> dict[str, Any]:
    """Replies the hashes of entries of the table, read back from the live parameters."""
    table, names = held.table, order.command.get("names")
    if table is None or table.digest != digest_of(order.model):
        raise RuntimeError("there is no table of these parameters: record first")
    params, hashes = state(order.model), []
    for e in (e for e in table.entries if names is None or e.tensor in names):
        view = params[e.param].as_strided(tuple(e.shape), tuple(e.strides), e.offset)
        extent = [stop - start for start, stop in zip(e.start, e.stop, strict=True)]
        hashes.append(tensor_hash(view.reshape(extent), e.start))
    numbers = torch.stack(hashes).tolist() if hashes else []
    order.box.put(order.place("hash"), zlib.compress(json.dumps(numbers).encode()))
    return {"entries": len(numbers)}


def _accept(order: Order) -> dict[str, Any]:
    return {}


def _leave(order: Order, *, abort: bool = False) -> dict[str, Any]:
    """Leaves the group, if there is one. abort: messages under way end with an error, also at the
    other ends: gloo closes a group's connections when an operation times out."""
    group, held.group = held.group, None
    if group is None:
        return {}
    if abort:
        group.abort()
        gloo = dist.get_backend(group) == dist.Backend.GLOO
        for peer in set(range(group.size())) - {group.rank()} if gloo else ():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))
    dist.destroy_process_group(group)
    return {}


def _give_up(order: Order, error: BaseException) -> None:
    """Tells everybody why, then closes this rank's connections."""
    with contextlib.suppress(Exception):  # the store may be gone
        order.box.stop(f"{order.who}: {type(error).__name__}: {error}")
    _leave(order, abort=True)


COMMANDS: Mapping[str, Callable[[Order], dict[str, Any]]] = {
    "record": _record,
    "join": _join,
    "holds": _holds,
    "receive": _receive,
    "take": _take,
    "hash": _hash,
    "accept": _accept,
    "leave": _leave,
}


# ---- groups beside SGLang's own


@contextlib.contextmanager
def _loopback_gloo(host: str) -> Iterator[None]:
    """Has gloo use the loopback interface for a group on one machine; it would resolve the host
    name, which containers often cannot."""
    name = "GLOO_SOCKET_IFNAME"
    if host not in ("127.0.0.1", "localhost", "::1") or name in os.environ:
        yield
        return
    os.environ[name] = "lo"
    try:
        yield
    finally:
        del os.environ[name]


@contextlib.contextmanager
def _independent_of_default_group(backend: str) -> Iterator[None]:
    """Hides the default group's device inside: torch would make an NCCL group by splitting that
    one, and wait for all its ranks."""
    default = dist.group.WORLD if dist.is_initialized() and backend == "nccl" else None
    bound = default.bound_device_id if default is not None else None
    if default is None or bound is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound
