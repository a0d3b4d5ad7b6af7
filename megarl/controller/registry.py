"""Answers calls on a worker: holds the objects that calls leave there, and finds what calls name.

call   a function with its arguments, on the main thread, in the order in which calls came
sizes  how much is held, for whoever asks
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from itertools import count
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.api.batch import Batch
from megarl.api.records import ServersLost
from megarl.api.tokens import Comm, Home, Tokens, as_bytes
from megarl.controller.messages import (
    CALL,
    SIZES,
    BatchState,
    Call,
    Field,
    Raised,
    Ref,
    Reply,
    pack,
    unpack,
)
from megarl.controller.remote import invoke
from megarl.controller.shelf import Fetch, Shelf
from megarl.observability.timers import shown
from megarl.utils.files import DiskFull
from megarl.utils.stopping import StopRequested
from megarl.utils.unanswered import is_unanswered

_DATA = (
    type(None),
    *(bool, int, float, complex, str, bytes, bytearray, slice, range, type, enum.Enum, PurePath),
    *(Tensor, torch.dtype, torch.device, torch.Size, np.ndarray, np.generic, BaseException),
)


# errors that somebody on the controller catches
RAISED = (StopRequested, DiskFull, ServersLost)


class Registry:
    """Holds a worker's objects by id, and makes calls with them."""

    def __init__(
        self, name: str, fetch: Fetch, comm: Callable[[], Comm | None] | None = None
    ) -> None:
        """Takes what a Shelf takes."""
        self.shelf = Shelf(name, fetch, comm)
        self._objects: dict[str, Any] = {}

    def handle(self, verb: str, payload: Any) -> Any:
        """Returns the answer to a request. Raises what the call raises, ValueError for a verb that
        there is none of."""
        if verb == CALL:
            return self.call(payload)
        if verb == SIZES:
            return {"objects": len(self._objects), **self.shelf.sizes()}
        raise ValueError(f"a worker of the controller knows no {verb!r}")

    def call(self, call: Call) -> Reply:
        """Makes a call and returns its answer."""
        for name in call.dropped:
            self._objects.pop(name, None)
            self.shelf.drop(call.group, name)
        rank = [peer.name for peer in call.members].index(self.shelf.name)
        with self._scope(call):
            for id, state in call.batches.items():
                self.shelf.receive(call.group, id, state, rank, len(call.members))
            try:
                for body in (*call.told, call.body):
                    fn, args, kwargs = unpack(body, lambda ref: self._found(call.group, ref))
                    with shown(_named(fn, args)):
                        result = fn(*args, **kwargs)
            except RAISED as e:
                result = Raised(e)
            return _Answer(self, call, first=rank == 0).of(result)

    @contextlib.contextmanager
    def _scope(self, call: Call) -> Iterator[None]:
        if call.scope is None:
            yield
            return
        with self._objects[call.scope].scope():
            yield

    def _found(self, group: str, ref: Ref) -> Any:
        try:
            match ref.kind:
                case "object":
                    return self._objects[ref.id]
                case "batch":
                    return self.shelf.batch(group, ref.id)
                case _:
                    return self.shelf.tokens(group, ref.id)
        except KeyError as e:
            raise KeyError(
                f"the {ref.kind} {ref.id} is not on this worker: use it with the group that made it"
            ) from e

    def put(self, id: str, value: Any) -> None:
        """Holds an object under an id."""
        self._objects[id] = value

    def id_of(self, value: Any) -> str | None:
        """Returns the id of an object that is held here, None for any other."""
        return next((id for id, held in self._objects.items() if held is value), None)


