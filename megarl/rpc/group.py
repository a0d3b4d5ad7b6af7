"""Holds the workers that a scheduler has started: waits for them, watches them, ends them."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from megarl.api.scheduler import Ended, GroupSpec, Worker
from megarl.observability.logging import get_logger
from megarl.rpc.errors import WorkerDied
from megarl.rpc.gathering import Gathering
from megarl.rpc.link import Link
from megarl.rpc.worker import END, WorkerStart
from megarl.utils.child import TERM_TIMEOUT, LogTail, log_tail, spelled, wait_until

log = get_logger(__name__)

LOOK = 0.5  # seconds between looks at the processes
DEATH_WAIT = 10.0  # seconds after the end of a link in which the exit status says why
LOST = 255  # exit status of a worker whose machine does not answer


class Processes(Protocol):
    """Is what a scheduler knows of the processes of a group."""

    def poll(self) -> Mapping[int, int]:
        """Returns the exit statuses, as a shell gives them, of the workers that have ended."""
        ...

    def close(self) -> None:
        """Kills what is left of them, and gives back what they had. May be called twice."""
        ...


def worker_log(spec: GroupSpec, index: int) -> str:
    """Returns the file that a worker's output goes to, "" where it has none."""
    return str(Path(spec.log_dir, f"{spec.name}_{index}.log")) if spec.log_dir else ""


def worker_env(spec: GroupSpec, address: str, index: int = 0) -> dict[str, str]:
    """Returns the variables of a worker's environment, besides those of whoever starts it: where to
    register, and what it is. Its command line may name another index."""
    start = WorkerStart(
        starter=address,
        group=spec.name,
        index=index,
        count=spec.count,
        serve=spec.serve,
        options=spec.options,
        directory=os.getcwd(),
        path=tuple(p for p in sys.path if p),
    )
    # one without GPUs sees none, whatever the others compute on
    device = {} if spec.worker.gpus else {"MEGARL_DEVICE": "cpu"}
    return {**device, **spec.worker.env, **start.to_env()}


class WatchedGroup:
    """Holds workers that serve, with a link to each (`clients`). A thread looks at their processes:
    calls to one that has ended raise WorkerDied, with its exit status and the end of its log. One
    that stands still is waited for."""

    def __init__(
        self, spec: GroupSpec, gathering: Gathering, processes: Processes | None = None
    ) -> None:
        """Waits until all workers serve. processes: None where a launcher has started them, which
        watches them and ends the job where one ends. Raises WorkerDied where one ends before,
        TimeoutError after spec.start_timeout; then none is left."""
        self.spec, self._processes = spec, processes
        self.workers: Sequence[Worker] = ()
        self.clients: Sequence[Link] = ()
        self._ended: dict[int, Ended] = {}
        self._closed, self._lock = threading.Event(), threading.Lock()
        log_of_first = worker_log(spec, 0) if spec.echo else ""
        self._echo = LogTail(Path(log_of_first), stderr=True, whole=False) if log_of_first else None
        try:
            self._gather(gathering)
            gathering.close()
        except BaseException:
            gathering.close()
            if processes is not None:
                processes.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="megarl-workers", daemon=True)
        self._watcher.start()

    def poll(self) -> Sequence[Ended]:
        """Returns how workers ended, of those that have."""
        with self._lock:
            for index, status in self._statuses().items():
                self._bury(index, status)
            if self._echo is not None:
                self._echo.show()
            return list(self._ended.values())

    def stop(self) -> None:
        """Ends the workers: each may finish the call that runs, within TERM_TIMEOUT seconds. Calls
        that are made later raise RpcError."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._watcher.join()
        for client in self.clients:  # in threads: one that stands still may not read
            threading.Thread(target=client.call_async, args=(END,), daemon=True).start()
        try:
            wait_until(self._over, timeout=TERM_TIMEOUT)
        finally:
            if self._processes is not None:
                self._processes.close()
            for client in self.clients:
                client.close()

    def _statuses(self) -> Mapping[int, int]:
        return {} if self._processes is None else self._processes.poll()

    def _over(self) -> bool:
        if self._processes is None:
            return not any(link.thread.is_alive() for link in self.clients)
        return len(self.poll()) == self.spec.count

    def _gather(self, gathering: Gathering) -> None:
        deadline = time.monotonic() + self.spec.start_timeout
        while (ready := gathering.ready()) is None:
            for index, status in self._statuses().items():
                raise WorkerDied(
                    f"worker {self.spec.name}/{index} ended with status {spelled(status)} before "
                    f"it served{_log_of(self.spec, index)}"
                )
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"after {self.spec.start_timeout:g} s these workers of {self.spec.name} do not "
                    f"serve: {gathering.missing()}{_log_of(self.spec, gathering.missing()[0])}"
                )
            time.sleep(LOOK / 5)
        self.workers = [
            Worker(
                name=f"{self.spec.name}/{p.index}",
                index=p.index,
                address=p.address,
                host=p.host,
                pid=p.pid,
            )
            for p, _ in ready
        ]
        self.clients = [link for _, link in ready]
        for worker, link in zip(self.workers, self.clients):
            link.name = str(worker)
            if self._processes is not None:
                link.lost = partial(self._wait_for_status, worker.index)

    def _wait_for_status(self, index: int) -> None:
        """Waits until the exit status of a worker whose link has ended is known, for DEATH_WAIT
        seconds at most."""
        wait_until(lambda: index in self._ended, timeout=DEATH_WAIT)

    def _watch(self) -> None:
        warned = ""
        while not self._closed.wait(LOOK):
            try:
                self.poll()
            except Exception as e:  # it may be better next time
                if repr(e) != warned:
                    log.warning("cannot look after the workers of %s: %r", self.spec.name, e)
                warned = repr(e)

    def _bury(self, index: int, status: int) -> None:
        """Notes that a worker has ended, once."""
        if index in self._ended:
            return
        worker, text = self.workers[index], _log_of(self.spec, index)
        self._ended[index] = Ended(worker=worker, status=status, log=text)
        died = WorkerDied(f"worker {worker} ended with status {spelled(status)}{text}")
        self.clients[index].fail(died)


def _log_of(spec: GroupSpec, index: int) -> str:
    """Returns the end of a worker's log, behind a line that names it; "" where it says nothing."""
    path = Path(worker_log(spec, index))
    tail = log_tail(path) if path.is_file() else ""
    return f"\n--- end of {path} ---\n{tail}" if tail else ""
