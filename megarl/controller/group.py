"""Calls the workers of a group as one.

Groups over the same workers send their calls one after the other, so every worker sees calls in the
same order, and collectives of groups that overlap never cross.
"""

from __future__ import annotations

import contextlib
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import count
from typing import Any

from megarl.api.scheduler import Caller, Worker
from megarl.controller.batch import RemoteBatch, RemoteTokens
from megarl.controller.messages import (
    CALL,
    READ,
    BatchState,
    Call,
    Peer,
    Raised,
    Ref,
    Reply,
    pack,
    unpack,
)
from megarl.controller.remote import Remote
from megarl.parallel.groups import init_distributed
from megarl.parallel.worlds import World
from megarl.rpc import link
from megarl.rpc.errors import RemoteError

# seconds in which other workers' errors follow the first: they may be its reason, or the same
GRACE, SOON = 10.0, 0.5
READ_TIMEOUT = 600.0  # seconds in which a worker sends the rows of one request
# errors of workers that lost another one, whose own error is the reason: torch's by their kind,
# gloo's and ours, which have none of their own, by how they begin or what they say
_OF_TORCH = ("DistBackendError", "DistNetworkError", "DistStoreError")
_LOST = re.compile(
    r"^\[\S*gloo\S*\]|gave up waiting for other ranks|waited for rank 0 to finish|"
    r"but another rank ended meanwhile|^rank \d+ waited in | failed on rank \d|^rank 0 failed in "
)


_numbers = count(1)  # of all calls of this process: what they make is named after them


class Pending:
    """Stands for a call under way. Its result is taken by whoever asks first."""

    def __init__(
        self,
        what: str,
        workers: Sequence[Worker],
        replies: Sequence[Future[Any]],
        take: Callable[[list[Reply]], Any],
    ) -> None:
        self.what, self._workers, self._replies, self._take = what, workers, replies, take
        self._lock, self.taken = threading.RLock(), False
        self._value: Any = None
        self._error: Exception | None = None
        self._earlier: list[Pending] = []
        self._left, self._errors = len(replies), dict[int, BaseException]()
        # ends with the answers, or an error; for concurrent.futures.wait
        self.future: Future[list[Reply]] = Future()
        for rank, reply in enumerate(replies):
            reply.add_done_callback(partial(self._came, rank))

    def done(self) -> bool:
        """Returns whether `result` would not wait."""
        return self.future.done()

    def failed(self) -> bool:
        """Returns whether `result` would raise the error of a worker at once."""
        return self.done() and self.future.exception() is not None

    def result(self, timeout: float | None = None) -> Any:
        """Returns the first worker's result, after a wait of at most `timeout` s (TimeoutError).
        Raises the error of the first worker that failed for a reason of its own."""
        replies = self.future.result(timeout)
        with self._lock:
            if not self.taken:
                self.taken = True
                self._take_in_order(replies)
            if self._error is not None:
                raise self._error
            return self._value

    def follows(self, earlier: Pending) -> None:
        """Has the result of an earlier call to the same workers be taken before this one's, in
        whatever order they are asked for: both tell of a batch."""
        if not earlier.taken:
            self._earlier.append(earlier)

    def _take_in_order(self, replies: list[Reply]) -> None:
        while self._earlier:
            with contextlib.suppress(Exception):  # for whoever asks for it
                self._earlier.pop().result()
        try:
            self._value = self._take(replies)
        except Exception as e:
            self._error = e

    def silent(self, timeout: float) -> list[str]:
        """Returns the names of the workers that have not answered after `timeout` s."""
        wait(self._replies, timeout)
        return [str(w) for w, r in zip(self._workers, self._replies) if not r.done()]

    def _came(self, rank: int, reply: Future[Any]) -> None:
        with self._lock:
            self._left -= 1
            if (error := reply.exception()) is not None:
                self._errors[rank] = error
                own = _is_own(error)
                if self._left and (own or len(self._errors) == 1):
                    timer = threading.Timer(SOON if own else GRACE, self._fail)
                    timer.daemon = True
                    timer.start()
            if not self._left and not self.future.done():
                if self._errors:
                    self._fail()
                else:
                    self.future.set_result([r.result() for r in self._replies])

    def _fail(self) -> None:
        with self._lock:
            if self.future.done():
                return
            own = [r for r, e in self._errors.items() if _is_own(e)]
            self.future.set_exception(self._errors[min(own or self._errors)])


def _is_own(error: BaseException) -> bool:
    """Returns whether a worker failed for a reason of its own, not for another's failure. Of one
    that died, the log may name anything."""
    if isinstance(error, RemoteError):
        kind, said = error.kind, error.text
    else:
        kind, said = type(error).__name__, str(error).partition("\n")[0]
    return kind not in _OF_TORCH and not (kind == "RuntimeError" and _LOST.search(said))


