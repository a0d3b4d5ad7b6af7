"""Workers of the controller as threads of this process, with the messages that processes get."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import cloudpickle
import torch

from megarl.controller.group import WorkerGroup
from megarl.controller.messages import READ, Peer, Rows
from megarl.controller.worker import Calls
from megarl.rpc.errors import RemoteError
from megarl.rpc.link import Packed, pack
from megarl.rpc.worker import Worker
from megarl.utils.user_errors import RemoteTrace


class ThreadComm:
    """The Comm of a thread that stands for a rank."""

    def __init__(self, rank: int, size: int, meeting: threading.Barrier, said: dict) -> None:
        self.rank, self.size, self._meeting, self._said = rank, size, meeting, said

    def all_gather(self, data: torch.Tensor, name: str = "") -> list[torch.Tensor]:
        self._said[self.rank] = data.clone()
        self._meeting.wait()
        found = [self._said[rank] for rank in range(self.size)]
        self._meeting.wait()
        return found


class ThreadChannel:
    """One worker, whose calls run in a thread, one after the other."""

    def __init__(self, name: str, fetch: Any, comm: ThreadComm | None) -> None:
        self.comm = comm
        self.worker_calls = Calls(name, fetch, lambda: self.comm)
        self.worker = Worker(
            name=name, index=int(name.split("/")[1]), address="", host="here", pid=0
        )
        self.reads: list[Rows] = []
        self.calls = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def call_async(self, verb: str, payload: Any = None) -> Future[Any]:
        self.calls += 1
        packed = payload if isinstance(payload, Packed) else pack(payload)
        return self._thread.submit(self._answer, verb, packed)

    def _answer(self, verb: str, packed: Packed) -> Any:
        try:
            body, *raw = packed.parts
            answer = self.worker_calls.handle(verb, pickle.loads(body, buffers=raw))
        except Exception as e:
            trace = RemoteTrace.of(e)
            raise RemoteError(str(self.worker), type(e).__name__, str(e), trace) from trace
        return pickle.loads(cloudpickle.dumps(answer))

    def call(self, verb: str, payload: Any = None, timeout: float | None = None) -> Any:
        if verb == READ:  # which is answered at once
            return self.read(payload)
        return self.call_async(verb, payload).result(timeout)

    def read(self, key: Rows) -> bytearray:
        self.reads.append(key)
        return self.worker_calls.store.read(key)

    def close(self) -> None:
        self._thread.shutdown()


@contextmanager
def workers(**sizes: int) -> Iterator[list[WorkerGroup]]:
    """Groups of so many workers, by name; any of them can read from all."""
    channels: dict[str, ThreadChannel] = {}

    def fetch(peer: Peer, path: Rows) -> bytearray:
        return channels[peer.name].read(path)

    groups = []
    for name, size in sizes.items():
        meeting, said = threading.Barrier(size, timeout=20), {}
        for rank in range(size):
            comm = ThreadComm(rank, size, meeting, said) if size > 1 else None
            channels[f"{name}/{rank}"] = ThreadChannel(f"{name}/{rank}", fetch, comm)
        mine = [c for key, c in channels.items() if key.startswith(f"{name}/")]
        groups.append(WorkerGroup(name, [c.worker for c in mine], mine))
    try:
        yield groups
    finally:
        for channel in channels.values():
            channel.close()
