"""Defines RolloutExecutor, the trainer's view of rollouts: submit episodes, get batches.

While a straggler holds a batch back, others keep generating up to the staleness bound
(`staleness.py`, which also says which episodes make a batch).

Callers' threads submit and take; the loop thread starts and ends episodes. One condition variable,
Episodes.changed, guards everything. Methods whose docstring ends in * are called with it held.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from megarl.api.batch import Batch, Padded
from megarl.api.inference import InferenceEngine, RolloutWorkflow
from megarl.api.tokens import concat_padded
from megarl.config.rollout import RolloutConfig
from megarl.rollout.episode import batch_parts, conclude, run_all, run_episode
from megarl.rollout.episodes import (
    Episode,
    Episodes,
    Failures,
    Outcome,
    RowStream,
    Runner,
    ShouldAccept,
    State,
    number_of,
)
from megarl.rollout.loop_thread import LoopThread, PauseClock
from megarl.rollout.staleness import Admission, head
from megarl.utils import stopping

Row = dict[str, Any]
# episodes in flight when rollout.max_concurrent_rollouts is null and no training batch says more
DEFAULT_CONCURRENCY = 256
LOOK_AROUND = 1.0  # seconds at most until a waiting caller notices a signal
GRACE = 30.0  # seconds beyond episode_timeout before a wait without any progress is an error


class Answered(NamedTuple):
    """Holds what rows were answered with. batch: the samples [B,S] that there are, whose group_ids
    [B] are the rows' indices; None for none. failed: of each row the number of rollouts that it
    lacks, because they failed and were not made anew."""

    batch: Padded | None
    failed: list[int]


class RolloutExecutor:
    """Runs episodes of `engine` in `loop`, whose version decides admission and staleness. Its
    methods are for other threads than the loop's.

    runner: brings an episode to its end, in this process or another.
    observer: is shown every episode that a batch takes, or that is rejected.
    vocab_size: the model's, where it is known.
    outcomes: told with the last batch: its own, and rejected ones.
    """

    def __init__(self, config: RolloutConfig, *, engine: InferenceEngine, loop: LoopThread) -> None:
        self.config, self._engine, self._loop = config, engine, loop
        self.runner: Runner = self._run_here
        self.observer: Callable[[Episode], None] = lambda episode: None
        self.vocab_size: int | None = None
        self.outcomes: list[Outcome] = []
        self.episodes = Episodes()
        self.changed = self.episodes.changed
        self.failures = Failures(config.max_failure_rate)
        self.admission = Admission(
            max_concurrent=config.max_concurrent_rollouts or DEFAULT_CONCURRENCY,
            max_head_offpolicyness=config.max_head_offpolicyness,
        )
        self._rows = RowStream()
        self._clock = PauseClock()  # of the episodes that run here
        self._held_since: float | None = None
        self._last_progress = time.monotonic()
        self._batch_stats: dict[str, float] = {}
        self._failed_before = 0  # rollouts, by the end of the last batch that was trained
        self._faults: list[BaseException] = []  # of this code, not of an episode
        self._tasks: set[asyncio.Task[None]] = set()

    # -- batches

    def submit(
        self,
        data: Row,
        workflow: RolloutWorkflow,
        should_accept: ShouldAccept | None = None,
    ) -> None:
        """Queues one episode; it starts when capacity allows."""
        episode = Episode(row=data, workflow=workflow, should_accept=should_accept)
        with self.changed:
            self.episodes.add(episode)
        self._start_soon()

    def wait(
        self, count: int, timeout: float | None = None, should_accept: ShouldAccept | None = None
    ) -> Padded:
        """Returns the next `count` accepted episodes, joined; group_ids [B] number them from 0,
        episode_ids [B] over the whole run. `should_accept` may reject some of those that submit's
        has accepted. Raises the error of an episode that failed, and TimeoutError after `timeout`
        s."""
        if count < 1:
            raise ValueError(f"wait({count}): wait for at least 1 episode")
        begun = time.monotonic()
        deadline = None if timeout is None else begun + timeout
        with self.changed:
            self._last_progress = begun
            while True:
                if should_accept is not None:
                    self._turn_down(count, should_accept)
                if (batch := self._take(count)) is not None:
                    break
                self._check_not_stuck(count)
                self._sleep(deadline, f"{count} episodes")
        return concat_padded(self._hand_out(batch, begun))

    def prepare_parts(
        self,
        dataloader: Iterable[list[Row]],
        workflow: RolloutWorkflow,
        should_accept: ShouldAccept | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[Padded]:
        """Returns the samples of one training batch: as many episodes as the dataloader's batch has
        rows, each padded to its longest sample, as Batch.from_local takes them. Rejected groups are
        replaced by the next rows, over the end of the epoch if need be. `meanwhile` is called about
        every second of the wait, and at its end. Raises RuntimeError where MAX_REJECTED_BATCHES
        batches in a row were rejected."""
        meanwhile = meanwhile or (lambda: None)
        count, begun = self._serve(dataloader), time.monotonic()
        with self.changed:
            self._last_progress, self.failures.rejected_in_a_row = begun, 0
        while True:
            with self.changed:
                wanted = self._wanted()
            for _ in range(wanted):
                episode = Episode(
                    row=self._rows.next_row(),
                    workflow=workflow,
                    should_accept=should_accept,
                    drawn=True,
                    may_fail=True,
                )
                with self.changed:
                    self.episodes.add(episode)
            self._start_soon()
            with self.changed:
                if (batch := self._take(count)) is not None:
                    break
                if self._wanted() > 0:
                    continue  # a rejection just made room for another row
                self.failures.check_signal(count)
                self._check_not_stuck(count)
                self._sleep(None, f"a batch of {count} episodes")
            meanwhile()
        meanwhile()
        return self._hand_out(batch, begun)

    def expect(self, batches: int) -> None:
        """Says how many batches prepare_batch will be asked for from now on: no episode begins that
        none of them can use. Without this call episodes begin without end."""
        with self.changed:
            self.admission.batches_left = batches

    def rollout_batch(
        self,
        data: Sequence[Row],
        workflow: RolloutWorkflow,
        should_accept: ShouldAccept | None = None,
    ) -> Padded:
        """Returns the samples of all rows as `answer` does, with routes, joined. Raises
        RuntimeError where there are none."""
        batch, failed = self.answer(data, workflow, should_accept, routes=True)
        if batch is None:
            raise RuntimeError(
                f"rollout_batch: all {len(data)} rows were rejected, or failed "
                f"({sum(map(bool, failed))} of them)"
            )
        return batch

    def answer(
        self,
        data: Sequence[Row],
        workflow: RolloutWorkflow,
        should_accept: ShouldAccept | None = None,
        *,
        routes: bool = False,
    ) -> Answered:
        """Returns the samples of all rows, whatever the staleness bound (evaluation). What failed
        is made anew rollout.failure_retries times, as in training, and then left out, as are rows
        that are rejected, or that overrun rollout.episode_timeout. An episode that raises another
        error cancels the rest. routes: whether samples carry routes, as they do for training."""
        if not data:
            raise ValueError("rollout_batch: no rows")
        episodes = [
            Episode(
                number=i,
                row=row,
                workflow=workflow,
                should_accept=should_accept,
                may_fail=True,
                routes=routes,
            )
            for i, row in enumerate(data)
        ]
        width = self.config.max_concurrent_rollouts or DEFAULT_CONCURRENCY
        waves = -(-len(data) // width)
        limit = waves * self.config.episode_timeout + GRACE
        self._loop.run(run_all(episodes, width, self._bring), timeout=limit, stoppable=True)
        failed = [e.missing for e in episodes]
        accepted = [e for e in episodes if e.batch is not None]
        if not accepted:
            return Answered(None, failed)
        batch = concat_padded(batch_parts(accepted, group_ids=[e.number for e in accepted]))
        del batch["episode_ids"]  # these episodes have no place in the order of submission
        return Answered(batch, failed)

    # -- weights

    def version_changed(self, version: int) -> None:
        """Takes note of the weights' new `version`, under which more episodes may start. Raises
        ValueError where no batch was handed out for it."""
        with self.changed:
            self.admission.check_version(version, self.episodes.counts)
            self.episodes.version_changed()
        self._start_soon()

    def hold(self) -> None:
        """Starts no further episodes (those running wait in the client)."""
        with self.changed:
            if self._held_since is None:
                self._held_since = time.monotonic()
        self._loop.call_soon(self._clock.hold)

    def release(self) -> None:
        """Starts episodes again after `hold`."""
        with self.changed:
            self._last_progress += self._held_for()  # a pause is not the episodes' time
            self._held_since = None
        self._loop.call_soon(self._clock.release)
        self._start_soon()

    def _held_for(self) -> float:
        return 0.0 if self._held_since is None else time.monotonic() - self._held_since

    # -- books

    def stats(self) -> dict[str, float]:
        """Returns counters of the run (submitted = running + accepted + rejected + failed +
        dropped) and metrics of the last batch: wait_time (s the trainer waited), latency_mean and
        latency_max (s per episode), failed_in_batch (rollouts that failed until it was trained
        since the one before was)."""
        with self.changed:
            counters = self.episodes.stats() | {"max_concurrent": self.admission.max_concurrent}
            failed = self.failures.stats()
        return {k: float(v) for k, v in counters.items()} | failed | self._batch_stats

    def trained(self, episode_ids: torch.Tensor, skipped: torch.Tensor | None = None) -> None:
        """Books the samples [B] of the last batch's episodes as trained, but those under `skipped`
        [B] bool as skipped. Raises AccountingError unless all that was ever handed out is one or
        the other."""
        left_out = Counter([] if skipped is None else episode_ids[skipped].tolist())
        with self.changed:
            self.episodes.train(Counter(episode_ids.tolist()), left_out)
            failed = self.failures.kinds.total()
        self._batch_stats["failed_in_batch"] = failed - self._failed_before
        self._failed_before = failed

    def failed(self, batch: Batch, mask: torch.Tensor, kind: str) -> None:
        """Books samples of the last batch as failed: those under `mask` [B] bool, all
        rows of some rollouts, which batch.keep(~mask) leaves out. `kind` is one of
        api.inference.FAILURES."""
        lengths: Counter[int] = Counter()
        for unit, n in zip(batch.rollout_ids[mask].tolist(), batch.lengths[mask].tolist()):
            lengths[unit] += n
        with self.changed:
            self.episodes.lose(Counter(batch["episode_ids"][mask].tolist()))
            self.failures.add([(kind, n) for n in lengths.values()])

    # -- resumes

    def state_dict(self) -> dict[str, Any]:
        """Returns, between two batches, the counters and the rows drawn from the dataloader but not
        yet handed out, in order; a resumed run submits them before it draws more. It is plain
        data."""
        with self.changed:
            state = self.episodes.state_dict() | {"failed_samples": self.failures.state_dict()}
        state["rows"] += self._rows.buffered
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`, before the first batch."""
        assert not self._rows.batch_size, "load_state_dict after the first batch"
        with self.changed:
            self.episodes.load_state_dict(state)
            self.failures.load_state_dict(state["failed_samples"])
            self._failed_before = self.failures.kinds.total()
        self._rows = RowStream(first=state["rows"])

    # -- callers' side

    def _serve(self, dataloader: Iterable[list[Row]]) -> int:
        """Returns how many episodes a batch takes, of which each version gets one."""
        self._rows.attach(dataloader)
        size = self._rows.batch_size
        with self.changed:
            if self.admission.batch is None:
                self.admission.serve(size, self._engine.get_version(), self.episodes.counts)
                if self.config.max_concurrent_rollouts is None:
                    self.admission.max_concurrent = size
        return size

    def _wanted(self) -> int:
        """Returns how many episodes to submit. A resumed run submits all rows that were in flight
        at once: one of them that becomes too stale is submitted again behind them, as it would have
        been without the stop. *"""
        wanted = self.admission.wanted(self._engine.get_version(), self.episodes.counts)
        return max(wanted, len(self.episodes.reserved))

    def _next(self, count: int) -> list[Episode]:
        """Returns those accepted episodes that the next batch of `count` takes, as far as they are
        known, in order of submission. *"""
        if self.config.order == "submission":
            return head(self.episodes.live.values(), count)
        live = [e for e in self.episodes.live.values() if e.state is not State.BROKEN]
        version, counts = self._engine.get_version(), self.episodes.counts
        taken = self.admission.first_come(live, count, version, counts)
        return sorted(taken, key=number_of)

    def _take(self, count: int) -> list[Episode] | None:
        """Returns the next `count` episodes by rollout.order in order of submission, once all are
        accepted, else None. One that has become too stale is dropped and its row submitted again.
        Raises the error of an episode that failed, RuntimeError where too many rollouts did. *"""
        if self._faults:
            raise self._faults.pop(0)
        if self.episodes.counts[State.BROKEN]:
            # an episode has its error a moment before it is broken
            broken = next(e for e in self.episodes.live.values() if e.state is State.BROKEN)
            self.episodes.move(broken, State.FAILED)
            assert broken.error is not None
            raise broken.error
        self.failures.check()
        version, is_stale = self._engine.get_version(), self.admission.is_stale
        batch = self._next(count)
        while stale := [e for e in batch if is_stale(e.oldest, version)]:
            for episode in stale:
                fresh = episode.again(version, self.config.max_head_offpolicyness)
                self.episodes.move(episode, State.DROPPED)
                self.episodes.add(fresh)
            self._start_soon()
            batch = self._next(count)
        if len(batch) < count:
            return None
        self.episodes.take(batch)
        for episode in batch:
            self.failures.add(episode.failed, episode.retried)
            self.observer(episode)
        if self.admission.batches_left is not None:
            self.admission.batches_left -= 1
        return batch

    def _turn_down(self, count: int, should_accept: ShouldAccept) -> None:
        """Rejects those of the next `count` accepted episodes that `should_accept` does not want;
        it is asked about each once. *"""
        while unknown := [e for e in self._next(count) if e.wanted_by is not should_accept]:
            for episode in unknown:
                assert episode.batch is not None
                if should_accept(episode.batch):
                    episode.wanted_by = should_accept
                else:
                    self._reject(episode)
            self._start_soon()

    def _reject(self, episode: Episode) -> None:
        """Counts and shows an episode that is rejected. *"""
        self.episodes.move(episode, State.REJECTED)
        self.failures.add(episode.failed)
        self.observer(episode)

    def _hand_out(self, batch: Sequence[Episode], begun: float) -> list[Padded]:
        with self.changed:
            self.outcomes = self.episodes.tell(max(map(number_of, batch)))
        latencies = [e.latency for e in batch]
        self._batch_stats = {
            "wait_time": time.monotonic() - begun,
            "latency_mean": sum(latencies) / len(latencies),
            "latency_max": max(latencies),
        }
        return batch_parts(batch, group_ids=range(len(batch)))

    def _check_not_stuck(self, count: int) -> None:
        """Raises RuntimeError where waiting for `count` episodes cannot help. *"""
        counts = self.episodes.counts
        if not self._loop.alive:
            raise RuntimeError("the rollout thread has ended")
        if counts[State.RUNNING]:
            return
        version, waiting = self._engine.get_version(), counts[State.WAITING]
        if self._held_since is not None and waiting:
            raise RuntimeError("waiting for episodes while generation is paused: resume() first")
        self.admission.check_room(version, counts)
        if not waiting:
            left = counts[State.READY]
            raise RuntimeError(f"waiting for {count} episodes, but only {left} are left")

    def _sleep(self, deadline: float | None, what: str) -> None:
        """Waits for a change, until `deadline` or, as episodes end by themselves before, for
        episode_timeout and GRACE without any; it may return without one. Raises TimeoutError at the
        end of either, and StopRequested where a signal asks for it: nothing is half done here. *"""
        quiet = self._last_progress + self._held_for() + self.config.episode_timeout + GRACE
        until = quiet if deadline is None else min(deadline, quiet)
        left = until - time.monotonic()
        if left > 0:
            self.changed.wait(min(left, LOOK_AROUND))
            if stopping.wish():
                raise stopping.StopRequested
        else:
            counters = ", ".join(f"{v} {k}" for k, v in self.episodes.counters().items())
            why = "" if until < quiet else f"; none ended for rollout.episode_timeout + {GRACE:g} s"
            raise TimeoutError(
                f"timed out waiting for {what}: {counters}{why} {self._loop.blocked()}".rstrip()
            )

    # -- loop's side

    def _start_soon(self) -> None:
        self._loop.call_soon(self._start)

    def _start(self) -> None:
        with self.changed:
            while self.episodes.waiting and self._held_since is None:
                version, counts = self._engine.get_version(), self.episodes.counts
                if self.admission.capacity(version, counts) <= 0:
                    return
                episode = self.episodes.waiting[0]
                self.episodes.move(episode, State.RUNNING)
                episode.begin(version)
                task = asyncio.get_running_loop().create_task(self._run(episode))
                self._tasks.add(task)
                task.add_done_callback(self._reap)

    async def _run(self, episode: Episode) -> None:
        await self._bring(episode)
        with self.changed:
            self.failures.watch(episode)
            if episode.batch is not None:
                self.episodes.move(episode, State.READY)
            elif episode.error is None:
                self._reject(episode)
            else:
                self.episodes.move(episode, State.BROKEN)
            self._last_progress = time.monotonic()
            self.changed.notify_all()
        self._start()

    async def _bring(self, episode: Episode) -> None:
        """Brings an episode to its end, whatever that is; counts nothing."""
        episode.vocab_size = self.vocab_size
        await self.runner(episode)
        conclude(episode)

    async def _run_here(self, episode: Episode) -> None:
        await run_episode(episode, self._engine, self.config, clock=self._clock)

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            with self.changed:  # a fault of this code, yet a waiting trainer must hear of it
                self._faults.append(error)
                self.changed.notify_all()
