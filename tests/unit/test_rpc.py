"""Links between two processes of a job: what strangers get, order, errors, big messages."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megarl.rpc import frames
from megarl.rpc import link as links
from megarl.rpc.errors import Refused, RemoteError, RpcError, WorkerDied
from megarl.rpc.frames import LARGEST, introduce
from megarl.rpc.link import APART, CALL, Link, Listener, connect, pack
from megarl.utils import env
from megarl.utils.child import wait_until
from megarl.utils.env import JOB_TOKEN, ensure_job_token
from megarl.utils.user_errors import user_lines

ROOT = Path(__file__).parents[2]
TOKEN = "the-tests-secret"


class Bomb:
    """Makes a directory where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class Service:
    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.links: list[Link] = []
        self.may_end = threading.Event()
        self.pool = ThreadPoolExecutor()

    def handle(self, verb: str, payload: Any, link: Link) -> Any:
        self.begun.append(payload if isinstance(payload, int) else verb)
        if link not in self.links:
            self.links.append(link)
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
                return self.pool.submit(self.waited, payload)
            case "apply":
                return payload()
            case "raw":
                return pickle.PickleBuffer(payload)
            case "back":
                return self.pool.submit(link.call, "echo", payload)
        return payload

    def waited(self, payload: Any) -> Any:
        self.may_end.wait(30)
        return payload


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv(JOB_TOKEN, TOKEN)
    service = Service()
    yield service
    service.may_end.set()
    service.pool.shutdown()


@pytest.fixture
def listener(service: Service) -> Iterator[Listener]:
    listener = Listener(service.handle)
    yield listener
    listener.close()
    for link in service.links:
        link.close()


@pytest.fixture
def link(listener: Listener) -> Iterator[Link]:
    link = connect(listener.address, "group/0", lambda verb, payload, link: [verb, payload])
    yield link
    link.close()


def dialed(listener: Listener) -> socket.socket:
    host, _, port = listener.address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=20)


def ended(sock: socket.socket) -> bool:
    """Whether the other end lets go, after whatever it still says."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def test_calls_go_both_ways(link: Link) -> None:
    offset = 5
    assert link.call("apply", lambda: offset + 1) == 6  # code of this very file
    assert asyncio.run(link.acall("echo", {"a": (1, None)})) == {"a": (1, None)}
    packed = pack(7)
    assert link.call("echo", packed) == link.call("echo", packed) == 7
    assert link.call("back", 3) == ["echo", 3]
    raw = link.call("raw", bytearray(b"abc"))
    raw[0] = 0  # a buffer of its own
    assert raw == b"\0bc"


def test_tensors_keep_every_bit_and_nothing_else_of_theirs(link: Link) -> None:
    torch = pytest.importorskip("torch")  # CI's Python 3.12 has none
    whole = torch.arange(6 * APART, dtype=torch.float64).reshape(APART, 6)
    data = {
        "strided": whole.t(),
        "part": whole[:, 1:3],
        "small": whole[:2],
        "scalar": torch.tensor(float("nan")),
        "none": torch.empty(0, 3, dtype=torch.int16),
        "mask": torch.tensor([True, False]),
        "half": torch.tensor([1.5, -0.0]).bfloat16(),
        "plain": [1, "two", (None, {"k": b"raw"})],
    }
    back = link.call("echo", data)
    assert sum(map(len, pack(whole[:2]).parts)) < APART  # without the rest of its storage
    for name, value in data.items():
        if isinstance(value, torch.Tensor):
            assert back[name].dtype == value.dtype and back[name].shape == value.shape
            raw = [
                v.contiguous().reshape(-1).view(torch.uint8).tolist() for v in (back[name], value)
            ]
            assert raw[0] == raw[1]
    assert back["plain"] == data["plain"]
    back["mask"][0] = back["strided"][0, 0] = 1  # they can be written to


def test_what_is_sent_while_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread: then the module is there, and has nothing yet."""
    sent = Path("a") / "b"
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert pickle.loads(pack(sent).parts[0]) == sent


def test_a_link_over_ipv6(service: Service) -> None:
    with closing(Listener(service.handle, host="::1")) as listener:
        assert listener.address.startswith("[::1]:")
        with closing(connect(listener.address)) as link:
            assert link.call("echo", 1) == 1


