"""Serves a process to the others of its job, in a loop of its own thread.

    POST /call/<verb>   what `handle` makes of the payload; calls of one client begin in its order
    GET  /bytes/<key>   raw bytes of `read`
    GET  /ping          says that this process answers; counted, so that it can miss them
    POST /end           has the worker end, after the call that runs
    GET  /hello         names this instance, without which no other request is taken

A request that does not come from the job is refused with 401 and a line of text.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, Protocol, TypeVar
from urllib.parse import unquote

import aiohttp
from aiohttp import web

from megarl.rpc.errors import Refused
from megarl.rpc.loop import Loop
from megarl.rpc.messages import Fresh, Head, Packed, own_token, pack, seal, unpack

T = TypeVar("T")
P = ParamSpec("P")

Handle = Callable[[str, Any], Awaitable[Any]]
Read = Callable[[str], "bytes | bytearray | memoryview"]

CHUNK = 1 << 20  # bytes written at once
SMALL = 1 << 18  # bytes that are hashed and unpickled within a millisecond
START_TIMEOUT, CLOSE_TIMEOUT = 30.0, 10.0
_SHUTDOWN = 0.5  # seconds that calls which still run have at the end
_LONGEST_LINE = 1 << 22  # bytes of an address; one that names rows has a bit for each of a batch
_KEEP = 1e6  # seconds an idle connection is kept: clients close theirs first
FAILED = 500  # status of an answer that is an error of `handle` or `read`
_REFUSED = 401


class Handler(Protocol):
    """Is what a worker serves. Calls begin in their client's order, in the server's loop, which
    they must not block: `MAIN_THREAD.call` (main_thread.py) runs them on the main thread."""

    async def handle(self, verb: str, payload: Any) -> Any:
        """Returns the answer to a call, which may be Packed already; what it raises, the caller
        sees as RemoteError."""
        ...

    def read(self, key: str) -> bytes | bytearray | memoryview:
        """Returns bytes for GET /bytes/<key>, in a thread. Raises KeyError where it has none."""
        ...

    def close(self) -> None:
        """Frees what it holds, on the main thread, when the worker ends in an orderly way."""
        ...


class RpcServer:
    """Listens from its construction until `close`. `address` is host:port; `pings` counts those
    that came.

    `handle` runs in the server's loop, any number of calls at once, and must not block it. What it
    raises travels as RemoteError. `read` runs in another thread; a KeyError says that there is no
    such key.
    """

    def __init__(
        self,
        handle: Handle,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        read: Read | None = None,
        end: Callable[[], None] | None = None,
    ) -> None:
        """end: is called where this process is asked to end. Raises OSError where nobody can listen
        at `host` and `port` (0: a free one), ValueError without the job's token."""
        self._handle, self._read, self._end, self._token = handle, read, end, own_token()
        self._instance, self._fresh = secrets.token_hex(8), Fresh()
        self._turns: dict[str, _Turns] = {}
        self.pings, self._closed = 0, False
        self._loop = Loop("megarl-rpc-server")
        try:
            self._runner = self._loop.submit(self._listen(host, port)).result(START_TIMEOUT)
        except BaseException:
            self._loop.close()
            raise
        self.address = "{}:{}".format(*self._runner.addresses[0][:2])

    def close(self) -> None:
        """Ends the server. Calls that still run get no answer. May be called twice."""
        if self._closed:
            return
        self._closed = True
        try:
            self._loop.submit(self._runner.cleanup()).result(CLOSE_TIMEOUT)
        finally:
            self._loop.close()

    async def _listen(self, host: str, port: int) -> web.ServerRunner:
        runner = web.ServerRunner(
            web.Server(
                self._answer,
                access_log=None,
                keepalive_timeout=_KEEP,
                read_bufsize=CHUNK,
                max_line_size=_LONGEST_LINE,
            ),
            shutdown_timeout=_SHUTDOWN,
        )
        await runner.setup()
        await web.TCPSite(runner, host, port, backlog=1024).start()
        return runner

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        what = f"{request.method} {request.rel_url.raw_path}"
        try:
            head = Head.read(what, request.headers, self._token)
            if what == "GET /hello":
                return await self._send(request, head, seal(b""))
            if head.instance != self._instance:
                raise Refused(f"{what}: the request is for another process")
            self._fresh.take(head.number)
        except Refused as e:
            return web.Response(status=_REFUSED, text=str(e))
        try:
            body = await self._work(request, head)
        except (Exception, SystemExit, asyncio.CancelledError) as e:
            if _cancelled():  # by `close`
                raise
            told = [type(e).__name__, str(e), traceback.format_exc()]
            return await self._send(request, head, seal(json.dumps(told).encode()), FAILED)
        return await self._send(request, head, body)

    async def _work(self, request: web.BaseRequest, head: Head) -> Packed:
        _, _, rest = head.what.partition(" /")
        kind, _, name = rest.partition("/")
        match request.method, kind:
            case "GET", "ping":
                self.pings += 1
                return seal(b"")
            case "GET", "bytes" if self._read is not None:
                read = self._read
                return await asyncio.to_thread(lambda: seal(read(unquote(name))))
            case "POST", "end" if self._end is not None:
                self._end()
                return seal(b"")
            case "POST", "call":
                answer = await self._call(request, head, name)
                return (
                    answer if isinstance(answer, Packed) else await asyncio.to_thread(pack, answer)
                )
        raise LookupError(f"nothing is served at {head.what}")

    async def _call(self, request: web.BaseRequest, head: Head, verb: str) -> Any:
        """Calls `handle` when all earlier calls of the client have begun."""
        turns = self._turns.setdefault(head.number.partition(".")[0], _Turns())
        try:
            body = await read_body(request.content, request.content_length or 0)
            payload = await briefly(len(body), unpack, body, head)
        finally:  # a call that fails here has had its turn, too
            await turns.wait(head.turn)
            turns.next()
        # nothing is awaited between the turn and the call's own first line
        return await self._handle(verb, payload)

    async def _send(
        self, request: web.BaseRequest, head: Head, packed: Packed, status: int = 200
    ) -> web.StreamResponse:
        what = f"{status} {head.what}"
        answer = Head(what=what, instance=self._instance, number=head.number, digest=packed.digest)
        response = web.StreamResponse(status=status, headers=answer.headers(self._token))
        view = memoryview(packed.body).cast("B")
        response.content_length = len(view)
        await response.prepare(request)
        for at in range(0, len(view), CHUNK):
            await response.write(view[at : at + CHUNK])
        await response.write_eof()
        return response


def _cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class _Turns:
    """Lets the calls of one client begin in the order in which it made them."""

    def __init__(self) -> None:
        self._next = 1
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def wait(self, turn: int) -> None:
        if turn != self._next:
            self._waiting[turn] = asyncio.get_running_loop().create_future()
            await self._waiting[turn]

    def next(self) -> None:
        self._next += 1
        if (waiting := self._waiting.pop(self._next, None)) is not None:
            waiting.set_result(None)


async def briefly(size: int, fn: Callable[P, T], *args: P.args, **kw: P.kwargs) -> T:
    """Returns what `fn` makes of `size` bytes: of many in a thread, for the loop serves others
    meanwhile, of few here, for a thread costs more than the work, far more where cores are busy.
    What is slow to unpickle though it is small, since it imports much, travels as bytes."""
    return await asyncio.to_thread(fn, *args, **kw) if size > SMALL else fn(*args, **kw)


async def read_body(stream: aiohttp.StreamReader, length: int) -> bytearray:
    """Returns the `length` bytes of a body, in one buffer of their own."""
    body, at = bytearray(length), 0
    async for chunk in stream.iter_any():
        body[at : at + len(chunk)] = chunk
        at += len(chunk)
    return body
