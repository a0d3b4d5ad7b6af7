"""Is what a worker process of the controller serves: calls on its main thread, and rows of tokens
to other workers meanwhile. `serve` is named to megarl.rpc, which makes the process."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import is_dataclass
from itertools import count
from pathlib import PurePath
from pickle import PickleBuffer
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.api.batch import Batch
from megarl.api.records import ServersLost
from megarl.api.tokens import Comm, Home, Tokens
from megarl.controller.group import invoke
from megarl.controller.messages import (
    CALL,
    READ,
    SIZES,
    STOP,
    Call,
    Field,
    Peer,
    Raised,
    Ref,
    Reply,
    Rows,
    pack_body,
    unpack_body,
)
from megarl.controller.store import Fetch, Store
from megarl.observability.timeline import phase
from megarl.parallel import exchange  # noqa: F401  a Batch of several ranks travels by it
from megarl.parallel.worlds import waiting_for
from megarl.rpc.link import Link, connect
from megarl.rpc.worker import on_main_thread
from megarl.utils import stopping
from megarl.utils.files import DiskFull
from megarl.utils.stopping import StopRequested

SERVE = "megarl.controller.worker:serve"
PULL_TIMEOUT = 600.0  # seconds in which another worker sends the rows of one request
# errors that somebody on the controller catches
RAISED = (StopRequested, DiskFull, ServersLost)
_PLAIN = {type(None), bool, int, float, str}
_DATA = (
    type(None),
    *(bool, int, float, complex, str, bytes, bytearray, slice, range, type, enum.Enum, PurePath),
    *(Tensor, torch.dtype, torch.device, torch.Size, np.ndarray, np.generic, BaseException),
)


def serve(index: int, count: int, options: Mapping[str, Any]) -> ControlledWorker:
    """Returns what worker `index` serves. options: {"group": the group's name}."""
    return ControlledWorker(f"{options['group']}/{index}")


class Peers:
    """Reads from other workers; a link stays open for the next time."""

    def __init__(self) -> None:
        self._links: dict[Peer, Link] = {}

    def fetch(self, peer: Peer, asked: Rows) -> bytearray:
        """Returns the bytes that a worker has for some rows. Raises RemoteError with its error,
        RpcError where it is gone, TimeoutError after PULL_TIMEOUT."""
        if peer not in self._links:
            self._links[peer] = connect(peer.address, peer.name)
        rows: bytearray = self._links[peer].call(READ, asked, PULL_TIMEOUT)
        return rows

    def close(self) -> None:
        """Closes the links."""
        for link in self._links.values():
            link.close()


class ControlledWorker:
    """Serves calls, on the process's main thread, in the order in which they came, and reads
    meanwhile."""

    def __init__(self, name: str) -> None:
        self._peers = Peers()
        self._calls = Calls(name, self._peers.fetch)

    def handle(self, verb: str, payload: Any) -> Any:
        """Returns what a call made, or what is held. READ is answered at once, with the bytes of
        rows. STOP notes at once that the signal of this number asks the run to stop: a call that
        runs may be waiting for answers."""
        if verb == READ:
            return PickleBuffer(self._calls.store.read(payload))
        if verb == STOP:
            return stopping.note(payload)
        return on_main_thread(self._calls.handle, verb, payload)

    def close(self) -> None:
        """Closes the links to other workers."""
        self._peers.close()


class Calls:
    """Makes calls with what a worker holds."""

    def __init__(
        self, name: str, fetch: Fetch, comm: Callable[[], Comm | None] | None = None
    ) -> None:
        """Takes what a Store takes."""
        self.store = Store(name, fetch, comm)

    def handle(self, verb: str, payload: Any) -> Any:
        """Returns the answer to a request. Raises what the call raises, ValueError for a verb that
        there is none of."""
        if verb == CALL:
            return self.call(payload)
        if verb == SIZES:
            return self.store.sizes()
        raise ValueError(f"a worker of the controller knows no {verb!r}")

    def call(self, call: Call) -> Reply | None:
        """Makes a call and returns its answer, None where another worker's counts."""
        store, group = self.store, call.group
        for name in call.dropped:
            store.drop(group, name)
        rank = call.members.index(store.name)
        scope = self.store.objects[call.scope].scope() if call.scope else nullcontext()
        with scope:
            for id, state in call.batches.items():
                store.receive(group, id, state, rank, len(call.members))
            try:
                fn, args, kwargs = unpack_body(call.body, lambda ref: store.resolve(group, ref))
                with phase(name := _named(fn, args)), waiting_for(None, name):
                    result = fn(*args, **kwargs)
            except RAISED as e:
                result = Raised(e)
            reply = _Answer(store, call).of(result)
        return reply if rank == 0 or call.each else None


class _Answer:
    """Makes the answer to one call: what stays here gets a name that is the same on all workers."""

    def __init__(self, store: Store, call: Call) -> None:
        self._store, self._call = store, call
        self._new = (f"{call.number}.{i}" for i in count())
        self._ids = list(call.batches)
        self._homes: dict[str, Home] = {}  # of tokens that stand in no batch

    def of(self, result: Any) -> Reply:
        """Returns the answer for what the function returned."""
        packed = self._call.keep or not _is_plain(result)
        raised = isinstance(result, Raised)
        if packed and not raised and (self._call.keep or not _is_data(result)):
            result = self._kept(result)
        # first, so that tokens which stand in a batch now are known by their keys there
        group, store = self._call.group, self._store
        changes = {id: store.changes(group, id, self._new) for id in self._ids}
        body = pack_body(result, self._refer) if packed else result
        new_ids = self._ids[len(changes) :]
        changes |= {id: store.changes(group, id, self._new) for id in new_ids}
        return Reply(body, packed, changes)

    def _kept(self, result: Any) -> Ref:
        id = self._store.object_id(result)
        if id is None:
            self._store.objects[id := next(self._new)] = result
        return Ref("object", id, (type(result).__qualname__, _methods(type(result))))

    def _refer(self, value: Any) -> Ref | None:
        """Returns what stands for a value that stays here, None for what travels."""
        if isinstance(value, Ref):
            return value
        if isinstance(value, Batch):
            return self._batch(value)
        if isinstance(value, Tokens):
            return self._tokens(value)
        if isinstance(value, _DATA) or not hasattr(value, "__dict__") or callable(value):
            return None
        id = self._store.object_id(value)
        return None if id is None else self._kept(value)

    def _batch(self, value: Batch) -> Ref:
        id = self._store.batch_id(self._call.group, value)
        if id is None:
            self._store.adopt(self._call.group, id := next(self._new), value)
            self._ids.append(id)
        return Ref("batch", id)

    def _tokens(self, value: Tokens) -> Ref:
        """Tokens are taken for those of the first batch of the call whose held rows they fit."""
        group = self._call.group
        key = self._store.tokens_key(group, value)
        if key is None:
            key = next(self._new)
            for id in self._ids:
                batch = self._store.resolve(group, Ref("batch", id))
                if torch.equal(batch.lengths[batch.rows], value.lengths):
                    self._store.keep(group, key, value, batch.rows)
                    break
            else:
                why = "a call returned Tokens that fit no batch among its arguments"
                raise ValueError(f"{why}: return plain tensors, or a Batch")
            self._homes[key] = batch.home
        field = Field(key, value.values.dtype, tuple(value.values.shape[1:]))
        return Ref("tokens", key, (field, self._homes.get(key)))


def _named(fn: Callable[..., Any], args: Sequence[Any]) -> str:
    """Returns how a call is shown: "MegatronActor.ppo_update", "rollout_metrics"."""
    if fn is invoke:
        return f"{type(args[0]).__name__}.{args[1]}"
    return getattr(fn, "__name__", type(fn).__name__)


def _methods(cls: type) -> frozenset[str]:
    """Returns the names of the public methods of a class."""
    return frozenset(n for n in dir(cls) if n[0] != "_" and callable(getattr(cls, n, None)))


def _is_plain(value: Any) -> bool:
    """Returns whether a result is a number, a text or a dict of these, without handles."""
    values = (*value, *value.values()) if type(value) is dict else (value,)
    return all(type(one) in _PLAIN for one in values)


def _is_data(value: Any) -> bool:
    """Returns whether a result is plain data, which comes to the controller."""
    if isinstance(value, Mapping):
        return all(map(_is_data, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_data, value))
    known = isinstance(value, (*_DATA, Batch, Tokens, Ref))
    return known or (is_dataclass(value) and not isinstance(value, type))
