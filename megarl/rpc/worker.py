"""Is a worker process: serves the calls of whoever started it.

    MEGARL_WORKER='{...}' MEGARL_JOB_TOKEN=... python -m megarl.rpc.worker

The variable is a WorkerStart as JSON, which a scheduler (megarl.rpc.local) or a launcher sets. The
worker links to whoever started it, learns its place in the group (RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, MASTER_PORT), imports what it serves, and says that it is ready; calls come over the
same link. When it is asked to end, or at SIGTERM, it ends after the call that runs, with status 0;
at a second signal at once. The end of the link ends it, and all that it started.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from queue import SimpleQueue
from types import FrameType
from typing import Any, Self

from megarl.rpc.errors import Refused, RpcError
from megarl.rpc.link import Handler, Link, Listener, connect, split
from megarl.utils.child import TERM_TIMEOUT
from megarl.utils.env import address_towards, free_port, quiet_libraries, set_trainer_defaults
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
class Presence:
    """Tells who started a worker that it is there: its number, where it runs and is called."""

    index: int
    host: str
    pid: int
    address: str


class MainThread:
    """Runs calls on the thread that is in `run`, as CUDA, torch.distributed and signals want it."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self.ending = False

    def call(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        """Returns the Future of fn(*args), called behind all that was asked for before."""
        future: Future[Any] = Future()
        self._queue.put((future, lambda: fn(*args)))
        return future

    def run(self) -> None:
        """Makes the calls, one after another, until `end`."""
        while (job := self._queue.get()) is not None and not self.ending:
            future, call = job
            try:
                future.set_result(call())
            except BaseException as e:  # a SystemExit of a call is its caller's to see
                future.set_exception(e)

    def end(self) -> None:
        """Has `run` return when the call that runs is done. A signal handler may call it."""
        self.ending = True
        self._queue.put(None)


_main_thread = MainThread()


def on_main_thread(fn: Callable[..., Any], *args: Any) -> Future[Any]:
    """Returns the Future of fn(*args), which the main thread calls, one after another."""
    return _main_thread.call(fn, *args)


def main() -> int:
    """Serves until it is asked to end, or its link does; returns the exit status."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # what it starts ends with it
    dump_on_signal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: for whoever started us to decide
    start, serving = WorkerStart.from_env(os.environ), _Serving()
    if start.launched:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.chdir(start.directory)
    starter = _link(start, serving)
    starter.lost = serving.lost
    handler = _begin(start, starter, serving)
    _main_thread.run()
    handler.close()
    if serving.abandoned.is_set():
        starter.thread.join()  # which ends what is left
    return 0


class _Serving:
    """Answers the calls of whoever started the worker, and of other workers."""

    def __init__(self) -> None:
        self.handler: Handler | None = None
        self.abandoned = threading.Event()

    def handle(self, verb: str, payload: Any, link: Link) -> Any:
        if verb == END:
            return _main_thread.end()
        assert self.handler is not None, "calls come when the worker is ready"
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
    """Returns the link to whoever started this worker. Raises RpcError where nobody listens, of a
    launched worker after MEET_TIMEOUT seconds."""
    deadline = time.monotonic() + (MEET_TIMEOUT if start.launched else 0.0)
    while True:
        try:
            return connect(start.starter, STARTER, serving.handle)
        except RpcError as e:
            if isinstance(e, Refused) or time.monotonic() > deadline:
                raise
            time.sleep(_LOOK)


def _begin(start: WorkerStart, starter: Link, serving: _Serving) -> Handler:
    """Meets the other workers, makes what is served, and serves it."""
    host = address_towards(split(start.starter)[0])
    mine = Presence(index=start.index, host=socket.gethostname(), pid=os.getpid(), address=host)
    os.environ.update(starter.call("register", (mine, free_port(host))))
    set_trainer_defaults(os.environ)
    quiet_libraries()
    add_working_directory()
    sys.path.extend(p for p in start.path if p not in sys.path)
    serve = load_object(start.serve, what="worker")
    handler: Handler = serve(start.index, start.count, start.options)
    serving.handler = handler
    listener = Listener(serving.handle, host=host)
    # before there was nothing to lose; whoever is told that it is ready may signal at once
    if not start.launched:
        signal.signal(signal.SIGTERM, _on_signal)
    starter.call("ready", replace(mine, address=listener.address))
    return handler


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Ends the worker after the call that runs, at a second signal at once."""
    if _main_thread.ending:
        os._exit(128 + number)
    _main_thread.end()


if __name__ == "__main__":
    # what is served imports this module by its name
    sys.exit(import_module("megarl.rpc.worker").main())
