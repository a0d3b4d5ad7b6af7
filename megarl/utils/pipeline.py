"""Sends a server the next request while it works on the one before, over one connection.

HTTP/1.1 calls it pipelining (RFC 9112, 9.3.2): a server handles the requests of a connection in the
order in which they came, and answers in that order. So a request that takes the server long has its
successor waiting beside it, and two requests that must not change places cannot.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

from megarl.utils.http import (
    accepted,
    authorization,
    decode_answer,
    in_thread,
    split_address,
    unanswered,
)
from megarl.utils.liveness import Answer


@dataclass(frozen=True)
class _Request:
    path: str
    raw: bytes
    timeout: float
    future: Future[Answer] = field(default_factory=Future)
    begun: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Returns the seconds until the answer is late, never less than a hair."""
        return max(0.001, self.begun + self.timeout - time.monotonic())


class Pipeline:
    """Makes POST requests to one server, in order. While one is not answered the next goes over its
    connection; else it gets a new one, for servers close idle connections when they like.

    A connection that breaks fails all requests on it, those that the server had not begun, too. One
    that the server ends with an answer (`Connection: close`) is followed by another for the
    requests that are left, which HTTP has the server ignore.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._waiting: deque[_Request] = deque()
        self._outbox: queue.SimpleQueue[_Request | None] | None = None  # of the open connection
        self._served = False  # by a thread, until nothing waits

    def post(self, path: str, body: Mapping[str, Any], timeout: float) -> Future[Answer]:
        """Starts a request. Its future fails with the HttpError that `call_json` would raise."""
        request = _Request(path, self._encode(path, body), timeout)
        request.future.set_running_or_notify_cancel()
        with self._lock:
            self._waiting.append(request)
            if self._outbox is not None:
                self._outbox.put(request)
            if not self._served:
                self._served = True
                in_thread(self._serve)
        return request.future

    def _encode(self, path: str, body: Mapping[str, Any]) -> bytes:
        host, port = split_address(self.address)
        payload = json.dumps(body).encode()
        headers = {
            "Host": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            "Content-Type": "application/json",
            "Content-Length": str(len(payload)),
        } | authorization()
        lines = [f"POST {path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode() + payload

    def _serve(self) -> None:
        """Makes connections until no request is left."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._served = False
                    return
                self._outbox = outbox = queue.SimpleQueue[_Request | None]()
                for waiting in self._waiting:
                    outbox.put(waiting)
            try:
                self._connect(self._waiting[0], outbox)
            except Exception as e:
                self._fail(e)

    def _connect(self, request: _Request, outbox: queue.SimpleQueue[_Request | None]) -> None:
        """Sends what waits, and reads answers until none is left or the server ends the
        connection."""
        with socket.create_connection(split_address(self.address), request.left) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            in_thread(_write, sock, outbox)
            try:
                self._read(sock)
            finally:
                outbox.put(None)
                with contextlib.suppress(OSError):  # it may be gone; a write under way ends
                    sock.shutdown(socket.SHUT_RDWR)

    def _read(self, sock: socket.socket) -> None:
        with sock.makefile("rb", buffering=0) as raw:
            answers = _Answers(raw)
            while (request := self._next()) is not None:
                sock.settimeout(request.left)
                response = http.client.HTTPResponse(cast(Any, answers), method="POST")
                response.begin()
                self._answer(request, response.status, response.read())
                if response.will_close:
                    return

    def _next(self) -> _Request | None:
        """Returns the request whose answer comes next; None where the connection is idle, and has
        no part in what follows."""
        with self._lock:
            if not self._waiting:
                self._outbox = None
                return None
            return self._waiting[0]

    def _answer(self, request: _Request, status: int, raw: bytes) -> None:
        with self._lock:
            self._waiting.popleft()
        try:
            value = accepted(self.address, request.path, status, decode_answer(raw))
        except Exception as e:
            request.future.set_exception(e)
        else:
            request.future.set_result(Answer(self.address, value, time.monotonic()))

    def _fail(self, error: Exception) -> None:
        with self._lock:
            failed, self._waiting, self._outbox = self._waiting, deque(), None
        for request in failed:
            known = isinstance(error, OSError | http.client.HTTPException)
            why = unanswered(self.address, request.path, request.timeout, error) if known else error
            request.future.set_exception(why)


class _Answers(io.BufferedReader):
    """Reads the answers of a connection. `http.client` closes what it reads from with every answer,
    and some of the next one may be read by then."""

    def makefile(self, *_: Any) -> _Answers:
        """Returns itself, as http.client asks a socket for a reader."""
        return self

    def close(self) -> None:
        """Does nothing: who opened the connection closes it."""


def _write(sock: socket.socket, outbox: queue.SimpleQueue[_Request | None]) -> None:
    """Sends requests in order. A connection that breaks is its reader's error."""
    while (request := outbox.get()) is not None:
        try:
            sock.sendall(request.raw)
        except OSError:
            return
