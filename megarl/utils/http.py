"""Calls servers: a small synchronous JSON-over-HTTP client, calls to several of them at once, and
the rules of all clients: what an answer means, and when a call is made again.

A server is lost when the connection of its call breaks, or when it keeps its caller waiting and
gives no sign of life for `Deadline.patience` seconds. One that is only slow has the whole deadline.
"""

from __future__ import annotations

import concurrent.futures as cf
import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from megarl.utils.env import JOB_TOKEN, job_token

T = TypeVar("T")
STRANGER = (
    "it is no server that speaks SGLang's protocol; correct rollout.addresses, or end what else "
    "listens there"
)
_SHOWN = 200  # characters of an answer in an error
RETRY_DELAY = 0.2  # seconds before the first retry; doubles up to MAX_RETRY_DELAY
MAX_RETRY_DELAY = 10.0
MAX_REST = 60.0  # seconds of a server's Retry-After that are honoured
TOO_MANY = 429  # the one refusal that asks for another try
LOOK_EVERY = 1.0  # seconds between looks after servers that keep us waiting
LINGER = 2.0  # seconds a thread may outlive the wait for its call
# answered by a server's HTTP side alone, whatever its workers do
SIGN_OF_LIFE = "/model_info"
_jitter = random.Random()  # apart from the generator that a run seeds


class HttpError(RuntimeError):
    """Tells that a call failed: `server` is host:port, `status` None when no answer came,
    `retry_after` the seconds until it may be called again, where the server says so."""

    def __init__(
        self,
        server: str,
        call: str,
        reason: str,
        status: int | None = None,
        *,
        retry_after: float | None = None,
    ) -> None:
        said = f"answered {status}: {reason}" if status is not None else reason
        super().__init__(f"server {server}: {call} {said}")
        self.server, self.status, self.reason = server, status, reason
        self.retry_after = retry_after


def split_address(address: str) -> tuple[str, int]:
    """Returns ("10.0.0.1", 30000) of "10.0.0.1:30000", "http://10.0.0.1:30000" or "[::1]:30000".
    Raises ValueError for anything else."""
    bare = address.removeprefix("http://").rstrip("/")
    host, _, port = bare.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"server address {address!r}: use host:port")
    return host.strip("[]"), int(port)


def call_json(
    method: str, address: str, path: str, body: dict[str, Any] | None = None, *, timeout: float
) -> Any:
    """Returns the decoded answer (text where it is not JSON, None where it is empty).

    Raises HttpError with the server's own message on a status >= 400, on `"success": false`, and
    when no answer comes within `timeout` s.
    """
    from http import client  # here and below: no check of a start calls a server

    host, port = split_address(address)
    connection = client.HTTPConnection(host, port, timeout=timeout)
    payload = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | authorization()
    try:
        connection.request(method, path, payload, headers)
        response = connection.getresponse()
        status, raw = response.status, response.read()
        rest = retry_after(response.getheader("Retry-After"))
    except TimeoutError as e:
        raise HttpError(address, path, f"gave no answer within {timeout:.1f} s") from e
    except (OSError, client.HTTPException) as e:
        reason = f"failed: {type(e).__name__}: {shown(str(e) or 'connection closed')}"
        raise HttpError(address, path, reason) from e
    finally:
        connection.close()
    return accepted(address, path, status, decode_answer(raw), retry_after=rest)


def authorization(key: str | None = None) -> dict[str, str]:
    """Returns the header that shows a service its `key`, or where that is None the job's servers
    that we belong to it; none without a key or a token."""
    key = job_token() if key is None else key
    return {"Authorization": f"Bearer {key}"} if key else {}


def accepted(
    address: str, path: str, status: int, answer: Any, *, retry_after: float | None = None
) -> Any:
    """Returns the answer. Raises HttpError with the server's own message on a status >= 300, as no
    redirection is followed, and on `"success": false`."""
    if status < 300 and not (isinstance(answer, dict) and answer.get("success") is False):
        return answer
    reason = error_message(answer)
    if status == 401 and "://" not in address:  # a server of the job's
        reason += f" (set {JOB_TOKEN} to the token or API key that server was started with)"
    raise HttpError(address, path, reason, status, retry_after=retry_after)


