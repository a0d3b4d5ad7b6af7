"""Defines what travels between the controller and a worker.

A call is a function with its arguments, pickled. What stays on workers (objects, batches, tokens)
travels in it as a reference, in both directions. A batch travels beside it as names and keys: a key
stands for values that never change, which a worker gets once.

B rows of a batch.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.api.tokens import Home
from megarl.rpc.link import Pickler

# verbs of a worker: a call, rows of tokens as bytes, the number of a signal that came, what is held
CALL, READ, STOP, SIZES = "call", "read", "stop", "sizes"


@dataclass(frozen=True)
class Field:
    """Describes a per-token field: the key under which workers hold its values, its dtype and the
    shape of one token's values."""

    key: str
    dtype: torch.dtype
    inner: tuple[int, ...]

    @property
    def token_bytes(self) -> int:
        """Returns the bytes of one token's values."""
        return self.dtype.itemsize * math.prod(self.inner)


class Peer(NamedTuple):
    """Names a worker, like "trainers/3", and its address, host:port."""

    name: str
    address: str


class Rows(NamedTuple):
    """Asks a worker of `group` for rows of the fields `keys`: the values of the first, row after
    row, then those of the next."""

    group: str
    keys: tuple[str, ...]
    rows: Tensor


@dataclass(frozen=True)
class Source:
    """Says where values lie: on `peers`, in their order, which hold them in the name of `group`,
    each the rows that `home` says."""

    group: str
    peers: tuple[Peer, ...]
    home: Home


@dataclass(kw_only=True)
class BatchState:
    """Tells workers what a batch is for a call.

    lengths:     [B], where they may not have the batch.
    minibatches: as in Batch.
    samples:     the keys of per-sample fields, by name.
    values:      those that they may not have, by key.
    tokens:      per-token fields, by name; sources: by key, where those are that they may not have.
    """

    lengths: Tensor | None
    minibatches: list[list[int]] | None
    samples: dict[str, str] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, Field] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class BatchChange:
    """Tells the controller what a call has made of a batch: fields that were set, with their keys
    (samples: and values), fields that were removed, and the home, where it is another. lengths: of
    a batch that the group had not told of. minibatches, placed: as in Batch."""

    lengths: Tensor | None
    minibatches: list[list[int]] | None
    placed: bool
    home: Home | None
    samples: dict[str, tuple[str, Tensor]]
    tokens: dict[str, Field]
    removed: tuple[str, ...]


class Call(NamedTuple):
    """Asks the workers of a group for one call.

    number:  counts the controller's calls; what a call makes is named after it.
    group:   the name under which the group's workers hold batches; members: their names, in order.
    body:    the packed (function, args, kwargs).
    batches: the batches among the arguments, by id.
    dropped: ids and keys that the controller needs no more.
    scope:   the id of the World inside of which the call is made, None for all ranks.
    keep:    whether the result stays on the workers even where it is plain data.
    each:    whether every worker sends its result, not the first alone.
    """

    number: int
    group: str
    members: tuple[str, ...]
    body: bytes
    batches: dict[str, BatchState]
    dropped: tuple[str, ...] = ()
    scope: str | None = None
    keep: bool = False
    each: bool = False


class Reply(NamedTuple):
    """Answers a Call: the result, packed unless it is a number, a text or a dict of these, and what
    the call has made of its batches, and of new ones."""

    result: Any
    packed: bool
    batches: dict[str, BatchChange]


@dataclass(frozen=True)
class Raised:
    """Is the result of a call that raised an error which the controller raises as it is."""

    error: Exception


@dataclass(frozen=True)
class Ref:
    """Stands in a body for what stays on workers. kind: "object", "batch" or "tokens"; `about` says
    what the other side needs to know of it."""

    kind: str
    id: str
    about: Any = None


class _Pickler(Pickler):
    """Pickles data as it is, and what `refer` knows as references."""

    def __init__(self, file: io.BytesIO, refer: Callable[[Any], Ref | None]) -> None:
        super().__init__(file, protocol=5)
        self._refer = refer

    def persistent_id(self, obj: Any) -> Ref | None:
        """Returns the reference that stands for `obj`, None to pickle it."""
        return self._refer(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, resolve: Callable[[Ref], Any]) -> None:
        super().__init__(file)
        self._resolve = resolve

    def persistent_load(self, pid: Any) -> Any:
        return self._resolve(pid)


def pack_body(value: Any, refer: Callable[[Any], Ref | None]) -> bytes:
    """Returns `value` pickled; `refer` returns the reference for what is not to be pickled, None
    for everything else."""
    out = io.BytesIO()
    _Pickler(out, refer).dump(value)
    return out.getvalue()


def unpack_body(body: bytes, resolve: Callable[[Ref], Any]) -> Any:
    """Returns what `pack_body` pickled, with `resolve(reference)` in place of each reference. The
    body must come from this job: unpickling runs what it says."""
    return _Unpickler(io.BytesIO(body), resolve).load()
