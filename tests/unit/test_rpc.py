"""Signed calls between a server and its clients: what strangers get, order, errors, big bodies."""

from __future__ import annotations

import asyncio
import http.client
import os
import pickle
import runpy
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megarl.rpc import loop
from megarl.rpc.client import RpcClient
from megarl.rpc.errors import Refused, RemoteError, RpcError, WorkerDied
from megarl.rpc.messages import WINDOW, Fresh, Head, Packed, pack, seal
from megarl.rpc.server import RpcServer
from megarl.utils import job_token
from megarl.utils.job_token import ENV, ensure_job_token

TOKEN = "the-tests-secret"


class Bomb:
    """Writes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class Service:
    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.sent: Packed | None = None
        self.may_end = threading.Event()
        self.bulk: dict[str, Any] = {"a b/ä?#": memoryview(bytearray(os.urandom(3 << 20)))}

    async def handle(self, verb: str, payload: Any) -> Any:
        self.begun.append(payload if isinstance(payload, int) else verb)
        match verb:
            case "length":
                return len(payload)
            case "divide":
                return payload / 0
            case "exit":
                raise SystemExit(7)
            case "lock":
                return threading.Lock()  # which no pickle carries
            case "wait":
                await asyncio.to_thread(self.may_end.wait, 30)
            case "apply":
                return payload()
            case "sent":
                return self.sent
        return payload


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    monkeypatch.setenv(ENV, TOKEN)
    return Service()


@pytest.fixture
def server(service: Service) -> Iterator[RpcServer]:
    server = RpcServer(service.handle, read=service.bulk.__getitem__)
    yield server
    service.may_end.set()
    server.close()


@pytest.fixture
def client(server: RpcServer) -> Iterator[RpcClient]:
    client = RpcClient(server.address, "group/0")
    yield client
    client.close()


def post(server: RpcServer, path: str, headers: dict[str, str], body: Any = b"") -> tuple[int, str]:
    """Sends a request as anybody could."""
    connection = http.client.HTTPConnection(server.address, timeout=10)
    connection.request("POST" if path.startswith("/call") else "GET", path, body, headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(errors="replace")


def instance(server: RpcServer) -> str:
    connection = http.client.HTTPConnection(server.address, timeout=10)
    head = Head(what="GET /hello", instance="", number="x.1", digest=seal(b"").digest)
    connection.request("GET", "/hello", headers=head.headers(TOKEN))
    answer = connection.getresponse()
    return Head.read("200 GET /hello", dict(answer.getheaders()), TOKEN).instance


def signed(server: RpcServer, packed: Packed, number: str = "me.1", token: str = TOKEN) -> Any:
    head = Head(
        what="POST /call/echo",
        instance=instance(server),
        number=number,
        digest=packed.digest,
        turn=int(number.partition(".")[2]),
    )
    return head.headers(token)


def test_calls_and_reads(client: RpcClient, service: Service) -> None:
    offset = 5
    assert client.call("apply", lambda: offset + 1) == 6  # code of this very file
    assert asyncio.run(client.acall("echo", {"a": (1, None)})) == {"a": (1, None)}
    packed = pack(7)
    assert client.call("echo", packed) == client.call("echo", packed) == 7
    [(key, raw)] = service.bulk.items()
    got = client.read(key)
    assert isinstance(got, bytearray) and got == raw


def test_nothing_of_a_stranger_is_unpickled(
    server: RpcServer, service: Service, tmp_path: Path
) -> None:
    bomb, honest = pack(Bomb(tmp_path / "mark")), pack("honest")
    attempts = [
        {},
        {"Authorization": f"Bearer {TOKEN}"},
        signed(server, bomb, token="guessed"),
        signed(server, bomb) | {"Megarl-Turn": "2"},
        signed(server, bomb) | {"Megarl-Number": "me.2"},
        signed(server, bomb) | {"Megarl-Instance": "0" * 16},
        signed(server, bomb) | {"Megarl-Signature": "ä"},
    ]
    for headers in attempts:
        assert post(server, "/call/echo", headers, bomb.body)[0] == 401, headers
    assert post(server, "/call/other", signed(server, bomb), bomb.body)[0] == 401  # another path
    # the head of a request that was overheard, with another body
    status, text = post(server, "/call/echo", signed(server, honest), bomb.body)
    assert status == 500 and "not the one that was signed" in text
    assert service.begun == [] and not (tmp_path / "mark").exists()
    post(server, "/call/echo", signed(server, bomb, "me.2"), bomb.body)
    assert (tmp_path / "mark").exists()  # had it been signed


def test_a_request_is_taken_once(server: RpcServer, service: Service) -> None:
    packed = pack(1)
    headers = signed(server, packed)
    assert post(server, "/call/echo", headers, packed.body)[0] == 200
    assert post(server, "/call/echo", headers, packed.body) == (401, "request me.1 came before")
    other = RpcServer(service.handle)
    try:  # nor by another process of the job
        status, text = post(other, "/call/echo", headers, packed.body)
    finally:
        other.close()
    assert (status, text) == (401, "POST /call/echo: the request is for another process")
    assert service.begun == [1]


def test_numbers_that_came_long_ago_are_refused() -> None:
    fresh = Fresh()
    for n in range(1, 3 * WINDOW):
        fresh.take(f"a.{n}")
    fresh.take("b.1")
    for n in (1, 2 * WINDOW - 1, 3 * WINDOW - 1):
        with pytest.raises(Refused, match=f"a.{n} came before"):
            fresh.take(f"a.{n}")


def test_an_answer_that_is_not_the_jobs_own_is_not_unpickled(
    client: RpcClient, service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(ENV, "another job's")
    other = RpcServer(service.handle)
    monkeypatch.setenv(ENV, TOKEN)
    stranger = RpcClient(other.address, "other")
    try:
        with pytest.raises(Refused, match="signature is not of this job's token"):
            stranger.call("echo", 1)
    finally:
        stranger.close()
        other.close()
    service.sent = pack(Bomb(tmp_path / "mark"))
    signed = Head.headers

    def forged(head: Head, token: str) -> Any:
        return signed(head, "x" if head.what.startswith("200 POST") else token)

    monkeypatch.setattr(Head, "headers", forged)
    with pytest.raises(Refused, match="signature is not of this job's token"):
        client.call("sent")
    assert not (tmp_path / "mark").exists()
    monkeypatch.setattr(Head, "headers", signed)
    client.call("sent")
    assert (tmp_path / "mark").exists()


def test_without_a_token_nobody_serves_or_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV, raising=False)
    with pytest.raises(ValueError, match=f"{ENV} is not set"):
        RpcServer(Service().handle)
    with pytest.raises(ValueError, match=f"{ENV} is not set"):
        RpcClient("127.0.0.1:9")


def test_it_listens_at_loopback_alone(server: RpcServer) -> None:
    host, _, port = server.address.partition(":")
    assert host == "127.0.0.1"
    listening = Path("/proc/net/tcp").read_text()
    assert f"0100007F:{int(port):04X} 00000000:0000 0A" in listening


def test_big_bodies_both_ways(client: RpcClient, service: Service) -> None:
    big = os.urandom(1 << 20) * 64
    assert client.call("echo", big) == big
    service.bulk["big"] = memoryview(bytearray(big)).cast("d")
    got = client.read("big")
    got[0] ^= 1  # a buffer of its own
    assert got[1:] == big[1:]


def test_an_address_may_name_rows_of_a_big_batch(client: RpcClient, service: Service) -> None:
    torch = pytest.importorskip("torch")  # missing in make test-py312
    from megarl.controller.messages import rows_path

    path = rows_path("trainers", ["12.3"], torch.arange(0, 1 << 20, 3), 1 << 20)
    service.bulk[path] = b"rows"
    assert client.read(path) == b"rows"


def test_two_hundred_calls_at_once_begin_in_their_order(
    client: RpcClient, service: Service
) -> None:
    waiting = client.call_async("wait", -1)
    # later ones are smaller, and would overtake
    sizes = [client.call_async("length", bytes(1000 * (200 - i))) for i in range(200)]
    echoed = [client.call_async("echo", i) for i in range(200)]
    assert [f.result(30) for f in sizes] == [1000 * (200 - i) for i in range(200)]
    assert [f.result(30) for f in echoed] == list(range(200))
    assert service.begun == [-1, *["length"] * 200, *range(200)]
    assert not waiting.done()
    service.may_end.set()
    assert waiting.result(30) == -1


def test_a_call_that_cannot_be_read_takes_its_turn(client: RpcClient, service: Service) -> None:
    """Else later calls would wait for it."""
    wrong = Packed(pack(1).body, pack(2).digest)
    with pytest.raises(RemoteError, match="Refused: the body is not the one that was signed"):
        client.call("echo", wrong)
    assert client.call("echo", 3, timeout=30) == 3 and service.begun == [3]


def test_errors_carry_the_remote_traceback(client: RpcClient) -> None:
    with pytest.raises(RemoteError) as e:
        client.call("divide", 3)
    assert (e.value.kind, e.value.text) == ("ZeroDivisionError", "division by zero")
    assert str(e.value).startswith("worker group/0: ZeroDivisionError: division by zero\n")
    assert "return payload / 0" in str(e.value)
    again = pickle.loads(pickle.dumps(e.value))
    assert str(again) == str(e.value)
    with pytest.raises(RemoteError, match="SystemExit: 7"):
        client.call("exit")
    with pytest.raises(RemoteError, match=r"TypeError: cannot pickle '_thread.lock'"):
        client.call("lock")
    with pytest.raises(RemoteError, match="KeyError: 'none'"):
        client.read("none")
    assert client.call("echo", 1) == 1


def test_a_call_that_takes_too_long_goes_on(client: RpcClient, service: Service) -> None:
    with pytest.raises(TimeoutError, match=r"worker group/0: call wait has no answer after 0.2 s"):
        client.call("wait", 1, timeout=0.2)
    assert client.call("echo", 2) == 2 and service.begun == [1, 2]


def test_a_coroutine_that_is_cancelled_leaves_no_gap(client: RpcClient, service: Service) -> None:
    async def cancelled() -> None:
        task = asyncio.ensure_future(client.acall("wait", 1))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert client.call_async("echo", 2).cancel()
    assert client.call("echo", 3, timeout=30) == 3 and service.begun == [1, 2, 3]


def test_a_death_that_is_told_ends_calls_under_way_and_later_ones(
    client: RpcClient, service: Service
) -> None:
    waiting = client.call_async("wait", 1)
    client.call("echo", 2)
    client.fail(WorkerDied("worker group/0 ended with status 9"))
    errors = [future.exception(30) for future in (waiting, client.call_async("echo", 3))]
    assert {type(e) for e in errors} == {WorkerDied}
    assert {str(e) for e in errors} == {"worker group/0 ended with status 9"}
    assert errors[0] is not errors[1]  # each has the traceback of its call
    assert service.begun == [1, 2]


def test_a_lost_connection_ends_a_client(server: RpcServer, service: Service) -> None:
    client = RpcClient(server.address, "group/1")
    waiting = client.call_async("wait", 1)
    client.call("echo", 2)
    server.close()
    try:
        for future in (waiting, client.call_async("echo", 3)):
            with pytest.raises(RpcError, match=r"worker group/1: the connection to .* was lost"):
                future.result(30)
    finally:
        client.close()
    with pytest.raises(RpcError):
        client.call("echo", 3)


def test_threads_that_come_first_at_once_share_a_token_and_a_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []

    def slowly(*args: Any) -> str:
        time.sleep(0.02)
        made.append(str(len(made)))
        return made[-1]

    monkeypatch.setenv(ENV, "")
    monkeypatch.setattr(job_token.secrets, "token_hex", slowly)
    fresh = runpy.run_path(str(loop.__file__))  # in which nobody has asked yet
    monkeypatch.setitem(fresh["client_loop"].__globals__, "Loop", slowly)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: ensure_job_token(), range(8))) == {"0"}
        assert set(pool.map(lambda _: fresh["client_loop"](), range(8))) == {"1"}