@pytest.mark.parametrize("wrong", ["token", "proof", "reflected", "nothing", "garbage"])
def test_nothing_of_a_stranger_is_unpickled(
    listener: Listener,
    service: Service,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wrong: str,
) -> None:
    monkeypatch.setattr(frames, "GREET_TIMEOUT", 0.5)
    bomb = pack(Bomb(tmp_path / "mark"))
    with closing(dialed(listener)) as sock:
        if wrong == "token":
            with pytest.raises(Refused, match=JOB_TOKEN):
                introduce(sock, "guessed")
        else:
            hello = sock.recv(1 << 10)
            sock.sendall(
                {"proof": os.urandom(64), "reflected": hello[-32:] + hello[-32:], "nothing": b"",
                 "garbage": b"GET / HTTP/1.1\r\n\r\n" * 9}[wrong]
            )  # fmt: skip
            if wrong != "nothing":
                with suppress(ConnectionError):
                    sock.sendall(struct.pack("<QBIQQ16s", 0, CALL, 2, 4, 9, b"") + bomb.parts[0])
        assert ended(sock)
    assert service.begun == [] and not (tmp_path / "mark").exists()
    with closing(connect(listener.address)) as honest:
        honest.call("echo", bomb)
    assert (tmp_path / "mark").exists()  # had it been of the job


class Tap:
    """A connection whose bytes are noted, and may be changed, as by somebody on the wire."""

    def __init__(self, to: str) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.server.getsockname()[1]}"
        self.sent: list[bytes] = []
        self.change: Callable[[bytes], bytes] = bytes
        self.to = to
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        near, _ = self.server.accept()
        host, _, port = self.to.rpartition(":")
        self.far = socket.create_connection((host, int(port)))
        threading.Thread(target=self.copy, args=(self.far, near, bytes), daemon=True).start()
        self.copy(near, self.far, self.note)

    def note(self, data: bytes) -> bytes:
        self.sent.append(data)
        return self.change(data)

    @staticmethod
    def copy(source: socket.socket, target: socket.socket, change: Callable[..., bytes]) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 20):
                target.sendall(change(data))
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


@contextmanager
def tapped(listener: Listener) -> Iterator[tuple[Tap, Link]]:
    tap = Tap(listener.address)
    with closing(connect(tap.address, "group/0")) as link:
        assert link.call("echo", 1) == 1
        yield tap, link


def test_a_frame_that_is_changed_on_its_way_ends_the_link(
    listener: Listener, service: Service, tmp_path: Path
) -> None:
    with tapped(listener) as (tap, link):
        tap.change = lambda data: data.replace(b"echo", b"exit")
        with pytest.raises(RpcError, match="link to group/0 lost"):
            link.call("echo", 2)
    assert service.begun == [1]


def test_a_frame_that_is_sent_again_ends_the_link(listener: Listener, service: Service) -> None:
    with tapped(listener) as (tap, link):
        tap.far.sendall(tap.sent[-1])
        with pytest.raises(RpcError, match="link to group/0 lost"):
            link.call("echo", 2)
    assert service.begun == [1]


def test_a_whole_connection_that_is_sent_again_is_a_strangers(
    listener: Listener, service: Service
) -> None:
    with tapped(listener) as (tap, _), closing(dialed(listener)) as again:
        again.sendall(b"".join(tap.sent))
        assert ended(again)
        other = Listener(service.handle)  # another process of the job
        with closing(dialed(other)) as again:
            again.sendall(b"".join(tap.sent))
            assert ended(again)
        other.close()
    assert service.begun == [1]


def test_half_a_frame_harms_nobody_else(listener: Listener, link: Link, service: Service) -> None:
    with closing(dialed(listener)) as sock:
        wire = introduce(sock, TOKEN)
        wire.send(0, CALL, (b"echo", *pack(1).parts))
        assert wire.receive()[0] == 0
        sock.sendall(struct.pack("<QBIQQ16s", 1, CALL, 2, 4, 9, b"")[:9])
        assert link.call("echo", 2) == 2
    assert link.call("echo", 3) == 3
    assert sorted(service.begun) == [1, 2, 3]


@pytest.mark.parametrize("parts", [0, 1 << 20])
def test_a_frame_of_no_sense_ends_its_link(listener: Listener, parts: int) -> None:
    with closing(dialed(listener)) as sock:
        introduce(sock, TOKEN)
        sock.sendall(struct.pack("<QBIQQ16s", 0, CALL, parts, 0, 0, b""))
        assert ended(sock)


def test_what_is_too_large_is_not_sent(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "LARGEST", 1000)
    with pytest.raises(ValueError, match=r"a message of [\d,]+ bytes .* 1,000 bytes"):
        link.call("echo", bytes(2000))
    assert link.call("echo", 1) == 1
    with pytest.raises(RemoteError, match="ValueError: a message of"):
        link.call("apply", lambda: bytes(2000))
    assert link.call("echo", 2) == 2
    assert LARGEST > 1 << 30


