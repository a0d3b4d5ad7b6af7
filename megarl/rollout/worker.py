"""Runs episodes in a process of its own, for the coordinator in the driver (`workers.py`).

What goes each way is a list, in order: the coordinator *tells* of episodes to run and of the state
of all clients; it *hears* of episodes that have ended, and how far the others' answers are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle

from megarl.api.inference import RolloutWorkflow
from megarl.observability.logging import get_logger
from megarl.rollout.episode import run_episode
from megarl.rollout.episode_context import Answer, AnswerLog
from megarl.rollout.episodes import Episode
from megarl.rollout.loop_thread import PauseClock, stuck_threads, take_counts
from megarl.rollout.rewards.pool import close_copies, copies
from megarl.utils.user_errors import RemoteTrace, text_of
from megarl.wire.routes import RouteShape

if TYPE_CHECKING:
    from megarl.rollout.client import RemoteSGLangEngine

log = get_logger(__name__)

BEGIN, TELL, HEAR = "begin", "tell", "hear"
HEAR_TIMEOUT = 10.0  # seconds after which a coordinator hears that there is nothing
_DEPTH = 4  # of attributes inside attributes that an error of pickled_workflow looks into
GATHER = 0.005  # seconds in which what ends joins what has ended, so that messages are few
MOST = 256  # reports of one message
# of an episode, what its process is told, and what it finds out
ABOUT = ("number", "row", "drawn", "may_fail", "routes", "vocab_size", "admitted")
RESULT = (
    *("batch", "failed", "lost", "good", "retried", "missing"),
    *("notes", "rewards", "latency", "oldest"),
)


@dataclass(frozen=True, kw_only=True)
class ClientState:
    """Says what the clients of all processes agree on.

    version: of the weights. servers: host:port of those that get requests. served: the version of
    the last update, as servers report it; None before the first. cache: Generator.cache. held:
    whether no request is sent. adapter, routes: what requests ask for.
    """

    version: int
    servers: tuple[str, ...]
    cache: str
    held: bool = False
    served: str | None = None
    adapter: str | None = None
    routes: RouteShape | None = None


def state_of(client: RemoteSGLangEngine) -> ClientState:
    """Returns what the client of a worker process has to know."""
    at = client.opened()
    return ClientState(
        version=client.get_version(),
        servers=tuple(s.address for s in at.pool.serving),
        cache=at.samples.cache,
        held=at.samples.held,
        served=at.pool.version,
        adapter=at.samples.adapter,
        routes=client.routes,
    )


def serve(index: int, count: int, options: Mapping[str, Any]) -> EpisodeWorker:
    """Returns what a process of rollout.workers serves."""
    return EpisodeWorker()


class EpisodeWorker:
    """Serves one coordinator. All but `handle` runs in the event loop of the client, which `begin`
    brings."""

    def __init__(self) -> None:
        self._client: RemoteSGLangEngine | None = None
        self._workflows: dict[int, RolloutWorkflow | Exception] = {}
        self._running: dict[int, tuple[asyncio.Task[None], Episode]] = {}  # by ticket
        self._settling: set[asyncio.Task[None]] = set()
        self._reports: list[tuple[Any, ...]] = []
        self._any = asyncio.Event()
        self._clock = PauseClock()

    def handle(self, verb: str, payload: Any) -> Any:
        """Does what the coordinator asks; calls that arrive in order begin in order. begin: opens
        the client that came, pickled; tell: takes a list of things to do; hear: returns
        {reports, lag, lost_answers, stuck_threads, counts}. Raises ValueError for another
        verb."""
        if verb == BEGIN:
            return self._begin(payload)
        if verb not in (TELL, HEAR):
            raise ValueError(f"a worker that runs episodes does not take {verb!r}")
        loop = self._opened().opened().loop
        return loop.submit(self._tell(payload) if verb == TELL else self._hear())

    def close(self) -> None:
        """Cancels what runs, and ends the client and the reward workers."""
        if self._client is not None:
            self._client.disconnect(resume=False)
        close_copies()

    def _begin(self, pickled: bytes) -> None:
        self._client = cloudpickle.loads(pickled)  # imports what the client is made of
        self._client.connect()

    # what the coordinator tells

    async def _tell(self, items: Sequence[tuple[Any, ...]]) -> None:
        """Takes (name, argument, ...) in order; each name is one of the methods below."""
        for name, *arguments in items:
            getattr(self, f"_do_{name}")(*arguments)

    def _do_workflow(self, number: int, pickled: bytes) -> None:
        """Takes a workflow under a number by which episodes name it."""
        try:
            self._workflows[number] = cloudpickle.loads(pickled)
        except Exception as e:
            e.add_note("while a worker of rollout.workers loaded the workflow")
            self._workflows[number] = e

    def _do_forget(self, number: int) -> None:
        """Drops a workflow that nobody has any more."""
        self._workflows.pop(number, None)

    def _do_run(
        self,
        ticket: int,
        workflow: int,
        about: Mapping[str, Any],
        kept: list[Answer] | None,
    ) -> None:
        """Runs an episode. kept: its answers of before, None where none are kept."""
        flow = self._workflows[workflow]
        if isinstance(flow, Exception):
            self._report("ended", ticket, {}, _portable(flow), None)
            return
        answers = None if kept is None else AnswerLog(kept)
        episode = Episode(workflow=flow, answers=answers, **about)
        task = asyncio.ensure_future(self._run(ticket, episode))
        self._running[ticket] = task, episode

    def _do_cancel(self, ticket: int) -> None:
        """Cancels an episode that the coordinator has no use for any more."""
        if ticket in self._running:
            self._running.pop(ticket)[0].cancel()

    def _do_follow(self, state: ClientState) -> None:
        """Has the client agree with the coordinator's."""
        client = self._opened()
        client.routes = state.routes
        client.set_version(state.version)
        at = client.opened()
        at.samples.adapter, at.samples.cache = state.adapter, state.cache
        at.pool.follow(state.servers, state.served)
        if state.held and not at.samples.held:
            at.samples.hold()
            self._clock.hold()
        elif not state.held:
            at.samples.release()
            self._clock.release()

    def _do_settle(self, number: int, timeout: float) -> None:
        """Reports the answers so far, once none is on its way."""
        task = asyncio.ensure_future(self._settle(number, timeout))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    # what it hears

    async def _hear(self) -> dict[str, Any]:
        try:
            async with asyncio.timeout(HEAR_TIMEOUT):
                await self._any.wait()
            await asyncio.sleep(GATHER)
        except TimeoutError:
            pass
        reports, self._reports = self._reports[:MOST], self._reports[MOST:]
        if not self._reports:
            self._any.clear()
        client = self._opened()
        return {
            "reports": reports,
            "lag": client.opened().loop.take_lag(),
            "lost_answers": client.lost_answers,
            "stuck_threads": stuck_threads(),
            "counts": take_counts(),
        }

    async def _run(self, ticket: int, episode: Episode) -> None:
        try:
            client = self._opened()
            await run_episode(episode, client, client.config, clock=self._clock)
        except Exception as e:  # a fault of ours
            episode.error = e
        if self._running.pop(ticket, None) is None:
            return  # it was cancelled
        result = {name: getattr(episode, name) for name in RESULT}
        news = None if episode.answers is None else episode.answers.news()
        self._report("ended", ticket, result, _portable(episode.error), news)

    async def _settle(self, number: int, timeout: float) -> None:
        settled = await self._opened().opened().samples.settled(timeout)
        logs = [(ticket, e.answers) for ticket, (_, e) in self._running.items()]
        news = [(ticket, log.news()) for ticket, log in logs if log is not None]
        self._report("settled", number, settled, news)

    def _report(self, *report: Any) -> None:
        self._reports.append(report)
        self._any.set()

    def _opened(self) -> RemoteSGLangEngine:
        assert self._client is not None, "no client has come"
        return self._client


