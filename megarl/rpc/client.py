"""Calls a worker: from a thread, which waits, or from a coroutine of any loop."""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any
from urllib.parse import quote

import aiohttp
from yarl import URL

from megarl.rpc.errors import Refused, RemoteError, RpcError
from megarl.rpc.loop import client_loop
from megarl.rpc.messages import Head, Packed, check_body, own_token, pack, seal, unpack
from megarl.rpc.server import CHUNK, FAILED, briefly, read_body

CONNECT_TIMEOUT = 30.0
DEATH_WAIT = 10.0  # seconds after a lost connection in which a scheduler tells why
CLOSE_TIMEOUT = 10.0
_NOTHING = seal(b"")
_SHOWN = 200  # characters of a refusal


class RpcClient:
    """Calls the server at `address`, host:port; `name` is the worker in errors.

    Any number of calls may be on their way; the server begins them in the order in which they were
    made here. A call has no limit of its own: it ends with its answer, or when the worker's death
    is known (`fail`), then with WorkerDied, as do all later ones. A connection that is lost raises
    RpcError, and ends the client too: nobody can tell whether that call was made.
    """

    def __init__(self, address: str, name: str = "", *, watched: bool = False) -> None:
        """watched: somebody will call `fail` when the worker has ended, so a lost connection waits
        a moment for the reason. Raises ValueError without the job's token."""
        self.address, self.name = address, name or address
        self._lock, self._turns = threading.Lock(), 0
        self._link = (
            client_loop().submit(_open(self.name, address, watched)).result(CONNECT_TIMEOUT)
        )

    def call(self, verb: str, payload: Any = None, timeout: float | None = None) -> Any:
        """Returns what the worker's `handle` makes of `payload`, which may be Packed already.

        Raises RemoteError where that raised, WorkerDied where the worker has ended, RpcError where
        the connection was lost, TimeoutError after `timeout` seconds: the call then goes on there.
        """
        return self._wait(self.call_async(verb, payload), f"call {verb}", timeout)

    def call_async(self, verb: str, payload: Any = None) -> Future[Any]:
        """Starts a call and returns its future at once. `payload` is packed before this returns."""
        packed = payload if isinstance(payload, Packed) else pack(payload)
        with self._lock:  # a turn is submitted before the next is given
            self._turns += 1
            return client_loop().submit(self._link.call(verb, packed, self._turns))

    async def acall(self, verb: str, payload: Any = None) -> Any:
        """Makes a call from a coroutine. A coroutine that is cancelled does not cancel the call."""
        return await asyncio.shield(asyncio.wrap_future(self.call_async(verb, payload)))

    def read(self, key: str, timeout: float | None = None) -> bytearray:
        """Returns the bytes that the worker's `read` has for `key`. Raises as `call` does."""
        return self._wait(client_loop().submit(self._link.read(key)), f"bytes {key}", timeout)

    def ping(self) -> Future[None]:
        """Starts a ping, which the worker counts; its future says whether it answered."""
        return client_loop().submit(self._link.ping())

    def end(self) -> Future[None]:
        """Asks the worker to end; the future says whether it has heard."""
        return client_loop().submit(self._link.end())

    def fail(self, why: RpcError) -> None:
        """Has all calls under way and all later ones raise `why`."""
        client_loop().submit(self._link.fail(why)).result(CLOSE_TIMEOUT)

    def close(self) -> None:
        """Closes the connections; calls under way raise RpcError."""
        client_loop().submit(self._link.close()).result(CLOSE_TIMEOUT)

    def _wait(self, future: Future[Any], what: str, timeout: float | None) -> Any:
        try:
            return future.result(timeout)
        except TimeoutError as e:
            if future.done():  # the worker's own
                raise
            raise TimeoutError(
                f"worker {self.name}: {what} has no answer after {timeout:g} s"
            ) from e


async def _open(name: str, address: str, watched: bool) -> _Link:
    return _Link(name, address, watched)


