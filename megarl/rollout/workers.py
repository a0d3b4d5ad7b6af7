"""Has episodes run in worker processes (`rollout.workers`), for the one coordinator.

A worker runs what it is given (`worker.py`) and keeps no order and no books, so which one runs an
episode changes no number. What a worker has to know goes to it in one list at a time, and what it
found out comes back in lists, so that the messages are few, however many the episodes.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle

from megarl.api.inference import RolloutWorkflow
from megarl.observability.logging import get_logger
from megarl.rollout.episode_context import AnswerLog, News
from megarl.rollout.episodes import Episode
from megarl.rollout.generation import SETTLE_TIMEOUT
from megarl.rollout.loop_thread import add_counts
from megarl.rollout.worker import (
    ABOUT,
    BEGIN,
    HEAR,
    HEAR_TIMEOUT,
    TELL,
    ClientState,
    pickled_workflow,
    state_of,
)
from megarl.rpc.errors import RemoteError, RpcError
from megarl.rpc.group import GroupSpec, LocalScheduler, WorkerSpec
from megarl.utils.http import in_thread

if TYPE_CHECKING:
    from megarl.rollout.client import RemoteSGLangEngine

log = get_logger(__name__)

T = TypeVar("T")

START_TIMEOUT = 300.0  # seconds until a worker must serve
STANDSTILL = 300.0  # seconds for which a worker's event loop may stand still
MOST_DEATHS = 3  # of workers of a place, none of which ended an episode, or that ran one episode
MARGIN = 5.0  # seconds beyond its own time limit in which a worker must say how it went


class RpcProcess:
    """Starts worker number `index`, a process beside this one that serves an EpisodeWorker.

    call: calls it, see rpc.link.Link.acall. stop: ends it, and may be called twice.
    """

    def __init__(self, index: int) -> None:
        """Raises what LocalScheduler.start does."""
        scheduler = LocalScheduler()
        group = scheduler.start(
            GroupSpec(
                name=f"rollout_worker_{index}",
                count=1,
                serve="megarl.rollout.worker:serve",
                worker=WorkerSpec(env={"OMP_NUM_THREADS": "1"}),
                start_timeout=START_TIMEOUT,
            )
        )
        self.call, self.stop = group.clients[0].acall, scheduler.close


@dataclass(eq=False)
class Link:
    """Holds the coordinator's end of a worker. All of it runs in the client's loop.

    episodes: that it runs, by ticket, each with the future of its end. known_workflows: the numbers
    of the workflows that it has. lag, lost_answers, stuck_threads: what it said last. proved: an
    episode has ended in it. error: as which it died.
    """

    index: int
    process: RpcProcess
    episodes: dict[int, tuple[Episode, asyncio.Future[None]]] = field(default_factory=dict)
    known_workflows: set[int] = field(default_factory=set)
    lag: float = 0.0
    lost_answers: int | None = None
    stuck_threads: int = 0
    proved: bool = False
    error: BaseException | None = None
    _outbox: list[tuple[Any, ...]] = field(default_factory=list)
    _flush_waiters: list[asyncio.Future[None]] = field(default_factory=list)
    _settling: dict[int, asyncio.Future[bool]] = field(default_factory=dict)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, *item: Any) -> None:
        """Adds to what it is told next."""
        self._outbox.append(item)
        self._wake.set()

    def flushed(self) -> asyncio.Future[None]:
        """Returns a future that is done when it has what was sent before, or has died."""
        self._flush_waiters.append(wait := asyncio.get_running_loop().create_future())
        self._wake.set()
        return wait

    def settled(self, number: int, timeout: float) -> asyncio.Future[bool]:
        """Asks it, under a number of its own, to settle (`EpisodeWorker`); returns its answer, True
        for one that dies."""
        wait = self._settling[number] = asyncio.get_running_loop().create_future()
        self.send("settle", number, timeout)
        return wait

    async def run(self, ticket: int, episode: Episode, flow: int, pickled: bytes) -> None:
        """Has it run an episode of the workflow of this number, which it gets the first time.
        Raises RpcError where it dies."""
        if self.error is not None:
            raise self.error
        if flow not in self.known_workflows:
            self.known_workflows.add(flow)
            self.send("workflow", flow, pickled)
        about = {name: getattr(episode, name) for name in ABOUT}
        kept = None if episode.answers is None else episode.answers.kept
        end = asyncio.get_running_loop().create_future()
        self.episodes[ticket] = episode, end
        self.send("run", ticket, flow, about, kept)
        try:
            await end
        except asyncio.CancelledError:
            if self.episodes.pop(ticket, None) is not None:
                self.send("cancel", ticket)
            raise

    def lose(self, error: BaseException) -> None:
        """Ends its episodes, and what comes to it, with an error."""
        self.error = error
        for _, end in self.episodes.values():
            if not end.done():
                end.set_exception(error)

    async def talk(self) -> None:
        """Exchanges messages with it until it dies. Raises RpcError then."""
        both = [asyncio.ensure_future(t) for t in (self._tell(), self._hear())]
        try:
            await asyncio.gather(*both)
        finally:
            for task in both:
                task.cancel()
            for wait in self._flush_waiters:
                _resolve(wait, None)
            for settled in self._settling.values():
                _resolve(settled, True)

    async def _tell(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            items, self._outbox = self._outbox, []
            waiters, self._flush_waiters = self._flush_waiters, []
            try:
                if items:
                    await self.process.call(TELL, items)
            finally:
                for wait in waiters:
                    _resolve(wait, None)

    async def _hear(self) -> None:
        while True:
            try:
                async with asyncio.timeout(HEAR_TIMEOUT + STANDSTILL):
                    heard = await self.process.call(HEAR)
            except TimeoutError:
                raise RpcError(
                    f"worker {self.index} of rollout.workers stands still: its event loop has not "
                    f"turned for {STANDSTILL:g} s (its warning in the log shows the line it is "
                    "at); a workflow must await, or use asyncio.to_thread"
                ) from None
            self.lag = max(self.lag, heard["lag"])
            self.lost_answers = heard["lost_answers"]
            self.stuck_threads = heard["stuck_threads"]
            add_counts(heard["counts"])
            for kind, ticket, *rest in heard["reports"]:
                (self._ended if kind == "ended" else self._settled)(ticket, *rest)

    def _ended(
        self,
        ticket: int,
        result: Mapping[str, Any],
        error: bytes | None,
        news: News | None,
    ) -> None:
        self.proved = True
        if ticket not in self.episodes:
            return  # it was cancelled meanwhile
        episode, end = self.episodes.pop(ticket)
        for name, value in result.items():
            setattr(episode, name, value)
        if error is not None:
            try:
                episode.error, trace = cloudpickle.loads(error)
                episode.error.__cause__ = trace
            except Exception as e:
                e.add_note(f"as the error of {episode.name} was loaded, which a worker sent")
                episode.error = e
        if episode.answers is not None and news is not None:
            episode.answers.hear(news)
        _resolve(end, None)

    def _settled(self, number: int, settled: bool, news: list[tuple[int, News]]) -> None:
        for ticket, of_episode in news:
            episode, _ = self.episodes.get(ticket, (None, None))
            if episode is not None and episode.answers is not None:
                episode.answers.hear(of_episode)
        _resolve(self._settling.pop(number), settled)


class Workflows:
    """Numbers the workflows of episodes, and keeps what they are pickled as while they live.

    processes: that get a copy of each. gone: called in the event loop with the number of a workflow
    that nobody has any more.
    """

    def __init__(self, processes: int, gone: Callable[[int], None]) -> None:
        self._processes, self._tell = processes, gone
        self._numbers: dict[int, int] = {}  # by id
        self._next = 0
        self.pickled: dict[int, bytes] = {}

    def number(self, workflow: RolloutWorkflow) -> int:
        """Returns the number of a workflow. Raises TypeError for one that cannot be pickled."""
        key = id(workflow)
        if key in self._numbers:
            return self._numbers[key]
        self._next += 1
        number = self._next
        self.pickled[number] = pickled_workflow(workflow, self._processes)
        self._numbers[key] = number
        loop = asyncio.get_running_loop()
        weakref.finalize(workflow, self._gone, loop, key, number).atexit = False
        return number

    def _gone(self, loop: asyncio.AbstractEventLoop, key: int, number: int) -> None:
        self._numbers.pop(key, None)
        self.pickled.pop(number, None)
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._tell, number)


class WorkersLost(RuntimeError):
    """Says that worker processes died again and again."""


class WorkerPool:
    """Runs episodes in `client.config.workers` processes that `start` starts, by number. All its
    methods run in the client's loop, but `stop` and `stats`."""

    def __init__(
        self, client: RemoteSGLangEngine, start: Callable[[int], RpcProcess] = RpcProcess
    ) -> None:
        self._client, self._start = client, start
        self._processes: list[RpcProcess] = []  # all that were started
        self._stopped = False
        self._workers: dict[int, Link] = {}  # those that run, by number
        self._next: asyncio.Future[Link] | None = None  # the worker that begins next
        self._flows = Workflows(client.config.workers, self._forget)
        self._tasks: set[asyncio.Task[None]] = set()
        self._state: ClientState | None = None
        self._ticket = 0
        self._lost_answers = 0  # of workers that died
        self._failed: BaseException | None = None
        self.deaths = 0

    async def open(self) -> None:
        """Starts the workers. Raises what keeps one from starting."""
        self._state = state_of(self._client)
        places = range(self._client.config.workers)
        for index, worker in enumerate(await asyncio.gather(*map(self._begin, places))):
            task = asyncio.ensure_future(self._keep(index, worker))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """Ends all workers, and starts no others. May be called twice."""
        self._stopped = True
        for end in [in_thread(process.stop) for process in self._processes]:  # also at exit
            end.result()

    async def run(self, episode: Episode) -> None:
        """Runs an episode as run_episode does, in the worker that runs the fewest. Where that dies,
        the episode begins again, with the answers that are known of it, in the worker that begins
        next: an episode that kills workers takes no others along. Raises WorkersLost where workers
        die in a row."""
        deaths = 0
        while True:
            try:
                flow = self._flows.number(episode.workflow)
            except TypeError as e:
                episode.error = e
                return
            worker = await self._worker(new=deaths > 0)
            self._ticket += 1
            try:
                await worker.run(self._ticket, episode, flow, self._flows.pickled[flow])
                return
            except RpcError as e:
                deaths += 1
                if deaths == MOST_DEATHS:
                    died = f"{MOST_DEATHS} workers of rollout.workers died"
                    why = f"{died} while they ran {episode.name}; the last: {e}"
                    raise WorkersLost(why) from e
            if episode.answers is not None:
                episode.answers = AnswerLog(episode.answers.state())
                episode.answers.admitted = episode.admitted

    async def _worker(self, *, new: bool) -> Link:
        """Returns the worker that runs the fewest episodes; the one that begins next where it is to
        be `new`, or none runs. Raises WorkersLost where none will."""
        if self._failed is not None:
            raise self._failed
        if self._workers and not new:
            return min(self._workers.values(), key=lambda w: len(w.episodes))
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._next)

    # the state of all clients, and pauses

    def follow(self) -> None:
        """Has the workers' clients take over the state of the coordinator's."""
        if (state := state_of(self._client)) != self._state:
            self._state = state
            for worker in self._workers.values():
                worker.send("follow", state)

    async def agree(self) -> None:
        """Does what `follow` does, and waits until all workers have."""
        self.follow()
        await asyncio.gather(*(worker.flushed() for worker in self._workers.values()))

    async def settled(self, timeout: float = SETTLE_TIMEOUT) -> bool:
        """Waits, while requests are held, for the answers under way, and takes note of how far all
        of them are; returns whether all came in `timeout` seconds."""
        self._ticket += 1
        answers = (w.settled(self._ticket, timeout) for w in self._workers.values())
        try:
            return all(await asyncio.wait_for(asyncio.gather(*answers), timeout + MARGIN))
        except TimeoutError:  # of a worker that stands still
            return False

    def stats(self) -> dict[str, float]:
        """Returns workers (that run), worker_deaths, worker_lag (seconds that an event loop of a
        worker was late at most since the last call), their stuck_threads, and lost_answers of their
        gateways."""
        workers = list(self._workers.values())
        lost = [w.lost_answers for w in workers if w.lost_answers is not None]
        stats = {
            "workers": float(len(workers)),
            "worker_deaths": float(self.deaths),
            "worker_lag": max((w.lag for w in workers), default=0.0),
            "stuck_threads": float(sum(w.stuck_threads for w in workers)),
        }
        for worker in workers:
            worker.lag = 0.0
        return stats | ({"lost_answers": float(self._lost_answers + sum(lost))} if lost else {})

    def _forget(self, flow: int) -> None:
        for worker in self._workers.values():
            if flow in worker.known_workflows:
                worker.known_workflows.discard(flow)
                worker.send("forget", flow)

    # one worker

    async def _keep(self, index: int, worker: Link | None) -> None:
        """Talks to the worker of a place as long as it lives, then puts another in its place."""
        in_a_row = 0
        try:
            while not self._stopped:
                try:
                    worker = worker or await self._begin(index)
                    await worker.talk()
                except RemoteError:
                    raise  # it is of our own making, and would come again
                except RpcError as e:
                    in_a_row = 1 if worker is not None and worker.proved else in_a_row + 1
                    await self._bury(index, worker, e, in_a_row)
                    worker = None
        except Exception as e:
            self._fail(e)
            self._workers.pop(index, None)

    async def _begin(self, index: int) -> Link:
        """Returns a worker that was started, and has what waited for one. Raises RpcError."""
        try:
            process = await asyncio.to_thread(self._started, index)
            try:
                await process.call(BEGIN, cloudpickle.dumps(self._client.for_worker(index)))
            except Exception:
                await self._end(process)
                raise
        except RpcError:
            raise
        except (RuntimeError, OSError) as e:
            raise RpcError(f"worker {index} of rollout.workers did not start: {e}") from e
        worker = self._workers[index] = Link(index, process)
        worker.send("follow", self._state)
        if self._next is not None:
            self._next.set_result(worker)
            self._next = None
        return worker

    def _started(self, index: int) -> RpcProcess:
        process = self._start(index)
        self._processes.append(process)
        if self._stopped:
            process.stop()
        return process

    async def _end(self, process: RpcProcess) -> None:
        await asyncio.to_thread(process.stop)
        self._processes.remove(process)

    # deaths

    async def _bury(self, index: int, worker: Link | None, error: RpcError, in_a_row: int) -> None:
        """Has another worker run the episodes of one that died; None for one that did not begin.
        Raises WorkersLost where it was the last of too many in a row in its place."""
        if self._stopped:
            return
        self.deaths += 1
        count = 0 if worker is None else len(worker.episodes)
        log.warning("%s; its %d episodes run again, and another is started", error, count)
        if worker is not None:
            del self._workers[index]
            worker.lose(error)
            self._lost_answers += worker.lost_answers or 0
            await self._end(worker.process)
        if in_a_row == MOST_DEATHS:
            raise WorkersLost(
                f"{in_a_row} workers of rollout.workers died in a row, and none of them ended an "
                f"episode; the last: {error}"
            ) from error

    def _fail(self, error: BaseException) -> None:
        """Ends all episodes with an error, and all that are still to come."""
        self._failed = error
        for worker in self._workers.values():
            worker.lose(error)
        if self._next is not None:
            self._next.set_exception(error)
            self._next = None


def _resolve(future: asyncio.Future[T], value: T) -> None:
    """Gives a future its result, unless whoever waited for it has gone."""
    if not future.done():
        future.set_result(value)
