"""Calls the workers of a group as one; a Remote is an object that lives on all of them.

Groups over the same workers send their calls one after the other, so every worker sees calls in the
same order, and collectives of groups that overlap never cross.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from megarl.api.failures import OtherRankFailed
from megarl.controller.batch import RemoteBatch, RemoteTokens, Sample, numbers
from megarl.controller.messages import (
    CALL,
    READ,
    BatchChange,
    Call,
    Peer,
    Raised,
    Ref,
    Reply,
    Rows,
    pack_body,
    unpack_body,
)
from megarl.parallel.worlds import World, init_distributed
from megarl.rpc.errors import RemoteError
from megarl.rpc.link import Link, pack
from megarl.rpc.worker import Worker
from megarl.utils.http import settle

T = TypeVar("T")
# seconds in which other workers' errors follow the first: they may be its reason, or the same
GRACE, SOON = 10.0, 0.5
READ_TIMEOUT = 600.0  # seconds in which a worker sends the rows of one request
# the batches of a call by id, with what its workers have of them now
Sent = dict[str, tuple[RemoteBatch, list[Sample | RemoteTokens]]]


class Pending:
    """Stands for a call under way. Its result is taken by whoever asks first."""

    def __init__(
        self,
        what: str,
        workers: Sequence[Worker],
        replies: Sequence[Future[Any]],
        take: Callable[[list[Any]], Any],
    ) -> None:
        self.what, self._workers, self._replies, self._take = what, workers, replies, take
        self._lock, self._taken = threading.RLock(), Future[Any]()
        self._errors: dict[int, BaseException] = {}
        self._left = len(replies)
        # ends with the answers, or an error; for concurrent.futures.wait
        self.future: Future[list[Any]] = Future()
        for rank, reply in enumerate(replies):
            reply.add_done_callback(partial(self._came, rank))

    def done(self) -> bool:
        """Returns whether `result` would not wait."""
        return self.future.done()

    def result(self, timeout: float | None = None) -> Any:
        """Returns the first worker's result, after a wait of at most `timeout` s (TimeoutError).
        Raises the error of the first worker that failed for a reason of its own."""
        replies = self.future.result(timeout)
        with self._lock:
            if not self._taken.done():
                settle(self._taken, self._take, replies)
        return self._taken.result()

    def wait(self) -> None:
        """Waits for the result, and takes it; its error is for whoever asks for it."""
        with contextlib.suppress(Exception):
            self.result()

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
    """Returns whether a worker failed for a reason of its own, not for another's failure."""
    return not (isinstance(error, RemoteError) and error.kind == OtherRankFailed.__name__)


def invoke(target: Any, verb: str, /, *args: Any, **kwargs: Any) -> Any:
    """Returns `target.verb(*args, **kwargs)`; what a method call on a Remote sends."""
    return getattr(target, verb)(*args, **kwargs)


