"""Starts groups of workers (worker.py), links to them, watches them and ends them."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from megarl.observability.logging import get_logger
from megarl.rpc.errors import WorkerDied
from megarl.rpc.link import Link, Listener
from megarl.rpc.worker import END, Worker, WorkerStart, rank_env
from megarl.utils.child import (
    TERM_TIMEOUT,
    Child,
    LogTail,
    Signals,
    log_tail,
    spelled,
    stop_all,
    wait_until,
)
from megarl.utils.env import (
    CONTROLS,
    ensure_job_token,
    free_port,
    memory_bytes,
    uses_gpus,
    visible_gpus,
)

log = get_logger(__name__)

TRAINERS, ROLLOUT = "trainers", "rollout"  # the names of a controller's groups
LOOPBACK = "127.0.0.1"
LOOK = 0.5  # seconds between looks at the processes
DEATH_WAIT = 10.0  # seconds after the end of a link in which the exit status says why
LOST = 255  # exit status of a worker whose machine does not answer


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Says what one worker needs. gpus: devices that no other worker uses. cpus: cores that a
    cluster reserves for it, and its threads; 0 is one on a cluster, and on this machine an equal
    share of its cores. memory: bytes of host memory, 0 for no bound. env: variables of its
    environment."""

    gpus: int = 0
    cpus: int = 0
    memory: int = 0
    env: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Returns what `get_scheduling_config()` of an engine asks for each of its processes."""
        return cls(
            gpus=config["gpus_per_process"],
            cpus=config["cpus_per_process"],
            memory=config.get("memory_per_process", 0),
        )


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """Describes a group of workers that are alike. Worker i is rank i of a torch world.

    name: of the group, like "trainers"; a worker is "trainers/3". serve: "package.module:name",
    called with (index, count, options) in each; what it returns serves the calls. options: plain
    data (JSON). log_dir: where worker i writes <name>_<i>.log; empty: to this process's stderr.
    echo: this process's stderr gets what the first worker writes to its log, too. python: the
    workers' interpreter. start_timeout: seconds until all of them serve.
    """

    name: str
    count: int
    serve: str
    options: Mapping[str, Any] = field(default_factory=dict)
    worker: WorkerSpec = field(default_factory=WorkerSpec)
    log_dir: str = ""
    echo: bool = False
    python: str = sys.executable
    start_timeout: float = 600.0

    def log(self, index: int) -> str:
        """Returns the file that a worker's output goes to, "" where it has none."""
        return str(Path(self.log_dir, f"{self.name}_{index}.log")) if self.log_dir else ""

    def env(self, index: int, starter: str) -> dict[str, str]:
        """Returns the variables of a worker's environment, besides its place and those of whoever
        starts it: what it is, and whom it links to (host:port)."""
        start = WorkerStart(
            starter=starter,
            group=self.name,
            index=index,
            count=self.count,
            serve=self.serve,
            options=self.options,
            directory=os.getcwd(),
            path=tuple(p for p in sys.path if p),
        )
        # one without GPUs sees none, whatever the others compute on
        device = {} if self.worker.gpus else {"MEGARL_DEVICE": "cpu"}
        return {**device, **self.worker.env, **start.to_env()}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Tells how a worker ended: its exit status as a shell gives it, and the end of its log."""

    worker: Worker
    status: int
    log: str


class Processes(Protocol):
    """Is what a scheduler knows of the processes of a group."""

    def poll(self) -> Mapping[int, int]:
        """Returns the exit statuses, as a shell gives them, of the workers that have ended."""
        ...

    def close(self) -> None:
        """Kills what is left of them, and gives back what they had. May be called twice."""
        ...


class Arrivals:
    """Listens at `address` for workers that serve, from its construction until `close`."""

    def __init__(self, host: str = LOOPBACK, port: int = 0) -> None:
        self.workers: dict[int, tuple[Worker, Link]] = {}  # by their index
        self._listener = Listener(self._handle, host=host, port=port)
        self.address, self.close = self._listener.address, self._listener.close

    def _handle(self, verb: str, worker: Worker, link: Link) -> None:
        self.workers[worker.index] = worker, link


class WatchedGroup:
    """Holds workers that serve, with a link to each (`clients`). A thread looks at their processes:
    calls to one that has ended raise WorkerDied, with its exit status and the end of its log. One
    that stands still is waited for."""

    def __init__(
        self, spec: GroupSpec, arrivals: Arrivals, processes: Processes | None = None
    ) -> None:
        """Waits until all workers serve. processes: None where a launcher has started them, which
        watches them and ends the job where one ends. Raises WorkerDied where one ends before,
        TimeoutError after spec.start_timeout; then none is left."""
        self.spec, self._processes = spec, processes
        self.workers: Sequence[Worker] = ()
        self.clients: Sequence[Link] = ()
        self._ended: dict[int, Ended] = {}
        self._closed, self._lock = threading.Event(), threading.Lock()
        log_of_first = spec.log(0) if spec.echo else ""
        self._echo = LogTail(Path(log_of_first), stderr=True, whole=False) if log_of_first else None
        try:
            self._wait_for(arrivals.workers)
        except BaseException:
            arrivals.close()
            for _, link in list(arrivals.workers.values()):
                link.close()
            if processes is not None:
                processes.close()
            raise
        arrivals.close()
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
        """Ends the workers, within bounded time: each may finish the call that runs, within
        TERM_TIMEOUT seconds. Calls that are made later raise RpcError. May be called twice."""
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

    def _wait_for(self, arrived: Mapping[int, tuple[Worker, Link]]) -> None:
        deadline = time.monotonic() + self.spec.start_timeout
        while missing := [i for i in range(self.spec.count) if i not in arrived]:
            for index, status in self._statuses().items():
                raise WorkerDied(
                    f"worker {self.spec.name}/{index} ended with status {spelled(status)} before "
                    f"it served{log_tail(self.spec.log(index))}"
                )
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"after {self.spec.start_timeout:g} s these workers of {self.spec.name} do not "
                    f"serve: {missing}{log_tail(self.spec.log(missing[0]))}"
                )
            time.sleep(LOOK / 5)
        self.workers, self.clients = zip(*(arrived[i] for i in range(self.spec.count)), strict=True)
        for worker, link in zip(self.workers, self.clients, strict=True):
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
        worker, text = self.workers[index], log_tail(self.spec.log(index))
        self._ended[index] = Ended(worker=worker, status=status, log=text)
        died = WorkerDied(f"worker {worker} ended with status {spelled(status)}{text}")
        self.clients[index].fail(died)


class Scheduler:
    """Starts groups of workers on machines: this one, a Ray cluster, a Slurm allocation. It is
    closed with this process at the latest."""

    def __init__(self) -> None:
        ensure_job_token()
        atexit.register(self.close)
        self._stack = contextlib.ExitStack()  # ends what is left, whatever one end raises

    def start(self, spec: GroupSpec) -> WatchedGroup:
        """Returns a group whose workers serve. Raises RuntimeError where there is no room,
        WorkerDied where a worker ends before it serves, TimeoutError after spec.start_timeout."""
        arrivals = self.listen(spec)
        try:
            processes = self.start_processes(spec, arrivals.address)
        except BaseException:
            arrivals.close()
            raise
        group = WatchedGroup(spec, arrivals, processes)
        self._stack.callback(group.stop)
        return group

    def close(self) -> None:
        """Ends the groups that are left, and gives back what the scheduler took. May be called
        twice."""
        atexit.unregister(self.close)
        self._stack.close()

    def listen(self, spec: GroupSpec) -> Arrivals:
        """Returns what a group's workers link to when they serve."""
        return Arrivals()

    def start_processes(self, spec: GroupSpec, address: str) -> Processes | None:
        """Starts a group's workers, which link to `address`; None where a launcher has."""
        raise NotImplementedError