class _Order:
    """Is what groups over the same workers share: the order of their calls."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.failed: Pending | None = None
        # what goes with the teller's next call: bodies, and the arguments, which live until then
        self.told: list[tuple[bytes, Any]] = []
        self.teller: WorkerGroup | None = None

    def tell(self, teller: WorkerGroup, body: bytes, args: Any) -> bool:
        """Notes what goes with the teller's next call; returns False where another has to tell."""
        with self.lock:
            if self.teller not in (None, teller):
                return False
            self.told.append((body, args))
            self.teller = teller
            return True

    def take_told(self, caller: WorkerGroup) -> tuple[bytes, ...]:
        """Returns the bodies of what goes with a call that is made now."""
        if caller is not self.teller:
            return ()
        told, self.told, self.teller = self.told, [], None
        return tuple(body for body, _ in told)


class WorkerGroup:
    """Calls several workers as one: a call goes to all of them at once, and its result is the first
    one's.

    Arguments may hold Remotes, RemoteBatches and RemoteTokens; on the workers they are the real
    things. Of a result, plain data comes back; a Batch, Tokens or any other object stays on the
    workers and comes back as a handle. What the controller drops is freed with the next call.
    """

    def __init__(
        self,
        name: str,
        workers: Sequence[Worker],
        clients: Sequence[Caller],
        *,
        order: _Order | None = None,
        world: Any = None,
    ) -> None:
        """Takes a name without "/" and ",", the workers and a client for each. order, world: see
        `on`."""
        self.name, self.workers, self.clients = name, tuple(workers), tuple(clients)
        self.peers = tuple(Peer(w.name, w.address) for w in workers)
        self._order, self.world = order or _Order(), world
        self._handles: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._ends: dict[str, Any] = {}  # what notes that a handle is gone
        self._parts: dict[tuple[int, ...], WorkerGroup] = {}
        self._dropped: deque[str] = deque()

    def __len__(self) -> int:
        """Returns the number of workers."""
        return len(self.workers)

    def on(self, ranks: Sequence[int]) -> WorkerGroup:
        """Returns the group of some of the workers, `ranks` of torch's. Its calls are made in the
        scope of a World of theirs, so what is made there knows no other ranks. Raises ValueError
        for a group that is such a part itself, the workers' error for ranks that are not there."""
        if self.world is not None:
            raise ValueError(f"{self.name} is a part already: take another part of the whole group")
        if tuple(ranks) not in self._parts:
            world = self.call(make_world, list(ranks))
            self._parts[tuple(ranks)] = self._part(ranks, world)
        return self._parts[tuple(ranks)]

    def _part(self, ranks: Sequence[int], world: Any) -> WorkerGroup:
        return WorkerGroup(
            f"{self.name}.{'-'.join(map(str, ranks))}",
            [self.workers[rank] for rank in ranks],
            [self.clients[rank] for rank in ranks],
            order=self._order,
            world=world,
        )

    # -- calls

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns `fn(*args, **kwargs)` of the first worker; all make the call. Raises the error of
        the first worker that failed for a reason of its own, with its name and traceback."""
        return self.submit(fn, args, kwargs).result()

    def each(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Returns the plain results of all workers, in their order."""
        return self.submit(fn, args, kwargs, each=True).result()

    def put(self, value: Any) -> Any:
        """Returns a Remote of a copy of `value` that every worker has from now on."""
        return self.submit(_same, (value,), {}, keep=True).result()

    def tell(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Has all workers call `fn(*args, **kwargs)` right before the next call that is made to
        them, which raises its error, and is not made by a worker where it failed. Raises ValueError
        where a batch is among the arguments."""
        found: dict[str, RemoteBatch] = {}
        body = pack((fn, tuple(args), kwargs), lambda value: self._refer(value, found))
        if found:
            raise ValueError(
                "a method that is marked as unanswered got a batch, whose changes nobody would "
                "hear of: take the mark from the method"
            )
        told = False
        while not told:
            self._let_others_tell()
            told = self._order.tell(self, body, (args, kwargs))

    def _let_others_tell(self) -> None:
        """Makes the calls that another group over the same workers still has to tell."""
        if (teller := self._order.teller) is not None and teller is not self:
            teller.call(_same, None)

    def submit(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        fields: Sequence[str] | None = None,
        each: bool = False,
        keep: bool = False,
    ) -> Pending:
        """Starts a call and returns at once, but where a batch comes from a group that still works
        on it.

        fields: the per-token fields of batches that the call reads, None for all; others do not
        travel. each: the result is the list of all workers'. keep: the result stays on the workers
        even where it is plain data.
        """
        self._check_usable()
        self._let_others_tell()
        found: dict[str, RemoteBatch] = {}
        body = pack((fn, tuple(args), kwargs), lambda value: self._refer(value, found))
        for batch in found.values():
            batch.settle_sources(self, fields)
        with self._order.lock:
            number = next(_numbers)
            call = Call(
                number=number,
                group=self.name,
                members=self.peers,
                body=body,
                batches={id: batch.state_for(self, fields, number) for id, batch in found.items()},
                dropped=tuple(self._take_dropped()),
                told=self._order.take_told(self),
                scope=self.world.ref(self).id if self.world is not None else None,
                keep=keep,
                each=each,
            )
            packed = link.pack(call)
            replies = [client.call_async(CALL, packed) for client in self.clients]
            what = getattr(fn, "__name__", repr(fn))
            take = _Taker(self, found, each, number)
            pending = Pending(what, self.workers, replies, take)
        pending.future.add_done_callback(lambda future: self._ended(pending, future))
        for batch in found.values():
            batch.called(self, pending)
        return pending

    def _ended(self, pending: Pending, future: Future[Any]) -> None:
        if future.exception() is not None:
            self._order.failed = pending

    def _check_usable(self) -> None:
        """Raises RuntimeError where a call failed and some workers still wait for others in it."""
        failed = self._order.failed
        if failed is None:
            return
        if silent := failed.silent(GRACE):
            raise RuntimeError(
                f"{', '.join(silent)} still wait for other workers in {failed.what}, which failed: "
                "end the job, and start it again from its newest checkpoint"
            ) from failed.future.exception()
        self._order.failed = None

    def _refer(self, value: Any, batches: dict[str, RemoteBatch]) -> Ref | None:
        if isinstance(value, RemoteBatch):
            batches[value.id] = value
        known = isinstance(value, Remote | RemoteBatch | RemoteTokens)
        return value.ref(self) if known else None

    def read(self, peer: Peer, path: str) -> bytearray:
        """Returns the bytes that one of the workers serves at `path`."""
        rows: bytearray = self.clients[self.peers.index(peer)].call(READ, path, READ_TIMEOUT)
        return rows

    # -- handles

    def known(self, id: str) -> Any:
        """Returns the handle of an id, None where there is none."""
        return self._handles.get(id)

    def own(self, id: str, handle: Any) -> None:
        """Has the workers free `id` when `handle`, from now on the one that counts, is gone."""
        if (before := self._ends.pop(id, None)) is not None:
            before.detach()
        while id in self._dropped:  # it is not gone after all
            self._dropped.remove(id)
        self._handles[id] = handle
        self._ends[id] = weakref.finalize(handle, self._gone, id)
        self._ends[id].atexit = False

    def _gone(self, id: str) -> None:
        self._ends.pop(id, None)
        self._dropped.append(id)

    def _take_dropped(self) -> list[str]:
        return [self._dropped.popleft() for _ in range(len(self._dropped))]


class _Taker:
    """Turns the workers' answers to a call into its result."""

    def __init__(
        self, group: WorkerGroup, batches: dict[str, RemoteBatch], each: bool, number: int
    ) -> None:
        self.group, self.batches, self.each, self.number = group, batches, each, number
        self._new: Mapping[str, BatchState] = {}

    def __call__(self, replies: list[Reply]) -> Any:
        """Returns the result of the call. Raises RuntimeError where workers do not say the same of
        what has to be the same."""
        first, names = replies[0], [str(worker) for worker in self.group.workers]
        for name, reply in zip(names, replies, strict=True):
            if reply.digest != first.digest:
                raise RuntimeError(
                    f"workers {names[0]} and {name} do not have the same per-sample fields, names "
                    "of fields or rows after a call: a verb must leave them alike on every rank"
                )
        self._new = first.batches
        for id, batch in self.batches.items():
            batch.learn(self.group, first.batches[id], self.number)
        if self.each:
            return [unpack(reply.body, self._found) for reply in replies]
        result = unpack(first.body, self._found)
        if isinstance(result, Raised):
            raise result.error
        return result

    def _found(self, ref: Ref) -> Any:
        """Returns the handle of what stays on the workers: the one that there is, or a new one."""
        group = self.group
        if (handle := group.known(ref.id)) is not None:
            return handle
        if ref.kind == "object":
            return Remote(group, ref.id, *ref.about)
        if ref.kind == "batch":
            return RemoteBatch(group, ref.id, self._new[ref.id])
        return RemoteTokens(ref.about[0], group, ref.about[1])


def _same(value: Any) -> Any:
    return value


def make_world(ranks: Sequence[int]) -> World:
    """Returns the World of some ranks; starts torch.distributed where nothing has. Collective."""
    init_distributed()
    return World(ranks)