class Remote:
    """Passes on what is done with it to the object on the workers: a method is called on all of
    them, and returns the first one's result (see WorkerGroup); an attribute is read on all of them,
    or set. `remote.later.method(...)` returns the call under way, a Pending. The object is freed
    when its last Remote is gone."""

    def __init__(self, group: WorkerGroup, id: str, kind: str, methods: Collection[str]) -> None:
        """Takes the group, the object's id there, the name of its class, and its methods."""
        self._group, self._id, self._kind, self._methods = group, id, kind, methods
        group.own(id, self)

    def ref(self, group: WorkerGroup) -> Ref:
        """Returns what names the object to the workers of `group`. Raises ValueError where they
        do not have it."""
        if not set(group.peers) <= set(self._group.peers):
            why = f"lives on the workers of {self._group.name}, and {group.name} has others"
            raise ValueError(f"this {self._kind} {why}: an object is used where it was made")
        return Ref("object", self._id)

    @property
    def later(self) -> Any:
        """Returns what calls methods without waiting for them."""
        return _Later(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{name!r} of a remote {self._kind}: only public names travel")
        if name not in self._methods:
            return self._group.call(getattr, self, name)
        later = getattr(self.later, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            return later(*args, **kwargs).result()

        method.__name__ = name
        return method

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            self._group.call(setattr, self, name, value)

    def __repr__(self) -> str:
        return f"<remote {self._kind} {self._id} on {self._group.name}>"


class _Later:
    """Calls the methods of a Remote without waiting for them."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def __getattr__(self, name: str) -> Callable[..., Pending]:
        def method(*args: Any, **kwargs: Any) -> Pending:
            return self._remote._group.submit(invoke, (self._remote, name, *args), kwargs)

        return method


class _Order:
    """Is what groups over the same workers share: the order of their calls, and the last call that
    failed."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.failed: Pending | None = None


HANDLES = (Remote, RemoteBatch, RemoteTokens)


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
        clients: Sequence[Link],
        *,
        order: _Order | None = None,
        world: Any = None,
    ) -> None:
        """Takes a name without "/" and ",", the workers and a client for each. order, world: see
        `on`."""
        self.name, self.workers, self.clients = name, tuple(workers), tuple(clients)
        self.peers = tuple(Peer(w.name, w.address) for w in workers)
        self._members = tuple(worker.name for worker in workers)
        self._order, self.world = order or _Order(), world
        self._handles: dict[str, weakref.ref[Any]] = {}  # of what the workers hold, by id
        self._parts: dict[tuple[int, ...], WorkerGroup] = {}

    def __len__(self) -> int:
        """Returns the number of workers."""
        return len(self.workers)

    def on(self, ranks: Sequence[int]) -> WorkerGroup:
        """Returns the group of some of the workers, `ranks` of torch's. Its calls are made in the
        scope of a World of theirs, so what is made there knows no other ranks. Raises ValueError
        for a group that is such a part itself, the workers' error for ranks that are not there."""
        if self.world is not None:
            raise ValueError(f"{self.name} is a part already: take another part of the whole group")
        part = tuple(ranks)
        if part not in self._parts:
            world = self.call(make_world, part)  # refuses ranks that are not there
            self._parts[part] = WorkerGroup(
                f"{self.name}.{'-'.join(map(str, part))}",
                [self.workers[rank] for rank in part],
                [self.clients[rank] for rank in part],
                order=self._order,
                world=world,
            )
        return self._parts[part]

    # -- calls

    def call(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Returns `fn(*args, **kwargs)` of the first worker; all make the call. Raises the error of
        the first worker that failed for a reason of its own, with its name and traceback."""
        result: T = self.submit(fn, args, kwargs).result()
        return result

    def each(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Returns the plain results of all workers, in their order."""
        return self.submit(fn, args, kwargs, each=True).result()

    def put(self, value: Any) -> Any:
        """Returns a Remote of a copy of `value` that every worker has from now on."""
        return self.submit(same, (value,), {}, keep=True).result()

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
        found: dict[str, RemoteBatch] = {}
        body = pack_body((fn, tuple(args), kwargs), lambda value: self._refer(value, found))
        for batch in found.values():
            batch.wait_for(self, fields)
        with self._order.lock:
            number = next(numbers)
            states = {id: batch.state_for(self, fields) for id, batch in found.items()}
            call = Call(
                number=number,
                group=self.name,
                members=self._members,
                body=body,
                batches={id: state for id, (state, _) in states.items()},
                dropped=self._take_dropped(),
                scope=self.world.ref(self).id if self.world is not None else None,
                keep=keep,
                each=each,
            )
            message = pack(call)
            replies = [client.call_async(CALL, message) for client in self.clients]
            sent = {id: (found[id], handles) for id, (_, handles) in states.items()}
            what = getattr(fn, "__name__", repr(fn))
            pending = Pending(what, self.workers, replies, partial(self._take, call, sent))
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
            why = f"{', '.join(silent)} still wait for other workers in {failed.what}, which failed"
            fix = "end the job, and start it again from its newest checkpoint"
            raise RuntimeError(f"{why}: {fix}") from failed.future.exception()
        self._order.failed = None

    def _refer(self, value: Any, batches: dict[str, RemoteBatch]) -> Ref | None:
        if isinstance(value, RemoteBatch):
            batches[value.id] = value
        return value.ref(self) if isinstance(value, HANDLES) else None

    def read(self, peer: Peer, asked: Rows) -> bytearray:
        """Returns the bytes that one of the workers has for some rows."""
        rows: bytearray = self.clients[self.peers.index(peer)].call(READ, asked, READ_TIMEOUT)
        return rows

    # -- handles

    def own(self, id: str, handle: Any) -> None:
        """Has the workers free `id` when `handle`, from now on the one that counts, is gone."""
        self._handles[id] = weakref.ref(handle)

    def _take_dropped(self) -> tuple[str, ...]:
        """Returns the ids whose handles are gone."""
        dropped = [id for id, handle in list(self._handles.items()) if handle() is None]
        for id in dropped:
            del self._handles[id]
        return tuple(dropped)

    def _take(self, call: Call, sent: Sent, answers: list[Any]) -> Any:
        """Returns the result of a call; notes what it has made of the batches that were sent."""
        replies: list[Reply] = [answer for answer in answers if answer is not None]
        changes = replies[0].batches
        for id, (batch, handles) in sent.items():
            batch.learn(self, changes[id], call.number, handles)
        results = [self._result(reply, changes) for reply in replies]
        return results if call.each else results[0]

    def _result(self, reply: Reply, changes: dict[str, BatchChange]) -> Any:
        if not reply.packed:
            return reply.result
        result = unpack_body(reply.result, lambda ref: self._handle(ref, changes))
        if isinstance(result, Raised):
            raise result.error
        return result

    def _handle(self, ref: Ref, changes: dict[str, BatchChange]) -> Any:
        """Returns the handle of what stays on the workers: the one that there is, or a new one."""
        reference = self._handles.get(ref.id)
        if reference is not None and (handle := reference()) is not None:
            return handle
        if ref.kind == "object":
            return Remote(self, ref.id, *ref.about)
        if ref.kind == "batch":
            return RemoteBatch(self, ref.id, changes[ref.id])
        return RemoteTokens(ref.about[0], self, ref.about[1])


def same(value: Any) -> Any:
    """Returns `value`."""
    return value


def make_world(ranks: Sequence[int]) -> World:
    """Returns the World of some ranks; starts torch.distributed where nothing has. Collective."""
    init_distributed()
    return World(ranks)
