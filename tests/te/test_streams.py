"""On which CUDA stream the parts of a sync run, told by recorders in the place of torch.cuda's.

As in torch, the current stream is each thread's own and begins as the device's default one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megarl.api.records import ServersLost
from megarl.utils.http import HttpError
from megarl.weight_sync import broadcast as module
from megarl.weight_sync.broadcast import UpdateChannel
from megarl.weight_sync.servers import Answer, Deadline, ServerInfo, Servers

SERVER = "127.0.0.1:30000"


class Device:
    """A GPU that does no work, and remembers what was asked of which stream.

    hangs: set, neither a broadcast nor the stream it was queued on ends before `ended` is set.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.hangs, self.ended = False, threading.Event()
        self.default = self.side = Recorder(self, "default")
        self._current = threading.local()

    def current_stream(self, device: Any = None) -> Recorder:
        return getattr(self._current, "stream", self.default)

    @contextmanager
    def stream(self, stream: Recorder) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def say(self, what: str) -> None:
        self.log.append((what, self.current_stream().name))


class Recorder:
    """A torch.cuda.Stream. `after`: the streams whose work so far it waits for."""

    def __init__(self, device: Device, name: str = "side") -> None:
        self.device, self.name, self.after = device, name, set[str]()
        self.broadcasts = False

    def wait_stream(self, other: Recorder) -> None:
        self.after.add(other.name)

    def synchronize(self) -> None:
        if self.broadcasts and self.device.hangs:
            assert self.device.ended.wait(20)
            raise RuntimeError("NCCL communicator was aborted")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()

    def broadcast(tensor: torch.Tensor, **_: Any) -> Any:
        device.say("broadcast")
        device.current_stream().broadcasts = True  # NCCL's own stream, which `wait` joins to ours
        return SimpleNamespace(
            wait=lambda: device.say("wait"),
            is_completed=lambda: not device.hangs or device.ended.is_set(),
        )

    def stream(_: Any) -> Recorder:
        device.side = Recorder(device)
        return device.side

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", device.current_stream)
    monkeypatch.setattr(torch.cuda, "stream", device.stream)
    monkeypatch.setattr(module.dist, "broadcast", broadcast)
    monkeypatch.setattr(module, "listen", lambda *_, **__: SimpleNamespace(port=1))
    monkeypatch.setattr(module, "init_update_group", lambda **_: SimpleNamespace())
    monkeypatch.setattr(module, "set_group_timeout", lambda *_: None)
    monkeypatch.setattr(module, "destroy_update_group", lambda *_, abort: device.ended.set())
    return device


class OneServer:
    """Joins at once; answers an update when the test says so."""

    addresses = (SERVER,)

    def __init__(self) -> None:
        self.answer: Future[Answer] = Future()

    def receivers(self, deadline: Deadline) -> dict[str, ServerInfo]:
        return {SERVER: ServerInfo(tp=1, embedded=False)}

    def start(self, path: str, *_: Any) -> dict[str, Future[Answer]]:
        done: Future[Answer] = Future()
        done.set_result(Answer({}, 0.0))
        return {SERVER: self.answer if "update_weights" in path else done}

    def abandon_update(self, timeout: float) -> dict[str, Future[Answer]]:
        return {}


def send(server: OneServer, timeout: float = 20.0) -> tuple[UpdateChannel, Any]:
    channel = UpdateChannel(
        cast(Servers, server), backend="nccl", device=torch.device("cuda"),
        deadline=Deadline(timeout),
    )  # fmt: skip
    return channel, channel.deliver("bucket 1", torch.zeros(4), {}, Deadline(timeout))


def test_broadcasts_leave_the_main_stream_alone(gpu: Device) -> None:
    server = OneServer()
    _, exchange = send(server)
    server.answer.set_result(Answer({}, 0.0))
    exchange.wait(Deadline(20))
    assert gpu.log == [("broadcast", "side"), ("wait", "side")]
    assert gpu.side.after == {"default"}  # of what it sends
    assert not gpu.default.after and not gpu.default.broadcasts


def test_a_server_that_dies_in_a_broadcast_is_lost_and_the_broadcast_ended(gpu: Device) -> None:
    """The main thread may read from the device meanwhile: its stream waits for nothing."""
    gpu.hangs, server = True, OneServer()
    channel, exchange = send(server)
    gpu.default.synchronize()
    gone = HttpError(SERVER, "POST /update_weights_from_distributed", "the connection broke")
    server.answer.set_exception(gone)
    with pytest.raises(ServersLost, match=f"{SERVER}.*the connection broke"):
        exchange.wait(Deadline(20))
    assert not exchange.ours.done()
    channel.close(abort=True)
    with pytest.raises(RuntimeError, match="aborted"):
        exchange.ours.result(20)


def test_an_answer_does_not_free_the_memory_of_a_broadcast_under_way(gpu: Device) -> None:
    """A bucket's memory is written again after `wait`: it returns after both have ended."""
    gpu.hangs, server = True, OneServer()
    _, exchange = send(server)
    server.answer.set_result(Answer({}, 0.0))
    with pytest.raises(RuntimeError, match="the collective, though every server answered"):
        exchange.wait(Deadline(0.1))
    gpu.ended.set()
