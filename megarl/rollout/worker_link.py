"""Starts one worker process of `rollout.workers`, and talks to it, for the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import cloudpickle

from megarl.rollout import tally
from megarl.rollout.answers import News
from megarl.rollout.episode import Episode
from megarl.rollout.frames import unpacked
from megarl.rollout.worker import HEAR, HEAR_TIMEOUT, TELL
from megarl.rpc.errors import RpcError
from megarl.rpc.group import GroupSpec, LocalScheduler, WorkerSpec

T = TypeVar("T")

START_TIMEOUT = 300.0  # seconds until a worker must serve
STANDSTILL = 300.0  # seconds for which a worker's event loop may stand still


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


@dataclass(eq=False)
class Job:
    """Holds an episode that a worker is to run. deaths: of workers that ran it."""

    ticket: int
    episode: Episode
    terms: Mapping[str, Any]
    done: asyncio.Future[None]
    deaths: int = 0


@dataclass(eq=False)
class Link:
    """Holds the coordinator's end of a worker. All of it runs in the client's loop.

    jobs: that it runs, by ticket. knows: the numbers of the workflows that it has. lag,
    lost_answers, stuck_threads: what it said last. proved: an episode has ended in it.
    """

    index: int
    process: Process
    jobs: dict[int, Job] = field(default_factory=dict)
    knows: set[int] = field(default_factory=set)
    lag: float = 0.0
    lost_answers: int | None = None
    stuck_threads: int = 0
    proved: bool = False
    _said: list[tuple[Any, ...]] = field(default_factory=list)
    _told: list[asyncio.Future[None]] = field(default_factory=list)
    _settling: dict[int, asyncio.Future[bool]] = field(default_factory=dict)
    _some: asyncio.Event = field(default_factory=asyncio.Event)

    def say(self, *item: Any) -> None:
        """Adds to what it is told next."""
        self._said.append(item)
        self._some.set()

    def told(self) -> asyncio.Future[None]:
        """Returns a future that is done when it knows what was said before, or has died."""
        self._told.append(wait := asyncio.get_running_loop().create_future())
        self._some.set()
        return wait

    def settled(self, number: int, timeout: float) -> asyncio.Future[bool]:
        """Asks it, under a number of its own, to settle (`EpisodeWorker`); returns its answer, True
        for one that dies."""
        wait = self._settling[number] = asyncio.get_running_loop().create_future()
        self.say("settle", number, timeout)
        return wait

    async def talk(self) -> None:
        """Exchanges messages with it until it dies. Raises RpcError then."""
        both = [asyncio.ensure_future(t) for t in (self._tell(), self._hear())]
        try:
            await asyncio.gather(*both)
        finally:
            for task in both:
                task.cancel()
            for told in self._told:
                _resolve(told, None)
            for settled in self._settling.values():
                _resolve(settled, True)

    async def _tell(self) -> None:
        while True:
            await self._some.wait()
            self._some.clear()
            said, self._said = self._said, []
            told, self._told = self._told, []
            try:
                if said:
                    await self.process.call(TELL, said)
            finally:
                for wait in told:
                    _resolve(wait, None)

    async def _hear(self) -> None:
        while True:
            try:
                async with asyncio.timeout(HEAR_TIMEOUT + STANDSTILL):
                    frame = await self.process.call(HEAR)
            except TimeoutError:
                raise RpcError(
                    f"worker {self.index} of rollout.workers stands still: its event loop has not "
                    f"turned for {STANDSTILL:g} s (its warning in the log shows the line it is "
                    "at); a workflow must await, or use asyncio.to_thread"
                ) from None
            heard = unpacked(frame)
            self.lag = max(self.lag, heard["lag"])
            self.lost_answers = heard["lost_answers"]
            self.stuck_threads = heard["stuck_threads"]
            tally.add(heard["counts"])
            for kind, ticket, *rest in heard["reports"]:
                (self._ended if kind == "ended" else self._settled)(ticket, *rest)

    def _ended(
        self, ticket: int, found: Mapping[str, Any], error: bytes | None, news: News | None
    ) -> None:
        self.proved = True
        if (job := self.jobs.pop(ticket, None)) is None:
            return  # it was cancelled meanwhile
        episode = job.episode
        for name, value in found.items():
            setattr(episode, name, value)
        if error is not None:
            episode.error = cloudpickle.loads(error)
        if episode.answers is not None and news is not None:
            episode.answers.hear(news)
        job.done.set_result(None)

    def _settled(self, number: int, settled: bool, news: list[tuple[int, News]]) -> None:
        for ticket, heard in news:
            if (job := self.jobs.get(ticket)) is not None and job.episode.answers is not None:
                job.episode.answers.hear(heard)
        _resolve(self._settling.pop(number), settled)


def _resolve(future: asyncio.Future[T], value: T) -> None:
    """Gives a future its result, unless whoever waited for it has gone."""
    if not future.done():
        future.set_result(value)