class LocalScheduler(Scheduler):
    """Starts groups of workers on this machine, which end with this process, however it ends.

    Each worker has GPUs of its own, of those that are visible here; where the job computes on the
    CPU, none are asked for. Cores are shared among all, and so is memory: there must be as much as
    they ask for.
    """

    def __init__(self) -> None:
        """Raises RuntimeError in a job whose trainers its launcher has started."""
        if os.environ.get(CONTROLS):
            fix = "take megarl.make_scheduler(config) in place of a LocalScheduler"
            raise RuntimeError(f"the launcher has started this job's trainers: {fix}")
        super().__init__()
        self._free = visible_gpus(os.environ)

    def start_processes(self, spec: GroupSpec, address: str) -> Processes:
        """Starts children of this process. Raises RuntimeError where too few GPUs are free, or the
        machine has too little memory."""
        each = spec.worker.gpus if uses_gpus(os.environ) else 0
        count = each * spec.count
        if count > len(self._free):
            why = f"need {count}, and {len(self._free)} are free on this machine"
            raise RuntimeError(f"{spec.name}: {spec.count} workers with {each} GPUs each {why}")
        memory = spec.worker.memory * spec.count
        if memory > (total := memory_bytes()):
            why = f"want {memory / 2**30:.3g} GiB of memory, and here there are"
            raise RuntimeError(f"{spec.name}: {spec.count} workers {why} {total / 2**30:.3g} GiB")
        taken = [self._free.pop(0) for _ in range(count)]
        processes = _Children(taken, self._free)
        master = LOOPBACK, str(free_port())
        try:
            for index in range(spec.count):
                place = rank_env(index, [0] * spec.count, *master)
                gpus = {"CUDA_VISIBLE_DEVICES": ",".join(taken[index * each :][:each])}
                processes.children.append(
                    Child(
                        f"{spec.name}/{index}",
                        [spec.python, "-m", "megarl.rpc.worker"],
                        env={**os.environ, **place, **spec.env(index, address), **gpus},
                        log_path=spec.log(index),
                    )
                )
        except BaseException:
            processes.close()
            raise
        return processes


class _Children:
    """Holds the children of a group, and the GPUs that they have taken of the free ones."""

    def __init__(self, taken: list[str], free: list[str]) -> None:
        self.children: list[Child] = []
        self._taken, self._free = taken, free

    def poll(self) -> Mapping[int, int]:
        polled = {index: child.poll() for index, child in enumerate(self.children)}
        return {index: status for index, status in polled.items() if status is not None}

    def close(self) -> None:
        stop_all(self.children, Signals(), timeout=0)
        self._free.extend(self._taken)
        self._taken.clear()