def test_silent_strangers_keep_nobody_out(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """800 of them: they get a moment each, 64 at a time, in threads that end."""
    monkeypatch.setattr(frames, "GREET_TIMEOUT", 0.2)
    before = threading.active_count()
    waiting: list[int] = []  # one for each stranger that the listener listens to
    most = 0

    def greet(*args: Any) -> Any:
        nonlocal most
        waiting.append(1)
        most = max(most, len(waiting))
        try:
            return frames.greet(*args)
        finally:
            waiting.pop()

    monkeypatch.setattr(links, "greet", greet)
    with ExitStack() as stack:
        strangers = [stack.enter_context(closing(dialed(listener))) for _ in range(800)]
        with ThreadPoolExecutor(1) as pool:
            joined: Future[Link] = pool.submit(connect, listener.address)
        with closing(joined.result()) as link:
            assert link.call("echo", 1) == 1
        assert all(map(ended, strangers))
    assert 32 <= most <= 64
    # the two ends of the link that joined may be there still
    assert wait_until(lambda: threading.active_count() <= before + 4, timeout=60)


def test_sixty_four_workers_come_at_once(listener: Listener) -> None:
    with ThreadPoolExecutor(64) as pool, ExitStack() as stack:
        links = list(pool.map(lambda _: connect(listener.address), range(64)))
        for link in links:
            stack.callback(link.close)
        futures = [link.call_async("echo", i) for i, link in enumerate(links)]
        assert [future.result(30) for future in futures] == list(range(64))


def test_another_jobs_listener_is_refused(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Listener(service.handle)) as listener:
        monkeypatch.setenv(JOB_TOKEN, "another job's")
        with pytest.raises(Refused, match=f"link to other: .*{JOB_TOKEN}"):
            connect(listener.address, "other")
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        threading.Thread(target=lambda: server.accept()[0].sendall(b"HTTP" * 99)).start()
        with pytest.raises(Refused, match="no process of megarl's"):
            connect(f"127.0.0.1:{server.getsockname()[1]}")
    with pytest.raises(RpcError, match="link to group/1: nobody listens at"):
        connect(listener.address, "group/1")


def test_without_a_token_nobody_serves_or_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOB_TOKEN, raising=False)
    with pytest.raises(ValueError, match=f"{JOB_TOKEN} is not set"):
        Listener(Service().handle)
    with pytest.raises(ValueError, match=f"{JOB_TOKEN} is not set"):
        connect("127.0.0.1:9")


def test_it_listens_at_loopback_alone(listener: Listener) -> None:
    host, _, port = listener.address.partition(":")
    assert host == "127.0.0.1"
    listening = Path("/proc/net/tcp").read_text()
    assert f"0100007F:{int(port):04X} 00000000:0000 0A" in listening


@pytest.mark.parametrize(
    "size", [64 << 20, pytest.param(1 << 30, marks=pytest.mark.full)], ids=["64MB", "1GB"]
)
def test_large_messages_both_ways_at_once(link: Link, service: Service, size: int) -> None:
    big = bytearray(os.urandom(1 << 20)) * (size >> 20)
    link.call("echo", 0)
    [back] = service.links
    there = [link.call_async("raw", big) for _ in range(2)]
    with ThreadPoolExecutor(1) as pool:
        here = pool.submit(back.call, "echo", big)
        assert all(f.result(120) == big for f in there)
        assert here.result(120)[1] == big
    assert link.call("length", bytes(size)) == size  # within the pickle


def test_two_hundred_calls_at_once_begin_in_their_order(link: Link, service: Service) -> None:
    waiting = link.call_async("wait", -1)
    sizes = [link.call_async("length", bytes(1000 * (200 - i))) for i in range(200)]
    echoed = [link.call_async("echo", i) for i in range(200)]
    assert [f.result(30) for f in sizes] == [1000 * (200 - i) for i in range(200)]
    assert [f.result(30) for f in echoed] == list(range(200))
    assert service.begun == [-1, *["length"] * 200, *range(200)]
    assert not waiting.done()
    service.may_end.set()
    assert waiting.result(30) == -1


def test_threads_share_a_link(link: Link) -> None:
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda i: link.call("echo", i), range(500))) == list(range(500))


