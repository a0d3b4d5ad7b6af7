"""Is a worker process: serves the calls of whoever started it.

    MEGARL_WORKER='{...}' MEGARL_JOB_TOKEN=... python -m megarl.rpc.worker [options]

    --environment FILE      take the variables of this JSON file, and those of the scheduler
    --keep                  run the worker as a child, and end what it leaves when it has ended
    --index N               this is worker N of its group
    --index-variable NAME   this is the worker whose number is in that variable
    --meet HOST:PORT        take the variable of whoever will listen there, once it does: a launcher
                            starts both, and SIGTERM is for the other one to decide

The variable is a WorkerStart as JSON, which a scheduler (megarl.rpc.local) sets. The worker
registers, learns its place in the group (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT),
imports what it serves, and says that it is ready. When it is asked to end, or at SIGTERM, it ends
after the call that runs, with status 0; at a second signal at once. Whoever started it pings it;
some seconds without a ping end it, and all that it started.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Self

from megarl.rpc.client import RpcClient
from megarl.rpc.main_thread import MAIN_THREAD
from megarl.rpc.nodes import take_environment
from megarl.rpc.server import Handler, RpcServer
from megarl.utils.child import POLL_INTERVAL, Child, Signals, stop_all
from megarl.utils.env import address_towards, free_port, quiet_libraries, set_trainer_defaults
from megarl.utils.importing import add_working_directory, load_object
from megarl.utils.stacks import dump_on_signal

ENV = "MEGARL_WORKER"
SILENCE_ENV = "MEGARL_WORKER_SILENCE"
MEET, MEET_TIMEOUT = "--meet", 1800.0  # seconds
SILENCE = 30.0  # seconds without a ping after which a worker ends
KEEP = "--keep"
GRACE = 5.0  # seconds between SIGTERM and SIGKILL for what it started
_TICK = 1.0


@dataclass(frozen=True, kw_only=True)
class WorkerStart:
    """Tells a worker who started it (host:port), of which group it is number `index`, what to serve
    and with which options, and that process's directory and import path."""

    starter: str
    group: str
    index: int
    count: int
    serve: str
    options: Mapping[str, Any]
    directory: str
    path: tuple[str, ...]

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


class Watch:
    """Ends this process and what it started when `pings` has not grown for SILENCE seconds."""

    def __init__(self, pings: Callable[[], int]) -> None:
        self._pings, self._closed, self._silent = pings, threading.Event(), False
        self._thread = threading.Thread(target=self._watch, name="megarl-pings", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the watch. Where it is ending the process, it does so here."""
        self._closed.set()
        if self._silent:
            self._thread.join()

    def _watch(self) -> None:
        limit = float(os.environ.get(SILENCE_ENV, SILENCE))
        tick, heard, silent = min(_TICK, limit / 4), 0, 0.0
        # counted by ticks: a process that stood still itself has not been silent to
        while silent < limit:
            if self._closed.wait(tick):
                return
            pings = self._pings()
            heard, silent = pings, 0.0 if pings != heard else silent + tick
        self._silent = True
        print(f"no ping for {limit:g} s: whoever started this worker is gone; ending", flush=True)
        os.killpg(0, signal.SIGTERM)
        time.sleep(min(GRACE, limit))
        os.killpg(0, signal.SIGKILL)


def main() -> int:
    """Serves until SIGTERM, or until nobody pings any more; returns the exit status."""
    if KEEP in sys.argv:
        return keep([a for a in sys.argv[1:] if a != KEEP])
    start = _start(sys.argv[1:])
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # what it starts ends with it
    dump_on_signal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: for whoever started us to decide
    handler, server = _begin(start)
    watch = Watch(lambda: server.pings)
    MAIN_THREAD.run()
    handler.close()
    server.close()
    watch.close()
    return 0


def keep(argv: Sequence[str]) -> int:
    """Runs a worker with this command line; returns its exit status. Where a scheduler loses sight
    of processes whose parent has ended, nothing that the worker started is left, however it or
    this process ends."""
    command = [sys.executable, "-m", "megarl.rpc.worker", *argv]
    with Signals() as signals:
        child = Child("worker", command, env=os.environ)
        told = 0
        while (status := child.poll()) is None:
            for number in signals.received[told:]:
                child.signal(number)
                told += 1
            time.sleep(POLL_INTERVAL)
        stop_all([child], signals, timeout=0)
    return status


def _start(argv: Sequence[str]) -> WorkerStart:
    parser = argparse.ArgumentParser(prog="python -m megarl.rpc.worker")
    parser.add_argument("--environment", type=Path)
    parser.add_argument("--index", type=int)
    parser.add_argument("--index-variable")
    parser.add_argument(MEET)
    given = parser.parse_args(argv)
    if given.environment is not None:
        take_environment(given.environment)
    if given.meet is not None:
        os.environ.update(_told(given.meet))
    start = WorkerStart.from_env(os.environ)
    if given.index_variable is not None:
        given.index = int(os.environ[given.index_variable])
    os.chdir(start.directory)
    return start if given.index is None else replace(start, index=given.index)


def _told(meeting: str) -> Mapping[str, str]:
    """Returns the variables that whoever listens at an address has for workers. Raises TimeoutError
    where nobody does within MEET_TIMEOUT seconds."""
    host, _, port = meeting.rpartition(":")
    deadline = time.monotonic() + MEET_TIMEOUT
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=_TICK).close()
            break
        except OSError as e:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{meeting}: nobody after {MEET_TIMEOUT:g} s: {e}") from e
            time.sleep(_TICK)
    starter = RpcClient(meeting, "that meets this one")
    try:
        told: Mapping[str, str] = starter.call("variables")
        return told
    finally:
        starter.close()


def _begin(start: WorkerStart) -> tuple[Handler, RpcServer]:
    """Meets the other workers, makes what is served, and serves it when all are ready."""
    host = address_towards(_host(start.starter))
    starter = RpcClient(start.starter, "that starts this one")
    try:
        mine = Presence(index=start.index, host=socket.gethostname(), pid=os.getpid(), address=host)
        os.environ.update(starter.call("register", (mine, free_port(host))))
        set_trainer_defaults(os.environ)
        quiet_libraries()
        add_working_directory()
        sys.path.extend(p for p in start.path if p not in sys.path)
        serve = load_object(start.serve, what="worker")
        handler: Handler = serve(start.index, start.count, start.options)
        server = RpcServer(handler.handle, host=host, read=handler.read, end=MAIN_THREAD.end)
        # before there was nothing to lose; whoever is told that it is ready may signal at once
        signal.signal(signal.SIGTERM, signal.SIG_IGN if MEET in sys.argv else _on_signal)
        starter.call("ready", replace(mine, address=server.address))
    finally:
        starter.close()
    return handler, server


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Ends the worker after the call that runs, at a second signal at once."""
    if MAIN_THREAD.ending:
        os._exit(128 + number)
    MAIN_THREAD.end()


if __name__ == "__main__":
    # what is served imports this module by its name
    from megarl.rpc import worker

    sys.exit(worker.main())