def retry_after(header: str | None) -> float | None:
    """Returns the seconds that a Retry-After header asks for, which has seconds or a date; None
    where there is no such header, or none that can be read."""
    from email.utils import parsedate_to_datetime

    if header and header.strip().isdigit():
        return float(header)
    try:
        until = parsedate_to_datetime(header or "")
    except ValueError:
        return None
    return max(0.0, until.timestamp() - time.time())


def as_object(address: str, path: str, answer: Any, *keys: str) -> dict[str, Any]:
    """Returns the answer where it is a JSON object with `keys`. Raises HttpError where it
    is not."""
    if isinstance(answer, dict) and all(key in answer for key in keys):
        return answer
    wanted = f" with {', '.join(keys)}" if keys else ""
    reason = f"{shown(answer)} instead of a JSON object{wanted}: {STRANGER}"
    raise HttpError(address, path, reason, 200)


def shown(answer: Any) -> str:
    """Returns an answer, whatever it is, as one short line."""
    text = " ".join((answer if isinstance(answer, str) else repr(answer)).split())
    return f"{text[:_SHOWN]} ..." if len(text) > _SHOWN else text or "nothing"


def decode_answer(raw: bytes) -> Any:
    """Returns the bytes of an answer as JSON, as text where they are none, or None where there are
    none."""
    if not raw:
        return None
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return raw.decode(errors="replace")


def error_message(answer: Any) -> str:
    """Returns the human part of an error: {"message"}, {"error": {"message"}}, {"detail"} or the
    text."""
    if isinstance(answer, dict):
        error = answer.get("error")
        if isinstance(error, dict):
            return str(error.get("message", error))
        for key in ("message", "error", "detail", "error_message"):
            if answer.get(key):
                return str(answer[key])
    return "(no message)" if answer is None else shown(answer)


def in_thread(fn: Callable[..., T], *args: Any, **kw: Any) -> Future[T]:
    """Runs fn in a daemon thread: unlike an executor's, it cannot hold up the process's exit."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # who stops waiting for it cannot take the result away

    def work() -> None:
        try:
            future.set_result(fn(*args, **kw))
        except BaseException as e:
            future.set_exception(e)

    threading.Thread(target=work, name=getattr(fn, "__name__", "call"), daemon=True).start()
    return future


class Retries:
    """Counts the failures of one call. It is made again until `timeout` seconds after the first,
    so that a server has the time to come back."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._first: float | None = None
        self.failures = 0

    def rest(self) -> float | None:
        """Notes a failure, and returns the seconds before the next try; None where there is none.
        The last try is at the end of the timeout."""
        now = time.monotonic()
        self._first = now if self._first is None else self._first
        self.failures += 1
        left = self._first + self._timeout - now
        return min(backoff(self.failures - 1), left) if left > 0 else None


def is_final(error: HttpError) -> bool:
    """Tells whether another try would fail as well: the server refuses the call (4xx but 429)."""
    return error.status is not None and error.status < 500 and error.status != TOO_MANY


def backoff(attempt: int) -> float:
    """Returns the seconds before the next try: they double, and a random part of up to a half is
    left out, so that clients that failed together do not come back together."""
    return min(RETRY_DELAY * 2**attempt, MAX_RETRY_DELAY) * _jitter.uniform(0.5, 1.0)


# several servers at once


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


def sign_of_life(server: str, patience: float) -> None:
    """Asks a server for a sign of life. Raises an HttpError, whose status is None where no answer
    comes within `patience` s."""
    call_json("GET", server, SIGN_OF_LIFE, timeout=patience)


def _silent(calls: Mapping[str, Future[Any]]) -> list[str]:
    return [s for s, f in calls.items() if not f.done()]


def _unanswered(call: Future[Any]) -> HttpError | None:
    """Returns the error of a call that has ended without any answer, not even a refusal."""
    error = call.exception() if call.done() else None
    return error if isinstance(error, HttpError) and error.status is None else None


def _failed(calls: Mapping[str, Future[Any]]) -> dict[str, HttpError]:
    return {s: error for s, f in calls.items() if (error := _unanswered(f)) is not None}
