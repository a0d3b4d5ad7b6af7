"""Defines what travels between the controller and a worker.

A call is a function with its arguments, pickled. What stays on workers (objects, batches, tokens)
travels in it as a reference, in both directions. Metadata of batches travels beside it: the
per-sample fields that the other side has not seen, and the names and keys of per-token fields.

B rows of a batch.
"""

from __future__ import annotations

import base64
import io
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from megarl.api.tokens import Home

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


@dataclass(frozen=True)
class Source:
    """Says where values lie: on `peers`, in their order, which hold them in the name of `group`,
    each the rows that `home` says."""

    group: str
    peers: tuple[Peer, ...]
    home: Home


@dataclass(kw_only=True)
class BatchState:
    """Tells the other side of a call about a batch.

    lengths:    [B], for a side that has not seen the batch.
    per_sample: the fields that the other side has not seen, or has in another state.
    per_token:  the same of per-token fields.
    removed:    names of fields that are gone.
    sources:    by key, where a worker gets values that it lacks.
    home, placed, minibatches: as in Batch; of a worker's answer.
    """

    lengths: Tensor | None = None
    per_sample: dict[str, Tensor] = field(default_factory=dict)
    per_token: dict[str, Field] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    sources: dict[str, Source] = field(default_factory=dict)
    home: Home | None = None
    placed: bool = False
    minibatches: list[list[int]] | None = None


@dataclass(frozen=True, kw_only=True)
class Call:
    """Asks the workers of a group for one call.

    number:  counts the controller's calls; what a call makes is named after it.
    group:   the name under which the group's workers hold batches; members: they, in their order.
    body:    the pickled (function, args, kwargs).
    told:    the same of what is called first, and whose results nobody wants.
    batches: what is new about the batches among the arguments, by id.
    dropped: ids and keys that the controller needs no more.
    scope:   the id of the World inside of which the call is made, None for all ranks.
    keep:    whether the result stays on the workers even where it is plain data.
    each:    whether every worker sends its result, not the first alone.
    """

    number: int
    group: str
    members: tuple[Peer, ...]
    body: bytes
    batches: dict[str, BatchState]
    told: tuple[bytes, ...] = ()
    dropped: tuple[str, ...] = ()
    scope: str | None = None
    keep: bool = False
    each: bool = False


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Answers a Call: the pickled result, what changed in its batches and what new batches are, and
    a digest of what has to be the same on every worker."""

    body: bytes
    batches: dict[str, BatchState]
    digest: str


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


class _Pickler(cloudpickle.Pickler):
    """Pickles data as it is, and what `refer` knows as references."""

    def __init__(self, file: io.BytesIO, refer: Callable[[Any], Ref | None]) -> None:
        super().__init__(file)
        self._refer = refer

    def persistent_id(self, obj: Any) -> Ref | None:
        """Returns the reference that stands for `obj`, None to pickle it."""
        return self._refer(obj)

    def reducer_override(self, obj: Any) -> Any:
        """Has tensors travel in host memory, without what lies beside them in their storage."""
        if isinstance(obj, Tensor):
            plain = obj.detach().cpu()
            if plain.untyped_storage().nbytes() != plain.numel() * plain.element_size():
                plain = plain.clone()
            return plain.__reduce_ex__(2)
        return super().reducer_override(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, resolve: Callable[[Ref], Any]) -> None:
        super().__init__(file)
        self._resolve = resolve

    def persistent_load(self, pid: Any) -> Any:
        return self._resolve(pid)


def pack(value: Any, refer: Callable[[Any], Ref | None]) -> bytes:
    """Returns `value` pickled; `refer` returns the reference for what is not to be pickled, None
    for everything else."""
    out = io.BytesIO()
    _Pickler(out, refer).dump(value)
    return out.getvalue()


def unpack(body: bytes, resolve: Callable[[Ref], Any]) -> Any:
    """Returns what `pack` pickled, with `resolve(reference)` in place of each reference. The body
    must come from this job: unpickling runs what it says."""
    return _Unpickler(io.BytesIO(body), resolve).load()


# ---- rows in an address


def rows_path(group: str, keys: Sequence[str], rows: Tensor, total: int) -> str:
    """Returns the path at which a worker of `group` serves these rows of a batch of `total` rows:
    the values of the first key, row after row, then those of the next."""
    mask = np.zeros(total, dtype=bool)
    mask[rows.numpy()] = True
    bits = base64.urlsafe_b64encode(np.packbits(mask).tobytes()).decode()
    return f"{group}/{','.join(keys)}/{total}/{bits}"


def read_path(path: str) -> tuple[str, list[str], Tensor]:
    """Returns (group, keys, rows) of what `rows_path` returned."""
    group, keys, total, bits = path.split("/")
    mask = np.unpackbits(np.frombuffer(base64.urlsafe_b64decode(bits), dtype=np.uint8))
    return group, keys.split(","), torch.from_numpy(np.flatnonzero(mask[: int(total)]))
