"""Requests to one server over one connection: in order, one beside another, and none left alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megarl.utils.http import HttpError, accepted
from megarl.utils.pipeline import Pipeline


class Slow:
    """Answers when told to, by the path: /ok, /refuse, /close (the connection, with its answer),
    /break (it, without one). Remembers what it handled, and from which connection."""

    def __init__(self) -> None:
        self.handled: list[tuple[int, Any]] = []
        self.go = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        slow = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                slow.handled.append((self.client_address[1], body))
                slow.begun.release()
                slow.go.acquire(timeout=20)
                if self.path == "/break":
                    self.close_connection = True
                    return
                data = json.dumps({"message": f"about {body}"}).encode()
                self.send_response(400 if self.path == "/refuse" else 200)
                self.send_header("Content-Length", str(len(data)))
                if self.path == "/close":
                    self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        self.pipeline = Pipeline(f"127.0.0.1:{self.http.server_port}")


@pytest.fixture
def slow() -> Iterator[Slow]:
    server = Slow()
    yield server
    server.go.release(9)
    server.http.shutdown()
    server.http.server_close()


def test_the_next_request_waits_beside_the_one_before(slow: Slow) -> None:
    calls = [slow.pipeline.post("/ok", {"n": n}, 20) for n in range(3)]
    for n, call in enumerate(calls):
        assert slow.begun.acquire(timeout=20) and [b["n"] for _, b in slow.handled][n:] == [n]
        slow.go.release()
        answer = call.result(20)
        assert answer.value == {"message": f"about {{'n': {n}}}"} and answer.at > 0
        assert not any(c.done() for c in calls[n + 1 :])
    assert len({port for port, _ in slow.handled}) == 1


def test_a_refusal_is_that_of_one_request_alone(slow: Slow) -> None:
    calls = [slow.pipeline.post(path, {}, 20) for path in ("/refuse", "/ok")]
    slow.go.release(2)
    with pytest.raises(HttpError, match=f"{slow.pipeline.address}: /refuse answered 400: about"):
        calls[0].result(20)
    assert calls[1].result(20).value == {"message": "about {}"}


def test_a_server_that_closes_gets_what_it_did_not_answer_again(slow: Slow) -> None:
    calls = [slow.pipeline.post("/close", {"n": n}, 20) for n in range(3)]
    slow.go.release(3)
    assert [c.result(20).value["message"] for c in calls] == [
        f"about {{'n': {n}}}" for n in (0, 1, 2)
    ]
    assert [b["n"] for _, b in slow.handled] == [0, 1, 2]
    assert len({port for port, _ in slow.handled}) == 3


def test_a_connection_that_breaks_fails_all_on_it_and_the_next_has_another(slow: Slow) -> None:
    calls = [slow.pipeline.post(path, {}, 20) for path in ("/break", "/ok")]
    slow.go.release(1)
    for call, path in zip(calls, ("/break", "/ok")):
        with pytest.raises(HttpError, match=f"{path} failed: ") as error:
            call.result(20)
        assert error.value.status is None and not isinstance(error.value.__cause__, TimeoutError)
    slow.go.release(1)
    assert slow.pipeline.post("/ok", {}, 20).result(20).value == {"message": "about {}"}


def test_an_answer_may_be_late(slow: Slow) -> None:
    calls = [slow.pipeline.post("/ok", {}, 0.2) for _ in range(2)]
    for call in calls:
        with pytest.raises(HttpError, match=r"/ok gave no answer within 0\.2 s") as error:
            call.result(20)
        assert isinstance(error.value.__cause__, TimeoutError)


def test_nobody_listens(slow: Slow) -> None:
    gone = Pipeline("127.0.0.1:1")
    with pytest.raises(HttpError, match=r"127\.0\.0\.1:1: /ok failed: ConnectionRefusedError"):
        gone.post("/ok", {}, 20).result(20)


def test_an_answer_that_says_it_failed_is_an_error_whatever_its_status() -> None:
    assert accepted("h:1", "/x", 200, {"success": True, "n": 2}) == {"success": True, "n": 2}
    with pytest.raises(HttpError, match="no such group"):
        accepted("h:1", "/x", 200, {"success": False, "message": "no such group"})
