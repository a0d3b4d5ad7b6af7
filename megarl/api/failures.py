"""Makes a failure on one rank an error on all of them, with its rank named.

Code of the user's runs on the rows that a rank holds; where it fails on one rank, the others would
wait for this rank in the next collective.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar, cast

import torch

from megarl.api.records import ServersLost
from megarl.api.tokens import Comm
from megarl.utils.files import DiskFull

T = TypeVar("T")


class OtherRankFailed(RuntimeError):
    """Tells that another rank failed, or is gone: its own error is the reason."""


@dataclass(frozen=True)
class Failure:
    """An error as it travels between ranks: its text, and what tells callers its type apart.
    `servers`: why each server of a ServersLost is lost."""

    text: str
    disk_full: bool = False
    servers: Mapping[str, str] = field(default_factory=dict)  # of ServersLost

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Returns the failure that tells other ranks of `error`."""
        servers = error.servers if isinstance(error, ServersLost) else {}
        text = str(error) if servers else f"{type(error).__name__}: {error}"
        return cls(text, isinstance(error, DiskFull), servers)


def merged(
    what: str, failed: Mapping[int, Failure], own: Exception | None = None
) -> Exception | None:
    """Returns the error that this rank is to raise for the failures of `what` on several ranks, or
    None for no failures.

    failed: by rank; own: this rank's error. The result is ServersLost with the servers of all where
    that is among them, for what follows from it is the same on every rank, and the other errors may
    be its consequences; else the rank's own error where it has one; else OtherRankFailed (DiskFull
    where that is among them) that names the ranks.
    """
    if lost := [f for f in failed.values() if f.servers]:
        servers = {server: why for f in lost for server, why in f.servers.items()}
        error = ServersLost("; ".join(f.text for f in lost), servers)
        error.__cause__ = own
        return error
    if own is not None or not failed:
        return own
    said = "; ".join(f"rank {rank}: {failure.text}" for rank, failure in failed.items())
    kind = DiskFull if any(f.disk_full for f in failed.values()) else OtherRankFailed
    return kind(f"{what} failed on {said}")


def settle(what: str, rank: int, failed: Mapping[int, Failure], own: Exception | None) -> None:
    """Raises what `merged` returns, if anything; `own` is the error of this `rank`, and gets a note
    that says so.

    A caller then forgets `own`, as this does: its traceback holds both frames, and all that is
    alive in those below.
    """
    if own is not None:
        own.add_note(f"({what}, rank {rank})")
    error = merged(what, failed, own)
    if error is not None:
        try:
            raise error
        finally:
            del error, own


def from_every_rank(what: str, value: Any, error: Exception | None, comm: Comm | None) -> list[Any]:
    """Returns every rank's `value`; where a rank has an `error`, all raise what `merged` returns.
    Collective: a message of 8 bytes a rank, and another where there is anything to say.

    value: what JSON can hold, in which floats arrive bit for bit; None says nothing.
    comm: how ranks talk (Batch.comm), None where there is one rank.
    """
    try:
        if comm is None:
            settle(what, 0, {} if error is None else {0: Failure.of(error)}, error)
            return [value]
        failure = None if error is None else asdict(Failure.of(error))
        said = b"" if value is failure is None else json.dumps([value, failure]).encode()
        raw = comm.all_gather(torch.tensor(list(said), dtype=torch.uint8))
        found = [json.loads(r.numpy().tobytes()) if len(r) else (None, None) for r in raw]
        failed = {rank: Failure(**f) for rank, (_, f) in enumerate(found) if f is not None}
        settle(what, comm.rank, failed, error)
        return [theirs for theirs, _ in found]
    finally:
        del error


def on_every_rank(what: str, fn: Callable[[], T], comm: Comm | None) -> T:
    """Returns `fn()`, called on every rank; where it fails on one, all raise what `merged` returns.
    Collective, as `from_every_rank`; `fn` itself makes no collective."""
    result, error = attempt(fn)
    try:
        from_every_rank(what, None, error, comm)
    finally:
        del error
    return cast(T, result)


def attempt(fn: Callable[..., T], *args: Any) -> tuple[T | None, Exception | None]:
    """Returns (fn(*args), None), or (None, the error)."""
    try:
        return fn(*args), None
    except Exception as e:  # whatever it is, the other ranks must hear of it
        return None, e
