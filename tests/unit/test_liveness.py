"""Calls that follow each other to one server: in order, and none left alone."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megarl.utils.http import HttpError, accepted, call_server, open_session, while_alive
from megarl.weight_sync.servers import Answer, Servers


class Slow:
    """Answers when told to, by the path: /ok, /refuse, /break (the connection, without an answer).
    Remembers what it handled."""

    def __init__(self) -> None:
        self.handled: list[Any] = []
        self.go = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        slow = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                slow.handled.append(body)
                slow.begun.release()
                slow.go.acquire(timeout=20)
                if self.path == "/break":
                    self.close_connection = True
                    return
                data = json.dumps({"message": f"about {body}"}).encode()
                self.send_response(400 if self.path == "/refuse" else 200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        self.address = f"127.0.0.1:{self.http.server_port}"
        self.servers = Servers([self.address])

    def post(self, path: str, timeout: float = 20) -> Future[Answer]:
        return self.servers.start(path, {}, timeout)[self.address]


@pytest.fixture
def slow() -> Iterator[Slow]:
    server = Slow()
    yield server
    server.go.release(9)
    server.http.shutdown()
    server.http.server_close()


def test_a_refusal_is_that_of_one_request_alone(slow: Slow) -> None:
    calls = [slow.post(path) for path in ("/refuse", "/ok")]
    slow.go.release(2)
    with pytest.raises(HttpError, match=f"{slow.address}: /refuse answered 400: about"):
        calls[0].result(20)
    assert calls[1].result(20).value == {"message": "about {}"}


def test_a_call_without_answer_fails_but_not_the_next(slow: Slow) -> None:
    slow.go.release(2)
    with pytest.raises(HttpError, match="/break failed: ") as error:
        slow.post("/break").result(20)
    assert error.value.status is None and not isinstance(error.value.__cause__, TimeoutError)
    assert slow.post("/ok").result(20).value == {"message": "about {}"}


def test_an_answer_may_be_late(slow: Slow) -> None:
    with pytest.raises(HttpError, match="/ok gave no answer within") as error:
        slow.post("/ok", 0.2).result(20)
    assert isinstance(error.value.__cause__, TimeoutError)


def test_nobody_listens() -> None:
    nobody = "127.0.0.1:1"
    with pytest.raises(HttpError, match=r"127\.0\.0\.1:1: /ok failed: ConnectionRefusedError"):
        Servers([nobody]).start("/ok", {}, 20)[nobody].result(20)


def test_an_answer_that_says_it_failed_is_an_error_whatever_its_status() -> None:
    assert accepted("h:1", "/x", 200, {"success": True, "n": 2}) == {"success": True, "n": 2}
    with pytest.raises(HttpError, match="no such group"):
        accepted("h:1", "/x", 200, {"success": False, "message": "no such group"})


async def _answer_after(seconds: float, value: str) -> str:
    await asyncio.sleep(seconds)
    return value


async def _no_sign(seconds: float) -> None:
    await asyncio.sleep(seconds)
    raise HttpError("h:1", "/model_info", "gave no answer")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.utils.http.LOOK_EVERY", 0.05)


def test_a_server_that_shows_life_has_all_its_time(quick: None) -> None:
    looks: list[float] = []

    async def look() -> None:
        looks.append(0.0)

    async def wait() -> object:
        return await while_alive(_answer_after(0.4, "late"), look)

    assert asyncio.run(wait()) == "late" and len(looks) > 2


def test_a_server_without_a_sign_of_life_is_not_waited_for(quick: None) -> None:
    async def wait() -> object:
        return await while_alive(_answer_after(20.0, ""), lambda: _no_sign(0.1))

    found = asyncio.run(wait())
    assert isinstance(found, HttpError) and "/model_info" in str(found)


def test_time_in_which_the_caller_itself_stood_still_is_not_the_servers(
    slow: Slow,
) -> None:
    slow.go.release()

    async def call(blocked: float) -> object:
        async with open_session() as session:
            asyncio.get_running_loop().call_soon(time.sleep, blocked)  # a workflow that blocks
            return await call_server(session, "POST", slow.address, "/ok", {}, timeout=0.2)

    assert asyncio.run(call(1.5)) == {"message": "about {}"}
    with pytest.raises(HttpError) as late:  # it has not answered
        asyncio.run(call(0.0))
    assert late.value.status is None and isinstance(late.value.__cause__, TimeoutError)


def test_a_refusal_is_what_the_call_ends_with(quick: None) -> None:
    async def refuses() -> None:
        raise HttpError("h:1", "/x", "no", 400)

    async def wait() -> object:
        return await while_alive(refuses(), lambda: _no_sign(0.1))

    found = asyncio.run(wait())
    assert isinstance(found, HttpError) and found.status == 400