class _Link:
    """Is the part of a client that lives in the clients' loop."""

    def __init__(self, name: str, address: str, watched: bool) -> None:
        self._name, self._address, self._watched = name, address, watched
        self._token, self._id, self._numbers = own_token(), secrets.token_hex(8), 0
        self._instance, self._meeting = "", asyncio.Lock()
        self._dead: asyncio.Future[RpcError] = asyncio.get_running_loop().create_future()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT),
            read_bufsize=CHUNK,
        )

    async def call(self, verb: str, packed: Packed, turn: int) -> Any:
        asked = asyncio.ensure_future(
            self._ask("POST", f"/call/{quote(verb, safe='')}", packed, turn)
        )
        # sent even if nobody waits any more: the server waits for every turn
        head, body = await asyncio.shield(asked)
        return unpack(body, head)

    async def read(self, key: str) -> bytearray:
        head, body = await self._ask("GET", f"/bytes/{quote(key, safe='')}")
        await briefly(len(body), check_body, body, head)
        return body

    async def ping(self) -> None:
        await self._request("GET", "/ping", _NOTHING, 0)

    async def end(self) -> None:
        await self._request("POST", "/end", _NOTHING, 0)

    async def fail(self, why: RpcError) -> None:
        if not self._dead.done():
            self._dead.set_result(why)

    async def close(self) -> None:
        await self.fail(RpcError(f"worker {self._name}: the client is closed"))
        await self._session.close()

    async def _ask(
        self, method: str, path: str, packed: Packed = _NOTHING, turn: int = 0
    ) -> tuple[Head, bytearray]:
        """Returns the answer, or raises why there is none: whatever comes first of the answer and
        the news that the worker is dead."""
        if self._dead.done():
            raise self._why()
        asked = asyncio.ensure_future(self._request(method, path, packed, turn))
        try:
            either: set[asyncio.Future[Any]] = {asked, self._dead}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise self._why()
            return asked.result()
        except (aiohttp.ClientError, OSError) as e:
            raise await self._lost(e) from None  # it says what e does
        finally:
            asked.cancel()

    async def _lost(self, error: Exception) -> RpcError:
        """Ends this client; returns the reason that a scheduler gives, else the error."""
        if self._watched:
            await asyncio.wait([self._dead], timeout=DEATH_WAIT)
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        await self.fail(
            RpcError(f"worker {self._name}: the connection to {self._address} was lost ({text})")
        )
        return self._why()

    def _why(self) -> RpcError:
        """Returns why the client is dead: an error of its own for each call, with that call's
        traceback."""
        why = self._dead.result()
        return type(why)(*why.args)

    async def _request(
        self, method: str, path: str, packed: Packed, turn: int
    ) -> tuple[Head, bytearray]:
        async with self._meeting:
            if not self._instance:
                hello, _ = await self._exchange("GET", "/hello", _NOTHING, 0)
                self._instance = hello.instance
        return await self._exchange(method, path, packed, turn)

    async def _exchange(
        self, method: str, path: str, packed: Packed, turn: int
    ) -> tuple[Head, bytearray]:
        """Sends a request and returns its answer. Raises RemoteError where the worker says so."""
        self._numbers += 1
        head = Head(
            what=f"{method} {path}",
            instance=self._instance,
            number=f"{self._id}.{self._numbers}",
            digest=packed.digest,
            turn=turn,
        )
        headers = head.headers(self._token) | {"Content-Length": str(len(packed.body))}
        url = URL(f"http://{self._address}{path}", encoded=True)
        data = _chunks(packed) if packed.body else None
        async with self._session.request(
            method, url, headers=headers, data=data, allow_redirects=False
        ) as response:
            if response.status not in (200, FAILED):
                raise Refused(f"worker {self._name}: {(await response.text())[:_SHOWN]}")
            answer = Head.read(f"{response.status} {head.what}", response.headers, self._token)
            body = await read_body(response.content, response.content_length or 0)
        if answer.number != head.number or answer.instance != (self._instance or answer.instance):
            raise Refused(f"worker {self._name}: {head.what}: the answer is to another request")
        if response.status == FAILED:
            check_body(body, answer)
            raise RemoteError(self._name, *json.loads(body))
        return answer, body


async def _chunks(packed: Packed) -> AsyncIterator[memoryview]:
    view = memoryview(packed.body)
    for at in range(0, len(view), CHUNK):
        yield view[at : at + CHUNK]
