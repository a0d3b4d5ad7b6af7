"""Calls several servers at once, and finds out which of them are lost meanwhile.

A server is lost when the connection of its call breaks, or when it keeps its caller waiting and
gives no sign of life for `Deadline.patience` seconds. A server that is only slow has the whole
deadline.
"""

from __future__ import annotations

import concurrent.futures as cf
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from megarl.utils.http import HttpError, call_json, in_thread

LOOK_EVERY = 1.0  # seconds between looks after servers that keep us waiting
LINGER = 2.0  # seconds a thread may outlive the wait for its call
# answered by a server's HTTP side alone, whatever its workers do
SIGN_OF_LIFE = "/model_info"


class Deadline:
    """Ends `timeout` seconds from now. patience: seconds that a server may give no sign of life."""

    def __init__(self, timeout: float, *, patience: float = 30.0) -> None:
        self.timeout, self.patience = timeout, patience
        self._end = time.monotonic() + timeout

    @property
    def over(self) -> bool:
        """Returns whether the time is up."""
        return time.monotonic() >= self._end

    @property
    def left(self) -> float:
        """Returns the seconds left, never less than a hair, so that it can serve as a timeout."""
        return max(0.001, self._end - time.monotonic())


@dataclass(frozen=True)
class Answer:
    """Holds a server's answer and the moment it came (time.monotonic)."""

    server: str
    value: Any
    at: float


Calls = Mapping[str, Future[Answer]]  # by server


def start_calls(
    servers: Sequence[str],
    method: str,
    path: str,
    body: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    timeout: float,
    *,
    after: Calls | None = None,
) -> dict[str, Future[Answer]]:
    """Calls every server in a thread of its own; `body` is one for all or one for each server. A
    call that gets no answer in `timeout` seconds fails with an HttpError.

    after: earlier calls. A server gets this one when it has answered its own of them, and not at
    all where the wait for that answer is in vain: this call fails with the same error.
    """
    bodies = list(body) if isinstance(body, Sequence) else [body] * len(servers)
    earlier = {s: f for s, f in (after or {}).items() if not f.done()}
    return {
        server: in_thread(_call, method, server, path, b, timeout, earlier.get(server))
        for server, b in zip(servers, bodies, strict=True)
    }


def wait_for(
    calls: Calls,
    deadline: Deadline,
    *,
    also: Sequence[Future[Any]] = (),
    return_when: str = cf.ALL_COMPLETED,
) -> dict[str, HttpError]:
    """Waits like `cf.wait` for the calls and `also`, but not for lost servers. Returns the lost
    ones with the reasons.
    """
    probes: dict[str, Future[Any]] = {}
    while not deadline.over:
        sides, left = [*calls.values(), *also], min(LOOK_EVERY, deadline.left)
        done, pending = cf.wait(sides, left, return_when=return_when)
        failed = any(f.exception() is not None for f in done)
        if not pending or (failed and return_when == cf.FIRST_EXCEPTION):
            break
        for server in _silent(calls):
            if server not in probes or (probes[server].done() and not _unanswered(probes[server])):
                probes[server] = in_thread(sign_of_life, server, deadline.patience)
        if lost := _failed({s: probes[s] for s in _silent(calls)}):
            return lost
    return broken(calls)


def outcomes(calls: Calls, path: str, deadline: Deadline) -> dict[str, Any]:
    """Returns for every server its answer, or the HttpError of its call to `path`. Errors that are
    no HttpError are raised.
    """
    lost: dict[str, HttpError] = {}
    while waiting := {s: calls[s] for s in _silent(calls) if s not in lost}:
        found = wait_for(waiting, deadline)
        lost |= {s: e for s, e in found.items() if not calls[s].done()}
        if not found:
            break
    return {server: _outcome(server, call, path, lost, deadline) for server, call in calls.items()}


def absent(calls: Calls, deadline: Deadline) -> dict[str, HttpError]:
    """Returns the servers whose call broke, and the silent ones that give no sign of life either,
    with the reasons.
    """
    patience = max(1.0, min(deadline.patience, deadline.left))
    probes = {s: in_thread(sign_of_life, s, patience) for s in _silent(calls)}
    cf.wait(probes.values(), patience + LINGER)
    return broken(calls) | _failed(probes)


def broken(calls: Calls) -> dict[str, HttpError]:
    """Returns the servers whose connection failed before or during their call, with the reasons."""
    failed = _failed(calls)
    return {s: e for s, e in failed.items() if not isinstance(e.__cause__, TimeoutError)}


def sign_of_life(server: str, patience: float) -> None:
    """Asks a server for a sign of life. Raises an HttpError, whose status is None where no answer
    comes within `patience` s."""
    call_json("GET", server, SIGN_OF_LIFE, timeout=patience)


def _call(
    method: str,
    server: str,
    path: str,
    body: dict[str, Any] | None,
    timeout: float,
    earlier: Future[Answer] | None,
) -> Answer:
    deadline = Deadline(timeout)
    if earlier is not None:
        cf.wait([earlier], timeout)
        if (error := _unanswered(earlier)) is not None:
            raise error
    value = call_json(method, server, path, body, timeout=deadline.left)
    return Answer(server, value, time.monotonic())


def _silent(calls: Mapping[str, Future[Any]]) -> list[str]:
    return [s for s, f in calls.items() if not f.done()]


def _unanswered(call: Future[Any]) -> HttpError | None:
    """Returns the error of a call that has ended without any answer, not even a refusal."""
    error = call.exception() if call.done() else None
    return error if isinstance(error, HttpError) and error.status is None else None


def _failed(calls: Mapping[str, Future[Any]]) -> dict[str, HttpError]:
    return {s: error for s, f in calls.items() if (error := _unanswered(f)) is not None}


def _outcome(
    server: str, call: Future[Answer], path: str, lost: Mapping[str, HttpError], deadline: Deadline
) -> Any:
    if call.done():
        error = call.exception()
        if error is not None and not isinstance(error, HttpError):
            raise error
        return error or call.result().value
    if server in lost:
        return lost[server]
    late = HttpError(server, path, f"gave no answer within {deadline.timeout:g} s")
    late.__cause__ = TimeoutError()
    return late
