"""Starts the processes of `rollout.workers`, and calls them."""

from __future__ import annotations

from typing import Any, Protocol

from megarl.rpc.group import GroupSpec, LocalScheduler, WorkerSpec

START_TIMEOUT = 300.0  # seconds until a worker must serve


class Process(Protocol):
    """Is a worker process that serves an EpisodeWorker."""

    async def call(self, verb: str, payload: Any = None) -> Any:
        """Returns the worker's answer. Raises RemoteError where it raised, RpcError where it has
        ended."""

    def stop(self) -> None:
        """Ends it."""


class RpcProcess:
    """Starts and holds worker number `index`, a process beside this one."""

    def __init__(self, index: int) -> None:
        """Raises what LocalScheduler.start does."""
        self._scheduler = LocalScheduler()
        self._group = self._scheduler.start(
            GroupSpec(
                name=f"rollout_worker_{index}",
                count=1,
                serve="megarl.rollout.worker:serve",
                worker=WorkerSpec(env={"OMP_NUM_THREADS": "1"}),
                start_timeout=START_TIMEOUT,
            )
        )

    async def call(self, verb: str, payload: Any = None) -> Any:
        """Returns the worker's answer; see Process."""
        return await self._group.clients[0].acall(verb, payload)

    def stop(self) -> None:
        """Ends the process. May be called twice."""
        self._scheduler.close()
