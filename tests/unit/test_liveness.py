"""Calls that follow each other to one server: in order, and none left alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megarl.utils.http import Answer, Calls, HttpError, accepted, start_calls


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
        self.calls: Calls = {}

    def follow(self, path: str, body: dict[str, Any], timeout: float) -> Future[Answer]:
        """Posts when the server has answered what was posted before."""
        address = [self.address]
        self.calls = start_calls(address, "POST", path, body, timeout, after=self.calls)
        return self.calls[self.address]


@pytest.fixture
def slow() -> Iterator[Slow]:
    server = Slow()
    yield server
    server.go.release(9)
    server.http.shutdown()
    server.http.server_close()


def test_the_next_request_leaves_after_the_answer_to_the_one_before(slow: Slow) -> None:
    calls = [slow.follow("/ok", {"n": n}, 20) for n in range(3)]
    for n, call in enumerate(calls):
        assert slow.begun.acquire(timeout=20) and [b["n"] for b in slow.handled][n:] == [n]
        slow.go.release()
        answer = call.result(20)
        assert answer.value == {"message": f"about {{'n': {n}}}"} and answer.at > 0
        assert not any(c.done() for c in calls[n + 1 :])


def test_a_refusal_is_that_of_one_request_alone(slow: Slow) -> None:
    calls = [slow.follow(path, {}, 20) for path in ("/refuse", "/ok")]
    slow.go.release(2)
    with pytest.raises(HttpError, match=f"{slow.address}: /refuse answered 400: about"):
        calls[0].result(20)
    assert calls[1].result(20).value == {"message": "about {}"}


def test_a_call_without_answer_fails_what_waits_behind_it_but_not_the_next(
    slow: Slow,
) -> None:
    calls = [slow.follow(path, {}, 20) for path in ("/break", "/ok")]
    slow.go.release(1)
    for call in calls:
        with pytest.raises(HttpError, match="/break failed: ") as error:
            call.result(20)
        assert error.value.status is None and not isinstance(error.value.__cause__, TimeoutError)
    slow.go.release(1)
    assert slow.follow("/ok", {}, 20).result(20).value == {"message": "about {}"}


def test_an_answer_may_be_late(slow: Slow) -> None:
    calls = [slow.follow("/ok", {}, 0.2) for _ in range(2)]
    for call in calls:
        with pytest.raises(HttpError, match="/ok gave no answer within") as error:
            call.result(20)
        assert isinstance(error.value.__cause__, TimeoutError)


def test_nobody_listens(slow: Slow) -> None:
    slow.address = "127.0.0.1:1"
    with pytest.raises(HttpError, match=r"127\.0\.0\.1:1: /ok failed: ConnectionRefusedError"):
        slow.follow("/ok", {}, 20).result(20)


def test_an_answer_that_says_it_failed_is_an_error_whatever_its_status() -> None:
    assert accepted("h:1", "/x", 200, {"success": True, "n": 2}) == {"success": True, "n": 2}
    with pytest.raises(HttpError, match="no such group"):
        accepted("h:1", "/x", 200, {"success": False, "message": "no such group"})
