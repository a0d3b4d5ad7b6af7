"""Holds episodes from submission to hand-out: what callers' threads share with the loop thread.

Callers enqueue and take; the loop thread starts and settles episodes. One condition variable,
`changed`, guards everything.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from megarl.api.batch import Padded
from megarl.api.inference import InferenceEngine, RolloutWorkflow
from megarl.config.rollout import RolloutConfig
from megarl.observability.logging import get_logger
from megarl.rollout import order
from megarl.rollout.accounting import FailedSamples, FailureRate
from megarl.rollout.answers import AnswerLog, Kept, KeptAnswers
from megarl.rollout.episode import Episode, run_episode
from megarl.rollout.loop_thread import LoopThread, PauseClock
from megarl.rollout.outcomes import Outcomes
from megarl.rollout.staleness import StalenessManager
from megarl.utils import stopping

log = get_logger(__name__)

ShouldAccept = Callable[[Padded], bool]
# brings an episode to its end, with the other arguments of run_episode
Runner = Callable[[Episode, Mapping[str, Any]], Awaitable[None]]

# episodes in flight when rollout.max_concurrent_rollouts is null and no training batch says more
DEFAULT_CONCURRENCY = 256
MAX_DROPS = 8  # of one row in a row, as too stale: more is a workflow that returns old tokens
LOOK_AROUND = 1.0  # seconds at most until a waiting caller notices a signal
GRACE = 30.0  # seconds beyond episode_timeout before a wait without any progress is an error


class Pipeline:
    """Starts episodes and keeps them in order until they are handed out. `engine` is what workflows
    generate with; its version decides admission and staleness. Methods whose docstring ends in *
    are called with `changed` held."""

    def __init__(self, config: RolloutConfig, *, engine: InferenceEngine, loop: LoopThread) -> None:
        self.config, self._engine, self._loop = config, engine, loop
        self.runner: Runner = self._run_here
        self.vocab_size: int | None = None  # the model's, where it is known
        self.observer: Callable[[Episode], None] = lambda episode: None  # of what ends
        self.staleness = StalenessManager(
            max_concurrent=config.max_concurrent_rollouts or DEFAULT_CONCURRENCY,
            max_head_offpolicyness=config.max_head_offpolicyness,
            start_version=engine.get_version(),
        )
        self._clock = PauseClock()  # of the episodes that run here
        self.changed = threading.Condition()
        self.pending: deque[Episode] = deque()
        self.live: dict[int, Episode] = {}  # pending, running, accepted; in submission order
        self.rejected_in_a_row = 0
        self.failed_samples = FailedSamples()  # of episodes that were handed out, or rejected
        self.failure_rate = FailureRate(config.max_failure_rate)
        self.outcomes = Outcomes()
        self.last_progress = time.monotonic()
        self.keeps_answers = False  # of drawn rows, for a resume
        self.kept = KeptAnswers()  # by episodes of before a resume
        self._ended: list[Episode] = []  # under these weights: handed out, or rejected
        self._failed: list[Episode] = []  # whose errors nobody has been told of
        self._faults: list[BaseException] = []  # ours
        self._held_since: float | None = None
        self._started = False  # since admission began to count
        self._next_number = 0
        self._numbers: deque[int] = deque()  # of rows that a resumed run submits again
        self._places = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()

    def enqueue(
        self,
        row: dict[str, Any],
        workflow: RolloutWorkflow,
        should_accept: ShouldAccept | None,
        *,
        drawn: bool = False,
        drops: int = 0,
    ) -> None:
        """Adds an episode at the end of the order of submission."""
        with self.changed:
            again = drawn and not drops and self._numbers
            episode = Episode(
                number=self._numbers.popleft() if again else self._next_number,
                row=row,
                workflow=workflow,
                should_accept=should_accept,
                drawn=drawn,
                drops=drops,
                may_fail=drawn,
            )
            if drawn and self.keeps_answers:
                episode.answers = AnswerLog() if drops else self.kept.log_for(row)
                episode.began = episode.answers.oldest_kept()
                episode.admitted = episode.answers.admitted
            self._next_number = max(self._next_number, episode.number + 1)
            self.live[episode.number] = episode
            self.pending.append(episode)

    def start_soon(self) -> None:
        """Has the loop start what capacity allows."""
        self._loop.call_soon(self._pump)

    def serve(self, batch_size: int) -> None:
        """Notes that batches of `batch_size` episodes are consumed from now on, one per version."""
        with self.changed:
            bounded = self.config.max_concurrent_rollouts is not None
            self.staleness.serve(batch_size, self._engine.get_version(), bounded=bounded)

    def expect(self, batches: int) -> None:
        """Notes that the consumer takes this many batches from now on, and no more."""
        with self.changed:
            self.staleness.batches_left = batches

    def wanted(self) -> int:
        """Returns how many episodes to submit: the staleness room, plus one batch in waiting when
        asynchronous, so that generation goes on while the trainer trains; none that no batch will
        take. A resumed run submits all rows that were in flight at once: one of them that becomes
        too stale is submitted again behind them, as it would have been without the stop. *"""
        room = self.staleness.room(self._engine.get_version())
        if self.config.max_head_offpolicyness > 0:
            room += self.staleness.consumer_batch or 0
        if (needed := self.staleness.needed()) is not None:
            room = min(room, needed)
        return max(room - len(self.pending), len(self._numbers))

    def take(self, count: int) -> list[Episode] | None:
        """Returns the next `count` episodes by rollout.order in order of submission, once all are
        accepted, else None. One that has become too stale is dropped and its row submitted again.
        Raises the error of an episode that failed, RuntimeError where too many rollouts did. *"""
        if self._faults:
            raise self._faults.pop(0)
        if self._failed:
            error = self._failed.pop(0).error
            assert error is not None
            raise error
        self.failure_rate.check()
        version = self._engine.get_version()
        is_stale, ready = self.staleness.is_stale, self._next(count)
        while stale := [e for e in ready if is_stale(e.oldest, version)]:
            for episode in stale:
                self._drop(episode, version)
            ready = self._next(count)
        if len(ready) < count:
            return None
        for episode in ready:
            del self.live[episode.number]
            self.failed_samples.add(episode.failed, episode.retried)
            self._remember(episode)
        self.staleness.hand_out(count)
        self.check()
        return ready

    def turn_down(self, count: int, should_accept: ShouldAccept) -> None:
        """Counts those as rejected of the next `count` accepted episodes that `should_accept` does
        not want; it is asked about each once. *"""
        while unknown := [e for e in self._next(count) if e.wanted_by is not should_accept]:
            for episode in unknown:
                assert episode.batch is not None
                if should_accept(episode.batch):
                    episode.wanted_by = should_accept
                else:
                    self.staleness.turn_down()
                    del self.live[episode.number]
                    self.failed_samples.add(episode.failed)
                    self._remember(episode)
                    self.start_soon()

    def first_due(self) -> int:
        """Returns the number below which no episode will be handed out any more. *"""
        numbers = (e.number for e in [*self._failed, *self.live.values()])
        return min([self._next_number, *self._numbers, *numbers])

    def _next(self, count: int) -> list[Episode]:
        """Returns those accepted episodes that the next batch of `count` takes, as far as they are
        known, in order of submission. *"""
        if self.config.order == "submission":
            return order.head(self.live.values(), count)
        live = list(self.live.values())
        version, bound = self._engine.get_version(), self.config.max_head_offpolicyness
        blocked = len(self.pending) if self.staleness.room(version) <= 0 else 0
        taken = order.first_come(live, count, version=version, bound=bound, blocked=blocked)
        return sorted(taken, key=lambda e: e.number)

    def check(self) -> None:
        """Raises AccountingError unless every episode is accounted for. *"""
        self.staleness.check(in_flight=len(self.live) - len(self.pending))

    def state_dict(self) -> dict[str, Any]:
        """Returns the counters and, in `rows`, the prompts in flight in their order. They are
        submitted again after a resume, so they count as not submitted yet; so do failures that
        nobody has been told of. numbers: those they keep, which their seeds are keyed by. *"""
        self.check()
        in_flight = sorted([*self._failed, *self.live.values()], key=lambda e: e.number)
        again = [e for e in in_flight if e.drawn]
        return {
            "rows": [e.row for e in again],
            "numbers": [*(e.number for e in again), *self._numbers],
            "answers": _answers(again),
            "next_number": self._next_number,
            "failed_samples": self.failed_samples.state_dict(),
            "outcomes": self.outcomes.state_dict(),
            "counters": self.staleness.state_dict(untold=len(self._failed)),
        }

    def cut(self) -> None:
        """Notes all answers as they are. Generation is paused and no answer is on its way."""
        with self.changed:
            for episode in [*self._ended, *self._failed, *self.live.values()]:
                if episode.answers is not None:
                    episode.answers.cut()

    def answers(self) -> Kept:
        """Returns the answers as of the last cut of every episode that was in flight since the last
        change of the weights, in order: a run that starts again from those weights makes these
        episodes again."""
        with self.changed:
            episodes = [*self._ended, *self._failed, *self.live.values()]
        return _answers(sorted(episodes, key=lambda e: e.number))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the counters of `state_dict`; its `rows` are for the caller to submit."""
        with self.changed:
            assert not self.staleness.submitted, "load_state_dict after the first episode"
            self._next_number = state["next_number"]
            self._numbers = deque(state["numbers"][: len(state["rows"])])  # no rows of other data
            self.failed_samples.load_state_dict(state["failed_samples"])
            self.outcomes.load_state_dict(state.get("outcomes", ()))
            self.kept = KeptAnswers(state["answers"])
            self.staleness.load_state_dict(state["counters"])
            self.staleness.begin(self._engine.get_version())

    def sleep(self, deadline: float | None, what: str) -> None:
        """Waits for a change, until `deadline` or for episode_timeout without any; it may return
        without one. Raises TimeoutError at the end of either, and StopRequested where a signal asks
        for it: nothing is half done here. *

        An episode fails at episode_timeout by itself; this bound is for what else may hang.
        """
        held = 0.0 if self._held_since is None else time.monotonic() - self._held_since
        quiet = self.last_progress + held + self.config.episode_timeout + GRACE
        until = quiet if deadline is None else min(deadline, quiet)
        left = until - time.monotonic()
        if left > 0:
            self.changed.wait(min(left, LOOK_AROUND))
            if stopping.wish():
                raise stopping.StopRequested
        else:
            counters = ", ".join(f"{v} {k}" for k, v in self.staleness.counters().items())
            why = "" if until < quiet else f"; none ended for rollout.episode_timeout + {GRACE:g} s"
            raise TimeoutError(
                f"timed out waiting for {what}: {counters}{why} {self._loop.blocked()}".rstrip()
            )

    def check_not_stuck(self, count: int) -> None:
        """Raises RuntimeError where waiting for `count` episodes cannot help. *"""
        if not self._loop.alive:
            raise RuntimeError("the rollout thread has ended")
        if self.staleness.running:
            return
        version = self._engine.get_version()
        if self._held_since is not None and self.pending:
            raise RuntimeError("waiting for episodes while generation is paused: resume() first")
        if self.staleness.batches_left == 0:
            raise RuntimeError("no episode may start: all batches that expect() allows were taken")
        if self.staleness.capacity(version) <= 0:
            raise RuntimeError(
                f"no episode may start: the batches that version {version} allows under "
                f"rollout.max_head_offpolicyness={self.config.max_head_offpolicyness} are handed "
                "out; call update_weights or set_version after every training step"
            )
        if not self.pending:
            raise RuntimeError(f"waiting for {count} episodes, but only {len(self.live)} are left")

    def version_changed(self, version: int) -> None:
        """Takes note of the weights' new `version`, under which more episodes may start. Raises
        ValueError where no batch was handed out for it."""
        with self.changed:
            if not self._started:
                self.staleness.begin(version)
            self.staleness.check_version(version)
            self._ended.clear()
        self.start_soon()

    def hold(self) -> None:
        """Starts no further episodes (those running wait in the client)."""
        with self.changed:
            if self._held_since is None:
                self._held_since = time.monotonic()
        self._loop.call_soon(self._clock.hold)

    def release(self) -> None:
        """Starts episodes again after `hold`."""
        with self.changed:
            if self._held_since is not None:  # a pause is not the episodes' time
                self.last_progress += time.monotonic() - self._held_since
            self._held_since = None
        self._loop.call_soon(self._clock.release)
        self.start_soon()

    def _remember(self, episode: Episode) -> None:
        """Shows `observer` an episode that is done with; keeps its answers, not its samples. *"""
        self.observer(episode)
        if episode.answers is not None:
            self._ended.append(replace(episode, batch=None, lost=()))

    def _drop(self, episode: Episode, version: int) -> None:
        if episode.drops + 1 == MAX_DROPS:  # begun anew under newer weights every time
            raise RuntimeError(
                f"{episode.name} was dropped {MAX_DROPS} times in a row: at version {version} "
                f"{type(episode.workflow).__name__} returned trained tokens of version "
                f"{episode.oldest}, which rollout.max_head_offpolicyness="
                f"{self.config.max_head_offpolicyness} is too low for; give tokens the "
                "output_versions of the response that brought them, or raise the bound"
            )
        self.staleness.drop()
        del self.live[episode.number]
        self.enqueue(
            episode.row,
            episode.workflow,
            episode.should_accept,
            drawn=episode.drawn,
            drops=episode.drops + 1,
        )
        self.start_soon()

    # loop's side

    async def run(self, episode: Episode) -> None:
        """Runs one episode to its end, whatever that is; counts nothing."""
        terms = {
            "timeout": self.config.episode_timeout,
            "vocab_size": self.vocab_size,
            "retries": self.config.failure_retries,
            "min_rollouts": self.config.min_rollouts if episode.drawn else 1,
            "on_reward_error": self.config.on_reward_error,
        }
        await self.runner(episode, terms)

    async def _run_here(self, episode: Episode, terms: Mapping[str, Any]) -> None:
        await run_episode(episode, self._engine, clock=self._clock, **terms)

    def _pump(self) -> None:
        with self.changed:
            while (
                self.pending
                and self._held_since is None
                and self.staleness.capacity(self._engine.get_version()) > 0
            ):
                episode = self.pending.popleft()
                version = self._engine.get_version()
                episode.began = version if episode.began is None else min(episode.began, version)
                if episode.admitted is None:
                    episode.admitted = version
                if episode.answers is not None:
                    episode.answers.admitted = episode.admitted
                self.staleness.start()
                self._started = True
                task = asyncio.get_running_loop().create_task(self._run(episode))
                self._tasks.add(task)
                task.add_done_callback(self._reap)

    async def _run(self, episode: Episode) -> None:
        await self.run(episode)
        with self.changed:
            self._settle(episode)
            self.last_progress = time.monotonic()
            self.changed.notify_all()
        self._pump()

    def _settle(self, episode: Episode) -> None:
        self.failure_rate.add(episode.failed, episode.good)
        self.outcomes.add(episode)
        if episode.batch is not None:
            self.staleness.accept()
            episode.place = next(self._places)
            self.rejected_in_a_row = 0
            return
        del self.live[episode.number]
        if episode.error is None:
            self.staleness.reject()
            self.failed_samples.add(episode.failed)
            self._remember(episode)
            self.rejected_in_a_row += 1
        else:
            self.staleness.fail()
            self._failed.append(episode)

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            with self.changed:  # a fault of ours, yet a waiting trainer must hear of it
                self._faults.append(error)
                self.changed.notify_all()


def _answers(episodes: Iterable[Episode]) -> Kept:
    return [(e.row.get("row_id"), e.answers.state()) for e in episodes if e.answers is not None]


def has_signal(batch: Padded) -> bool:
    """Returns whether the rewards of a group differ; equal rewards teach nothing (DAPO's dynamic
    sampling, arXiv 2503.14476)."""
    return bool(batch["rewards"].min() != batch["rewards"].max())
