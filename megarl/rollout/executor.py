"""RolloutExecutor: keeps episodes running in the rollout thread and hands out ordered batches.

Callers' threads submit and wait; the loop thread starts episodes while the StalenessManager has
capacity. One condition variable guards the shared state. Results come in order of submission, so a
batch does not depend on which episodes happened to finish first (nor favour short answers); what a
straggler holds back, admission by capacity keeps generating meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from megarl.api.inference import Batch, InferenceEngine, RolloutWorkflow
from megarl.config.rollout import RolloutConfig
from megarl.rollout.episode import Episode, join_episodes, run_episode
from megarl.rollout.feeder import RowFeeder
from megarl.rollout.loop_thread import LoopThread
from megarl.rollout.rewards import RewardError
from megarl.rollout.staleness import StalenessManager

log = logging.getLogger(__name__)

WorkflowBuilder = Callable[[], RolloutWorkflow]
ShouldAccept = Callable[[Batch], bool]

# episodes in flight when rollout.max_concurrent_rollouts is null and no training batch says more
DEFAULT_CONCURRENCY = 256
# prepare_batch gives up when this many batches' worth of groups in a row were all rejected
MAX_REJECTED_BATCHES = 64
GRACE = 30.0  # seconds beyond episode_timeout before a wait without any progress is an error


class RolloutExecutor:
    """`engine` is what workflows generate with; its version decides admission and staleness."""

    def __init__(
        self, config: RolloutConfig, *, engine: InferenceEngine, loop: LoopThread
    ) -> None:
        self.config, self._engine, self._loop = config, engine, loop
        self.staleness = StalenessManager(
            max_concurrent=config.max_concurrent_rollouts or DEFAULT_CONCURRENCY,
            max_head_offpolicyness=config.max_head_offpolicyness,
            start_version=engine.get_version(),
        )
        self._changed = threading.Condition()
        self._pending: deque[Episode] = deque()
        self._live: dict[int, Episode] = {}  # pending, running, accepted; in submission order
        self._failures: list[BaseException] = []
        self._feeder: RowFeeder | None = None
        self._held = False
        self._submissions = 0
        self._attempts: dict[Any, int] = {}  # row_id -> submissions under the current version
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_progress = time.monotonic()
        self._rejected_in_a_row = 0
        self._reward_errors = 0
        self._batch_stats: dict[str, float] = {}

    # what the engine calls

    def submit(
        self, data: dict[str, Any], workflow: RolloutWorkflow | None = None,
        workflow_builder: WorkflowBuilder | None = None,
        should_accept: ShouldAccept | None = None,
    ) -> None:
        """Queues one episode; it starts when capacity allows."""
        self._enqueue(data, _workflow(workflow, workflow_builder), should_accept)
        self._loop.call_soon(self._pump)

    def wait(self, count: int, timeout: float | None = None) -> Batch:
        """The next `count` accepted episodes, joined; group_ids number them from 0. An episode that
        failed makes this raise its error.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        begun = time.monotonic()
        with self._changed:
            self._last_progress = begun
            while (batch := self._take(count)) is None:
                self._check_not_stuck(count)
                self._sleep(deadline, f"{count} episodes")
        return self._hand_out(batch, begun)

    def prepare_batch(
        self, dataloader: Iterable[list[dict[str, Any]]],
        workflow: RolloutWorkflow | None = None,
        workflow_builder: WorkflowBuilder | None = None,
        should_accept: ShouldAccept | None = None,
    ) -> Batch:
        """One consumer batch: as many episodes as the dataloader's batch has rows. Rejected groups
        are replaced by the next rows, over the end of the epoch if need be.
        """
        flow = _workflow(workflow, workflow_builder)
        feeder = self._feed_from(dataloader)
        count, begun = feeder.batch_size, time.monotonic()
        self._last_progress, self._rejected_in_a_row = begun, 0
        while True:
            self._top_up(feeder, flow, should_accept)
            with self._changed:
                if (batch := self._take(count)) is not None:
                    break
                if self._wanted() > 0:
                    continue  # a rejection just made room for another row
                self._check_signal(count)
                self._check_not_stuck(count)
                self._sleep(None, f"a batch of {count} episodes")
        return self._hand_out(batch, begun)

    def rollout_batch(
        self, data: Sequence[dict[str, Any]], workflow: RolloutWorkflow | None = None,
        workflow_builder: WorkflowBuilder | None = None,
        should_accept: ShouldAccept | None = None,
    ) -> Batch:
        """All rows, whatever the staleness bound (evaluation); group_ids is the index into `data`.
        Rejected rows are left out; an episode that fails cancels the rest and raises.
        """
        if not data:
            raise ValueError("rollout_batch: no rows")
        flow = _workflow(workflow, workflow_builder)
        episodes = [
            Episode(number=i, row=row, workflow=flow, should_accept=should_accept)
            for i, row in enumerate(data)
        ]
        width = self.config.max_concurrent_rollouts or max(
            DEFAULT_CONCURRENCY, self.staleness.consumer_batch or 0
        )
        waves = -(-len(data) // width)
        self._loop.run(
            self._run_all(episodes, width), timeout=waves * self.config.episode_timeout + GRACE
        )
        accepted = [e for e in episodes if e.batch is not None]
        if not accepted:
            raise RuntimeError(f"rollout_batch: all {len(data)} rows were rejected")
        return join_episodes(accepted, group_ids=[e.number for e in accepted])

    def version_changed(self, version: int) -> None:
        with self._changed:
            if not self.staleness.submitted:
                self.staleness.start_version = version
            self._attempts.clear()
        self._loop.call_soon(self._pump)

    def hold(self) -> None:
        """Starts no further episodes (those running wait in the client)."""
        with self._changed:
            self._held = True

    def release(self) -> None:
        with self._changed:
            self._held = False
            self._last_progress = time.monotonic()
        self._loop.call_soon(self._pump)

    def stats(self) -> dict[str, float]:
        """Counters since the start and figures of the last batch: wait_time (s the trainer waited),
        latency_mean and latency_max (s per episode), staleness_mean and staleness_max (versions).
        """
        with self._changed:
            counters = self.staleness.counters() | {
                "pending": len(self._pending), "reward_errors": self._reward_errors,
            }
        return {k: float(v) for k, v in counters.items()} | self._batch_stats

    def state_dict(self) -> dict[str, Any]:
        """Rows drawn from the dataloader but not yet handed out, in order: a resumed run submits
        them before it draws more.
        """
        with self._changed:
            rows = [e.row for e in self._live.values() if e.drawn]
        return {"rows": rows + (self._feeder.buffered if self._feeder else [])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self._feeder is None and not self._live, "load_state_dict after the first batch"
        self._feeder = RowFeeder(first=state["rows"])

    # callers' side

    def _feed_from(self, dataloader: Iterable[list[dict[str, Any]]]) -> RowFeeder:
        if self._feeder is None:
            self._feeder = RowFeeder()
        self._feeder.attach(dataloader)
        with self._changed:
            self.staleness.consumer_batch = self._feeder.batch_size
            if self.config.max_concurrent_rollouts is None:
                self.staleness.max_concurrent = self._feeder.batch_size
        return self._feeder

    def _wanted(self) -> int:
        """Rows to draw: the staleness room, plus one batch in waiting when asynchronous, so that
        the pipe refills while the trainer trains.
        """
        room = self.staleness.room(self._engine.get_version())
        if self.config.max_head_offpolicyness > 0:
            room += self.staleness.consumer_batch or 0
        return room - len(self._pending)

    def _top_up(
        self, feeder: RowFeeder, workflow: RolloutWorkflow, should_accept: ShouldAccept | None
    ) -> None:
        with self._changed:
            wanted = self._wanted()
        for _ in range(wanted):
            self._enqueue(feeder.next_row(), workflow, should_accept, drawn=True)
        self._loop.call_soon(self._pump)

    def _enqueue(
        self, row: dict[str, Any], workflow: RolloutWorkflow, should_accept: ShouldAccept | None,
        *, drawn: bool = False, first: bool = False,
    ) -> None:
        with self._changed:
            episode = Episode(
                number=self._submissions, row=row, workflow=workflow,
                should_accept=should_accept, drawn=drawn,
            )
            self._submissions += 1
            self._live[episode.number] = episode
            (self._pending.appendleft if first else self._pending.append)(episode)

    def _take(self, count: int) -> list[Episode] | None:
        """The first `count` live episodes if all are accepted and fresh enough. Holds the lock."""
        if self._failures:
            raise self._failures.pop(0)
        version, ready = self._engine.get_version(), []
        for episode in list(self._live.values()):
            if len(ready) == count or episode.batch is None:
                break
            if self.staleness.is_stale(episode.oldest_version(), version):
                self._drop(episode)
            else:
                ready.append(episode)
        if len(ready) < count:
            return None
        for episode in ready:
            del self._live[episode.number]
        return ready

    def _drop(self, episode: Episode) -> None:
        self.staleness.drop()
        del self._live[episode.number]
        self._enqueue(
            episode.row, episode.workflow, episode.should_accept, drawn=episode.drawn, first=True
        )
        self._loop.call_soon(self._pump)

    def _hand_out(self, episodes: list[Episode], begun: float) -> Batch:
        version = self._engine.get_version()
        ages = [version - o for e in episodes if (o := e.oldest_version()) is not None] or [0]
        latencies = [e.latency for e in episodes]
        self._batch_stats = {
            "wait_time": time.monotonic() - begun,
            "latency_mean": sum(latencies) / len(latencies),
            "latency_max": max(latencies),
            "staleness_mean": sum(ages) / len(ages),
            "staleness_max": float(max(ages)),
        }
        return join_episodes(episodes, group_ids=range(len(episodes)))

    def _check_signal(self, batch_size: int) -> None:
        if self._rejected_in_a_row >= MAX_REJECTED_BATCHES * batch_size:
            raise RuntimeError(
                f"{self._rejected_in_a_row} groups in a row were rejected: nothing to train on; "
                "check the reward and should_accept (actor.dynamic_sampling)"
            )

    def _check_not_stuck(self, count: int) -> None:
        """Raises where waiting cannot help. Holds the lock."""
        if not self._loop.alive:
            raise RuntimeError("the rollout thread has ended")
        if self.staleness.running:
            return
        version = self._engine.get_version()
        if not self._pending:
            raise RuntimeError(f"waiting for {count} episodes, but only {len(self._live)} are left")
        if self._held:
            raise RuntimeError("waiting for episodes while generation is paused: resume() first")
        if self.staleness.capacity(version) <= 0:
            raise RuntimeError(
                f"no episode may start: the batches that version {version} allows under "
                f"rollout.max_head_offpolicyness={self.config.max_head_offpolicyness} are handed "
                "out; call update_weights or set_version after every training step"
            )

    def _sleep(self, deadline: float | None, what: str) -> None:
        """Waits for a change, until `deadline` or for episode_timeout without any. Holds the lock.

        An episode fails at episode_timeout by itself; this bound is for what else may hang.
        """
        quiet = self._last_progress + self.config.episode_timeout + GRACE
        until = quiet if deadline is None else min(deadline, quiet)
        left = until - time.monotonic()
        if left <= 0 or not self._changed.wait(left):
            counters = ", ".join(f"{v} {k}" for k, v in self.staleness.counters().items())
            raise TimeoutError(f"timed out waiting for {what}: {counters}")

    # loop's side

    def _pump(self) -> None:
        """Starts pending episodes while there is capacity. Runs in the loop thread."""
        with self._changed:
            while (
                self._pending and not self._held
                and self.staleness.capacity(self._engine.get_version()) > 0
            ):
                episode = self._pending.popleft()
                self.staleness.start()
                self._count_attempt(episode)
                task = asyncio.get_running_loop().create_task(self._run(episode))
                self._tasks.add(task)
                task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            with self._changed:  # our own fault, yet a waiting trainer must hear of it
                self._failures.append(error)
                self._changed.notify_all()

    def _count_attempt(self, episode: Episode) -> None:
        """Seeds must differ when a row comes again under the same weights (`attempt` in the row)."""
        key = episode.row.get("row_id", id(episode.row))
        episode.attempt = self._attempts.get(key, 0)
        self._attempts[key] = episode.attempt + 1

    async def _run(self, episode: Episode) -> None:
        await run_episode(episode, self._engine, timeout=self.config.episode_timeout)
        with self._changed:
            self._settle(episode)
            self._last_progress = time.monotonic()
            self._changed.notify_all()
        self._pump()

    def _settle(self, episode: Episode) -> None:
        if episode.batch is not None:
            self.staleness.accept()
            self._rejected_in_a_row = 0
            return
        del self._live[episode.number]
        if episode.error is None or self._forgiven(episode.error):
            self.staleness.reject()
            self._rejected_in_a_row += 1
        else:
            self.staleness.fail()
            self._failures.append(episode.error)

    def _forgiven(self, error: BaseException) -> bool:
        if not isinstance(error, RewardError) or self.config.on_reward_error == "raise":
            return False
        self._reward_errors += 1
        log.warning("rejected (rollout.on_reward_error=reject): %s", error)
        return True

    async def _run_all(self, episodes: Sequence[Episode], width: int) -> None:
        slots = asyncio.Semaphore(width)

        async def one(episode: Episode) -> None:
            async with slots:
                await run_episode(episode, self._engine, timeout=self.config.episode_timeout)
            if episode.error is not None and not self._forgiven(episode.error):
                raise episode.error

        tasks = [asyncio.ensure_future(one(e)) for e in episodes]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _workflow(
    workflow: RolloutWorkflow | None, builder: WorkflowBuilder | None
) -> RolloutWorkflow:
    if (workflow is None) == (builder is None):
        raise ValueError("pass either workflow or workflow_builder")
    if workflow is not None:
        return workflow
    assert builder is not None
    return builder()
