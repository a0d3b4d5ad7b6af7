"""Makes a failure on one rank an error on all of them, with its rank named.

Code of the user's runs on the rows that a rank holds; where it fails on one rank, the others would
wait for this rank in the next collective.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch

from megarl.api.records import ServersLost
from megarl.api.tokens import Comm
from megarl.utils.files import DiskFull
from megarl.utils.stopping import StopRequested
from megarl.utils.user_errors import RemoteTrace, text_of

T = TypeVar("T")


class OtherRankFailed(RuntimeError):
    """Tells that another rank failed, or is gone: its own error is the reason."""


@dataclass(frozen=True)
class Failure:
    """An error as it travels between ranks: its text, its trace, and what tells callers its type
    apart. `servers`: why each server of a ServersLost is lost."""

    text: str
    trace: RemoteTrace | None = None
    disk_full: bool = False
    stop: bool = False  # StopRequested
    servers: Mapping[str, str] = field(default_factory=dict)  # of ServersLost

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Returns the failure that tells other ranks of `error`."""
        servers = error.servers if isinstance(error, ServersLost) else {}
        stop = isinstance(error, StopRequested)
        text = text_of(error)
        text = text if servers or stop else f"{type(error).__name__}: {text}"
        return cls(text, RemoteTrace.of(error), isinstance(error, DiskFull), stop, servers)


def merged(
    what: str, failed: Mapping[int, Failure], own: Exception | None = None
) -> Exception | None:
    """Returns the error that this rank is to raise for the failures of `what` on several ranks, or
    None for no failures.

    failed: by rank; own: this rank's error. The result is ServersLost with the servers of all where
    that is among them, for what follows from it is the same on every rank, and the other errors may
    be its consequences; else the rank's own error where it has one; else StopRequested where that
    is among them; else OtherRankFailed (DiskFull where that is among them) that names the ranks.
    """
    if lost := [f for f in failed.values() if f.servers]:
        servers = {server: why for f in lost for server, why in f.servers.items()}
        error = ServersLost("; ".join(f.text for f in lost), servers)
        error.__cause__ = own
        return error
    if own is not None or not failed:
        return own
    for failure in failed.values():
        if failure.stop:
            return StopRequested(failure.text)
    texts = "; ".join(f"rank {rank}: {failure.text}" for rank, failure in failed.items())
    kind = DiskFull if any(f.disk_full for f in failed.values()) else OtherRankFailed
    reported = kind(f"{what} failed on {texts}")
    traces = [failure.trace for failure in failed.values() if failure.trace]
    reported.__cause__ = max(traces, key=lambda trace: len(trace.lines) > 0, default=None)
    return reported


def on_every_rank(what: str, fn: Callable[[], T], comm: Comm | None) -> T:
    """Returns `fn()`, called on every rank; where it fails on one, all raise what `merged` returns.
    Collective: a small message of every rank.

    what: names the call, the same on every rank. comm: how ranks talk (Batch.comm), None where
    there is one rank. `fn` itself makes no collective, or ends it before it can fail on one rank.
    """
    rank = comm.rank if comm else 0
    result, error = attempt(fn)
    failure = None if error is None else Failure.of(error)
    try:
        if error is not None and comm is not None and comm.size > 1:
            error.add_note(f"({what}, rank {rank})")
        failures = [failure] if comm is None else gather(failure, comm, what)
        error = merged(what, {rank: f for rank, f in enumerate(failures) if f}, error)
        if error is not None:
            raise error
    except OtherRankFailed as e:
        if failure is None or error is e:
            raise
        raise OtherRankFailed(f"{what} failed on rank {rank}: {failure.text}; {e}") from error
    finally:
        del error  # its traceback holds this frame, and all that is alive in those below
    return cast(T, result)


def gather(value: T, comm: Comm, name: str = "gather") -> list[T]:
    """Returns every rank's picklable `value`, by rank. Collective. name: of the call, for errors,
    the same on every rank."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    return [pickle.loads(raw.numpy().tobytes()) for raw in comm.all_gather(data, name)]


def attempt(fn: Callable[..., T], *args: object) -> tuple[T | None, Exception | None]:
    """Returns (fn(*args), None), or (None, the error)."""
    try:
        return fn(*args), None
    except Exception as e:  # whatever it is, the other ranks must hear of it
        return None, e
