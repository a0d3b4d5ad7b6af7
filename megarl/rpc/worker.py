"""Is a worker process: serves the calls of whoever started it.

    MEGARL_WORKER='{...}' MEGARL_JOB_TOKEN=... python -m megarl.rpc.worker

The variable is a WorkerStart as JSON, which a scheduler (megarl.rpc.group) or a launcher sets,
beside the worker's place in the group (`rank_env`). The worker imports what it serves, then links
to whoever started it, and calls come over that link. When it is asked to end, or at SIGTERM, it
ends after the call that runs, with status 0; at a second signal at once. The end of the link ends
it, and all that it started.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from importlib import import_module
from queue import SimpleQueue
from types import FrameType
from typing import Any, Self

from megarl.rpc.errors import Refused, RpcError
from megarl.rpc.link import Handler, Link, Listener, connect
from megarl.utils.child import TERM_TIMEOUT
from megarl.utils.env import address_towards, quiet_libraries, set_trainer_defaults
from megarl.utils.http import settle, split_address
from megarl.utils.importing import add_working_directory, load_object
from megarl.utils.stacks import dump_on_signal

ENV = "MEGARL_WORKER"
MEET_TIMEOUT = 1800.0  # seconds that a launched worker waits for its controller to listen
END, STARTER = "end", "whoever started this worker"
GRACE = 5.0  # seconds between SIGTERM and SIGKILL for what it started
_LOOK = 1.0


@dataclass(frozen=True, kw_only=True)
class WorkerStart:
    """Tells a worker who calls it (host:port), of which group it is number `index`, what to serve
    and with which options, and that process's directory and import path. launched: a launcher
    starts both, so that the other one may not listen yet, and SIGTERM is for it to decide."""

    starter: str
    group: str
    index: int
    count: int
    serve: str
    options: Mapping[str, Any]
    directory: str
    path: tuple[str, ...]
    launched: bool = False

    def to_env(self) -> dict[str, str]:
        """Returns the variable that a worker reads. Raises TypeError where an option is not plain
        data."""
        return {ENV: json.dumps(asdict(self))}

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self:
        """Returns what the variable says. Raises ValueError where it is missing."""
        if ENV not in env:
            raise ValueError(f"{ENV} is not set: a scheduler starts workers")
        return cls(**json.loads(env[ENV]))


@dataclass(frozen=True, kw_only=True)
class Worker:
    """Names a worker that serves: group/index, its address host:port, its machine and process."""

    name: str
    index: int
    address: str
    host: str
    pid: int

    def __str__(self) -> str:
        return f"{self.name} ({self.host}, {self.pid})"


def rank_env(rank: int, nodes: Sequence[int], host: str, port: str) -> dict[str, str]:
    """Returns what torchrun sets for a rank. nodes: the node of each rank. host, port: where the
    ranks meet."""
    node, order = nodes[rank], list(dict.fromkeys(nodes))
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(nodes[:rank].count(node)),
        "WORLD_SIZE": str(len(nodes)),
        "LOCAL_WORLD_SIZE": str(nodes.count(node)),
        "GROUP_RANK": str(order.index(node)),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }


class MainThread:
    """Runs calls on the thread that is in `run`, as CUDA, torch.distributed and signals want it."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()  # of future, fn, args
        self.ending = False

    def call(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        """Returns the Future of fn(*args), called behind all that was asked for before."""
        future: Future[Any] = Future()
        self._queue.put((future, fn, *args))
        return future

    def run(self) -> None:
        """Makes the calls, one after another, until `end`."""
        while (job := self._queue.get()) is not None and not self.ending:
            settle(*job)  # a SystemExit of a call is its caller's to see

    def end(self) -> None:
        """Has `run` return when the call that runs is done. A signal handler may call it."""
        self.ending = True
        self._queue.put(None)


_main_thread = MainThread()
on_main_thread = _main_thread.call


def main() -> int:
    """Serves until it is asked to end, or its link does; returns the exit status."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # what it starts ends with it
    dump_on_signal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: for whoever started us to decide
    start = WorkerStart.from_env(os.environ)
    if start.launched:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.chdir(start.directory)
    set_trainer_defaults(os.environ)
    quiet_libraries()
    add_working_directory()
    sys.path.extend(p for p in start.path if p not in sys.path)
    serve = load_object(start.serve, what="worker")
    serving = _Serving(serve(start.index, start.count, start.options))
    starter = _link(start, serving)
    _main_thread.run()
    serving.handler.close()
    if serving.abandoned.is_set():
        starter.thread.join()  # which ends what is left
    return 0


class _Serving:
    """Answers the calls of whoever started the worker, and of other workers."""

    def __init__(self, handler: Handler) -> None:
        self.handler, self.abandoned = handler, threading.Event()

    def handle(self, verb: str, payload: Any, link: Link) -> Any:
        if verb == END:
            return _main_thread.end()
        return self.handler.handle(verb, payload)

    def lost(self) -> None:
        """Ends this process, and what it started, where the link to whoever started it has ended.
        The thread of the link is in it."""
        if _main_thread.ending:  # as it was asked to: it has as long as whoever asked would wait
            time.sleep(TERM_TIMEOUT)
        else:
            print("whoever started this worker is gone; ending", flush=True)
            self.abandoned.set()
            os.killpg(0, signal.SIGTERM)
            time.sleep(GRACE)
        os.killpg(0, signal.SIGKILL)


def _link(start: WorkerStart, serving: _Serving) -> Link:
    """Listens to other workers, and links to whoever started this one. Raises RpcError where nobody
    listens, of a launched worker after MEET_TIMEOUT seconds."""
    host = address_towards(split_address(start.starter)[0])
    worker = Worker(
        name=f"{start.group}/{start.index}",
        index=start.index,
        address=Listener(serving.handle, host=host).address,
        host=socket.gethostname(),
        pid=os.getpid(),
    )
    deadline = time.monotonic() + (MEET_TIMEOUT if start.launched else 0.0)
    while True:
        try:
            starter = connect(start.starter, STARTER, serving.handle)
            break
        except RpcError as e:
            if isinstance(e, Refused) or time.monotonic() > deadline:
                raise
            time.sleep(_LOOK)
    starter.lost = serving.lost
    # before there was nothing to lose; whoever is told that it is ready may signal at once
    if not start.launched:
        signal.signal(signal.SIGTERM, _on_signal)
    starter.call("ready", worker)
    return starter


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Ends the worker after the call that runs, at a second signal at once."""
    if _main_thread.ending:
        os._exit(128 + number)
    _main_thread.end()


if __name__ == "__main__":
    # what is served imports this module by its name
    sys.exit(import_module("megarl.rpc.worker").main())