class _Answer:
    """Makes the answer to one call: what stays here gets a name that is the same on all workers."""

    def __init__(self, registry: Registry, call: Call, *, first: bool) -> None:
        self._registry, self._shelf, self._call = registry, registry.shelf, call
        self._first = first
        self._new = (f"{call.number}.{i}" for i in count())
        self._ids = list(call.batches)
        self._kinds: list[str] = []
        self._homes: dict[str, Home] = {}  # of tokens that stand in no batch

    def of(self, result: Any) -> Reply:
        """Returns the answer for what the function returned."""
        if isinstance(result, Raised):
            self._kinds.append(f"raised {type(result.error).__name__}")
        elif self._call.keep or not _is_data(result):
            result = self._kept(result)
        # first, so that tokens which stand in a batch now are known by their keys there
        batches = {id: self._changes(id) for id in self._ids}
        body = pack(result, self._refer)
        for id in self._ids[len(batches) :]:
            batches[id] = self._changes(id)
            batches[id].lengths = self._shelf.batch(self._call.group, id).lengths
        digest = _digest(batches, self._kinds)
        if self._first or self._call.each:
            return Reply(body=body, batches=batches, digest=digest)
        return Reply(body=b"", batches={}, digest=digest)

    def _changes(self, id: str) -> BatchState:
        return self._shelf.changes(self._call.group, id, self._new)

    def _kept(self, result: Any) -> Ref:
        id = self._registry.id_of(result)
        if id is None:
            self._registry.put(id := next(self._new), result)
        self._kinds.append(f"object {id}")
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
        id = self._registry.id_of(value)
        return None if id is None else self._kept(value)

    def _batch(self, value: Batch) -> Ref:
        id = self._shelf.id_of(self._call.group, value)
        if id is None:
            self._shelf.adopt(self._call.group, id := next(self._new), value)
            self._ids.append(id)
        self._kinds.append(f"batch {id}")
        return Ref("batch", id)

    def _tokens(self, value: Tokens) -> Ref:
        """Tokens are taken for those of the first batch of the call whose held rows they fit."""
        group = self._call.group
        key = self._shelf.key_of(group, value)
        if key is None:
            key = next(self._new)
            for id in self._ids:
                batch = self._shelf.batch(group, id)
                if torch.equal(batch.lengths[batch.rows], value.lengths):
                    self._shelf.keep(group, key, value, batch.rows)
                    break
            else:
                raise ValueError(
                    "a call returned Tokens that fit no batch among its arguments: return plain "
                    "tensors, or a Batch"
                )
            self._homes[key] = batch.home
        self._kinds.append(f"tokens {key}")
        field = Field(key, value.values.dtype, tuple(value.values.shape[1:]))
        return Ref("tokens", key, (field, self._homes.get(key)))


def _named(fn: Callable[..., Any], args: Sequence[Any]) -> str:
    """Returns how a call is shown: "MegatronActor.ppo_update", "rollout_metrics"."""
    if fn is invoke:
        return f"{type(args[0]).__name__}.{args[1]}"
    return getattr(fn, "__name__", type(fn).__name__)


def _methods(cls: type) -> dict[str, bool]:
    """Returns the public methods of a class, and whether each is unanswered."""
    found = {name: getattr(cls, name, None) for name in dir(cls) if name[0] != "_"}
    return {name: is_unanswered(method) for name, method in found.items() if callable(method)}


def _is_data(value: Any) -> bool:
    """Returns whether a result is plain data, which comes to the controller."""
    if isinstance(value, Mapping):
        return all(map(_is_data, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_data, value))
    known = isinstance(value, (*_DATA, Batch, Tokens, Ref))
    return known or (is_dataclass(value) and not isinstance(value, type))


def _digest(batches: Mapping[str, BatchState], kinds: list[str]) -> str:
    """Returns a digest of what every worker must say alike: the names of what stays, and what the
    controller is told of batches."""
    out = hashlib.sha256(repr(kinds).encode())
    for id, state in sorted(batches.items()):
        told = [id, state.removed, state.per_token, state.placed, state.minibatches]
        out.update(repr(told).encode())
        tensors = [*state.per_sample.items(), ("home", state.home.of_row if state.home else None)]
        for name, values in tensors:
            if values is not None:
                out.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
                out.update(as_bytes(values.detach().cpu()).numpy().tobytes())
    return out.hexdigest()
