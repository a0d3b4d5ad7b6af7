"""Calls servers by JSON over HTTP, from a thread (`call_json`) and from an event loop
(`call_server`), and has the rules of all clients: what an answer means, and when a call is made
again."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from megarl.utils.env import JOB_TOKEN, job_token

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")
STRANGER = "it is no server of SGLang's protocol; correct rollout.addresses, or end what is there"
_SHOWN = 200  # characters of an answer in an error
RETRY_DELAY = 0.2  # seconds before the first retry; doubles up to MAX_RETRY_DELAY
MAX_RETRY_DELAY = 10.0
MAX_REST = 60.0  # seconds of a server's Retry-After that are honoured
TOO_MANY = 429  # the one refusal that asks for another try
CONNECT_TIMEOUT = 30.0  # of one connection of call_server
LOOK_EVERY = 1.0  # seconds between looks after servers that keep us waiting
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
    work, name = partial(settle, future, fn, *args, **kw), getattr(fn, "__name__", "call")
    threading.Thread(target=work, name=name, daemon=True).start()
    return future


def settle(future: Future[T], fn: Callable[..., T], *args: Any, **kw: Any) -> None:
    """Sets the result of a future to fn(*args, **kw), or its exception to the one that this raises,
    SystemExit too."""
    try:
        future.set_result(fn(*args, **kw))
    except BaseException as e:
        future.set_exception(e)


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


# -- from an event loop


def open_session(
    *, keeps_connections: bool = False, key: str | None = None
) -> aiohttp.ClientSession:
    """Returns a session for `call_server`. Control calls do not keep connections: a server may end
    a kept one just as a call begins, which then fails. key: what servers are shown in place of the
    job's token, "" for nothing."""
    import aiohttp  # what only looks, such as a start's checks, goes without

    connector = aiohttp.TCPConnector(limit=0, force_close=not keeps_connections)
    return aiohttp.ClientSession(connector=connector, headers=authorization(key))


async def call_server(
    session: aiohttp.ClientSession,
    method: str,
    address: str,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    timeout: float | None,
) -> Any:
    """Returns and raises what call_json does. address: host:port, or the beginning of a URL.
    timeout: in seconds; None waits for ever, once it is connected."""
    import aiohttp

    url = f"{address}{path}" if "://" in address else f"http://{address}{path}"
    exchange = _exchange(session, method, url, body)
    try:
        answer = await (exchange if timeout is None else _bounded(exchange, timeout))
        if answer is None:
            reason = f"gave no answer within {timeout:g} s"
            raise HttpError(address, path, reason) from TimeoutError()
        status, raw, rest = answer
    except TimeoutError as e:
        reason = f"took no connection within {CONNECT_TIMEOUT:g} s"
        raise HttpError(address, path, reason) from e
    except (aiohttp.ClientError, OSError) as e:
        reason = f"failed: {type(e).__name__}: {shown(str(e)) if str(e) else ''}".rstrip(": ")
        raise HttpError(address, path, reason) from e
    return accepted(address, path, status, decode_answer(raw), retry_after=retry_after(rest))


async def _exchange(
    session: aiohttp.ClientSession, method: str, url: str, body: dict[str, Any] | None
) -> tuple[int, bytes, str | None]:
    import aiohttp

    limit = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT)
    async with session.request(
        method, url, json=body, timeout=limit, allow_redirects=False
    ) as response:
        return response.status, await response.read(), response.headers.get("Retry-After")


async def _bounded(coro: Coroutine[Any, Any, T], timeout: float) -> T | None:
    """Returns the result of an exchange, None where it takes longer than `timeout` s. Where the
    loop was blocked meanwhile, what has come is looked at first: that time is not the server's."""
    exchange, begun = asyncio.ensure_future(coro), time.monotonic()
    try:
        await asyncio.wait({exchange}, timeout=timeout)
        if time.monotonic() - begun > timeout + LOOK_EVERY:
            await asyncio.wait({exchange}, timeout=LOOK_EVERY)
        return exchange.result() if exchange.done() else None
    finally:
        exchange.cancel()


async def while_alive(answer: Awaitable[Any], look: Callable[[], Awaitable[Any]]) -> Any:
    """Returns a server's answer or the HttpError of its call. While it keeps us waiting, `look`
    asks for a sign of life; where that brings none, its error is returned."""
    waits = [asyncio.ensure_future(answer)]
    try:
        while not (await asyncio.wait(waits[:1], timeout=LOOK_EVERY))[0]:
            waits[1:] = [asyncio.ensure_future(look())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            error = waits[1].exception() if waits[1].done() else None
            silent = isinstance(error, HttpError) and error.status is None
            if silent and not waits[0].done():
                return error
        return waits[0].result()
    except HttpError as e:
        return e
    finally:
        for wait in waits:
            wait.cancel()