def test_errors_carry_the_remote_traceback(link: Link) -> None:
    with pytest.raises(RemoteError) as e:
        link.call("divide", 3)
    assert (e.value.kind, e.value.text) == ("ZeroDivisionError", "division by zero")
    assert str(e.value) == "worker group/0: ZeroDivisionError: division by zero"
    again = pickle.loads(pickle.dumps(e.value))
    for error in (e.value, again):
        assert user_lines(error)[0].line == "return payload / 0"
        assert "link.py" in str(error.__cause__)  # megarl's frames are there, too
    assert str(again) == str(e.value)
    with pytest.raises(RemoteError, match="SystemExit: 7"):
        link.call("exit")
    with pytest.raises(RemoteError, match=r"TypeError: cannot pickle '_thread.lock'"):
        link.call("lock")
    with pytest.raises(TypeError, match=r"cannot pickle '_thread.lock'"):
        link.call("echo", threading.Lock())
    assert link.call("echo", 1) == 1


def fails_oddly() -> None:
    """Raises an error without text in a file that the system refuses to look up."""

    class Mute(RuntimeError):
        def __str__(self) -> str:
            raise ValueError("no text")

    exec(compile("raise error", "/" + "f" * 5000, "exec"), {"error": Mute()})


def test_calls_after_an_odd_error_are_answered(link: Link) -> None:
    with pytest.raises(RemoteError, match="Mute"):
        link.call("apply", fails_oddly, timeout=20)
    assert link.call("echo", 1, timeout=20) == 1


def test_a_call_that_takes_too_long_goes_on(link: Link, service: Service) -> None:
    with pytest.raises(TimeoutError, match=r"worker group/0: call wait has no answer after 0.2 s"):
        link.call("wait", 1, timeout=0.2)
    assert link.call("echo", 2) == 2 and service.begun == [1, 2]


def test_a_coroutine_that_is_cancelled_leaves_no_gap(link: Link, service: Service) -> None:
    async def cancelled() -> None:
        task = asyncio.ensure_future(link.acall("wait", 1))
        while not service.begun:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    future = link.call_async("wait", 2)
    assert future.cancel()
    service.may_end.set()
    assert link.call("echo", 3, timeout=30) == 3 and service.begun == [1, 2, 3]


def test_a_death_that_is_told_ends_calls_under_way_and_later_ones(
    link: Link, service: Service
) -> None:
    waiting = link.call_async("wait", 1)
    link.call("echo", 2)
    link.fail(WorkerDied("worker group/0 ended with status 9"))
    errors = [future.exception(30) for future in (waiting, link.call_async("echo", 3))]
    assert {type(e) for e in errors} == {WorkerDied}
    assert {str(e) for e in errors} == {"worker group/0 ended with status 9"}
    assert errors[0] is not errors[1]  # each has the traceback of its call
    assert service.begun == [1, 2]


def test_a_lost_link_is_an_error_for_all_calls(link: Link, service: Service) -> None:
    lost = threading.Event()
    link.lost = lost.set
    waiting = link.call_async("wait", 1)
    link.call("echo", 2)
    service.links[0].close()
    for future in (waiting, link.call_async("echo", 3)):
        with pytest.raises(RpcError, match="link to group/0 lost"):
            future.result(30)
    assert lost.is_set()


def test_who_hears_of_a_lost_link_may_say_why(link: Link, service: Service) -> None:
    link.lost = lambda: link.fail(WorkerDied("it was the disk"))
    waiting = link.call_async("wait", 1)
    link.call("echo", 2)
    service.links[0].close()
    with pytest.raises(WorkerDied, match="it was the disk"):
        waiting.result(30)


FROZEN = """
import sys, time
from megarl.rpc.link import Listener
listener = Listener(lambda verb, payload, link: len(payload))
print(listener.address, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    "seconds", [3.0, pytest.param(65.0, marks=pytest.mark.full)], ids=["briefly", "65s"]
)
def test_a_process_that_stands_still_in_mid_frame_is_waited_for(
    service: Service, seconds: float
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", FROZEN], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        with closing(connect(process.stdout.readline().strip(), "frozen")) as link:
            assert link.call("length", b"abc") == 3
            os.kill(process.pid, signal.SIGSTOP)
            big = bytearray(64 << 20)
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(link.call, "length", big)
                time.sleep(seconds)
                assert not answer.done()
                os.kill(process.pid, signal.SIGCONT)
                assert answer.result(60) == len(big)
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(RpcError, match="link to frozen lost"):
                link.call("length", b"")
    finally:
        process.kill()
        process.communicate()


def test_threads_that_come_first_at_once_share_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def slowly(*args: Any) -> str:
        time.sleep(0.02)
        made.append(str(len(made)))
        return made[-1]

    monkeypatch.setenv(JOB_TOKEN, "")
    monkeypatch.setattr(env.secrets, "token_hex", slowly)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: ensure_job_token(), range(8))) == {"0"}