def _portable(error: BaseException | None) -> bytes | None:
    """Returns an error and its RemoteTrace as bytes; in place of an error that cannot be pickled a
    RuntimeError with its message."""
    if error is None:
        return None
    trace = RemoteTrace.of(error)
    try:
        pickled: bytes = cloudpickle.dumps((error, trace))
        cloudpickle.loads(pickled)
    except Exception:
        plain = RuntimeError(f"{type(error).__name__}: {text_of(error)}")
        for note in getattr(error, "__notes__", ()):
            plain.add_note(note)
        pickled = cloudpickle.dumps((plain, trace))
    return pickled


def pickled_workflow(workflow: RolloutWorkflow, processes: int) -> bytes:
    """Returns a workflow as bytes, of which `processes` processes load a copy. Raises TypeError
    naming what of it cannot be pickled."""
    token = copies.set(processes)
    try:
        return _dumps(workflow)
    except Exception as e:
        name = type(workflow).__name__
        raise TypeError(
            f"rollout.workers={processes}: {name} cannot be sent to other processes, for "
            f"{_culprit(workflow, name)} cannot be pickled ({type(e).__name__}: {e}); make it when "
            "an episode first needs it, or use rollout.workers=0"
        ) from e
    finally:
        copies.reset(token)


def _dumps(value: Any) -> bytes:
    pickled: bytes = cloudpickle.dumps(value, protocol=5)
    return pickled


def _culprit(value: Any, name: str, depth: int = _DEPTH) -> str:
    """Returns the innermost part of a value that cannot be pickled, by its path and type."""
    for part_name, part in _parts(value) if depth else ():
        try:
            _dumps(part)
        except Exception:
            return _culprit(part, name + part_name, depth - 1)
    return f"{name}, a {type(value).__name__},"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    else:
        yield from ((f".{key}", part) for key, part in getattr(value, "__dict__", {}).items())
