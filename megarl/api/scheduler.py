"""Defines Scheduler: what starts the worker processes of a job, and tells how they end."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, Self


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Says what one worker needs. gpus: devices of its own. cpus: cores that a cluster keeps for
    it, which are its threads then; 0 for one, and its share of the machine's as threads. memory:
    bytes of host memory, 0 for no bound. env: variables of its environment."""

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
    """Describes a group of workers that are alike.

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


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Tells how a worker ended: its exit status as a shell gives it, and the end of its log."""

    worker: Worker
    status: int
    log: str


class Caller(Protocol):
    """Calls one worker; `megarl.rpc.link.Link` does."""

    def call(self, verb: str, payload: Any = None, timeout: float | None = None) -> Any:
        """Returns what the worker makes of `payload`. Raises what `megarl.rpc.errors` lists, and
        TimeoutError after `timeout` seconds."""
        ...

    def call_async(self, verb: str, payload: Any = None) -> Future[Any]:
        """Starts a call, behind those made before, and returns its future at once."""
        ...


class Group(Protocol):
    """Holds the workers of a group. clients: one for each."""

    spec: GroupSpec
    workers: Sequence[Worker]
    clients: Sequence[Caller]

    def poll(self) -> Sequence[Ended]:
        """Returns how workers ended, of those that have."""
        ...

    def stop(self) -> None:
        """Ends the workers, within bounded time. May be called twice."""
        ...


class Scheduler(Protocol):
    """Starts groups of workers on machines: this one, a Ray cluster, a Slurm allocation."""

    def start(self, spec: GroupSpec) -> Group:
        """Returns a group whose workers serve. Raises RuntimeError where one ends before, or there
        is no room, TimeoutError after `spec.start_timeout`."""
        ...

    def close(self) -> None:
        """Ends the groups that are left, and gives back what the scheduler took. May be called
        twice."""
        ...
