"""Defines RolloutExecutor, the trainer's view of rollouts: submit episodes, get batches.

By default results come in order of submission, so a batch does not depend on which episodes
happened to finish first. While a straggler holds a batch back, others keep generating up to the
staleness bound. With rollout.order=completion (`order.py`) it holds a batch back only where a later
one would be too late for it.
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
from megarl.rollout.accounting import AccountingError, SampleAccounting
from megarl.rollout.episode import Episode, batch_parts
from megarl.rollout.loop_thread import LoopThread
from megarl.rollout.outcomes import Outcome
from megarl.rollout.pipeline import DEFAULT_CONCURRENCY, GRACE, Pipeline, ShouldAccept
from megarl.rollout.row_stream import RowStream

WorkflowBuilder = Callable[[], RolloutWorkflow]

# prepare_batch gives up when this many batches' worth of groups in a row were all rejected
MAX_REJECTED_BATCHES = 64


class Answered(NamedTuple):
    """Holds what rows were answered with. batch: the samples [B,S] that there are, whose group_ids
    [B] are the rows' indices; None for none. failed: of each row the number of rollouts that it
    lacks, because they failed and were not made anew."""

    batch: Padded | None
    failed: list[int]


class RolloutExecutor:
    """Runs episodes of `engine` in `loop`. Its methods are for other threads than the loop's."""

    def __init__(self, config: RolloutConfig, *, engine: InferenceEngine, loop: LoopThread) -> None:
        self.config, self._loop = config, loop
        self.pipeline = Pipeline(config, engine=engine, loop=loop)
        self.accounting = SampleAccounting()  # for a consumer that reports to it
        self.outcomes: list[Outcome] = []  # told with the last batch: its own, and rejected ones
        self._rows: RowStream | None = None
        self._batch_stats: dict[str, float] = {}
        self._failed_before = 0  # rollouts, by the end of the last batch that was trained

    def submit(
        self,
        data: dict[str, Any],
        workflow: RolloutWorkflow | None = None,
        workflow_builder: WorkflowBuilder | None = None,
        should_accept: ShouldAccept | None = None,
    ) -> None:
        """Queues one episode; it starts when capacity allows. Raises ValueError unless either a
        workflow or a builder is given."""
        self.pipeline.enqueue(data, _workflow(workflow, workflow_builder), should_accept)
        self.pipeline.start_soon()

    def wait(
        self, count: int, timeout: float | None = None, should_accept: ShouldAccept | None = None
    ) -> Padded:
        """Returns the next `count` accepted episodes, joined; group_ids [B] number them from 0,
        episode_ids [B] over the whole run. `should_accept` may reject some of those that submit's
        has accepted. Raises the error of an episode that failed, and TimeoutError after `timeout`
        s."""
        if count < 1:
            raise ValueError(f"wait({count}): wait for at least 1 episode")
        pipe, begun = self.pipeline, time.monotonic()
        deadline = None if timeout is None else begun + timeout
        with pipe.changed:
            pipe.last_progress = begun
            while True:
                if should_accept is not None:
                    pipe.turn_down(count, should_accept)
                if (episodes := pipe.take(count)) is not None:
                    break
                pipe.check_not_stuck(count)
                pipe.sleep(deadline, f"{count} episodes")
        return concat_padded(self._hand_out(episodes, begun))

    def prepare_parts(
        self,
        dataloader: Iterable[list[dict[str, Any]]],
        workflow: RolloutWorkflow | None = None,
        workflow_builder: WorkflowBuilder | None = None,
        should_accept: ShouldAccept | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[Padded]:
        """Returns the samples of one training batch: as many episodes as the dataloader's batch has
        rows, each padded to its longest sample, as Batch.from_local takes them. Rejected groups are
        replaced by the next rows, over the end of the epoch if need be. `meanwhile` is called about
        every second of the wait, and at its end. Raises RuntimeError where MAX_REJECTED_BATCHES
        batches in a row were rejected."""
        flow = _workflow(workflow, workflow_builder)
        feeder = self._feed_from(dataloader)
        pipe, count, begun = self.pipeline, feeder.batch_size, time.monotonic()
        with pipe.changed:
            pipe.last_progress, pipe.rejected_in_a_row = begun, 0
        while True:
            with pipe.changed:
                wanted = pipe.wanted()
            for _ in range(wanted):
                pipe.enqueue(feeder.next_row(), flow, should_accept, drawn=True)
            pipe.start_soon()
            with pipe.changed:
                if (episodes := pipe.take(count)) is not None:
                    break
                if pipe.wanted() > 0:
                    continue  # a rejection just made room for another row
                self._check_signal(count)
                pipe.check_not_stuck(count)
                pipe.sleep(None, f"a batch of {count} episodes")
            if meanwhile is not None:
                meanwhile()
        if meanwhile is not None:
            meanwhile()
        return self._hand_out(episodes, begun)

    def expect(self, batches: int) -> None:
        """Says how many batches prepare_batch will be asked for from now on: no episode begins that
        none of them can use. Without this call episodes begin without end."""
        self.pipeline.expect(batches)

    def rollout_batch(
        self,
        data: Sequence[dict[str, Any]],
        workflow: RolloutWorkflow | None = None,
        workflow_builder: WorkflowBuilder | None = None,
        should_accept: ShouldAccept | None = None,
        *,
        routes: bool = True,
    ) -> Padded:
        """Returns the samples of all rows as `answer` does, joined. Raises RuntimeError where there
        are none."""
        flow = _workflow(workflow, workflow_builder)
        batch, failed = self.answer(data, flow, should_accept, routes=routes)
        if batch is None:
            raise RuntimeError(
                f"rollout_batch: all {len(data)} rows were rejected, or failed "
                f"({sum(map(bool, failed))} of them)"
            )
        return batch

    def answer(
        self,
        data: Sequence[dict[str, Any]],
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
        self._loop.run(
            self._run_all(episodes, width),
            timeout=waves * self.config.episode_timeout + GRACE,
            stoppable=True,
        )
        failed = [e.missing for e in episodes]
        accepted = [e for e in episodes if e.batch is not None]
        if not accepted:
            return Answered(None, failed)
        batch = concat_padded(batch_parts(accepted, group_ids=[e.number for e in accepted]))
        del batch["episode_ids"]  # these episodes have no place in the order of submission
        return Answered(batch, failed)

    def stats(self) -> dict[str, float]:
        """Returns counters of the run (submitted = running + accepted + rejected + failed +
        dropped, which is checked) and metrics of the last batch: wait_time (s the trainer waited),
        latency_mean and latency_max (s per episode), failed_in_batch (rollouts that failed until
        it was trained since the one before was)."""
        pipe = self.pipeline
        with pipe.changed:
            pipe.check()
            counters = pipe.staleness.counters() | {
                "handed_out": pipe.staleness.handed_out,
                "max_concurrent": pipe.staleness.max_concurrent,
                "pending": len(pipe.pending),
            }
        counters |= {
            "trained": self.accounting.episodes,
            "trained_samples": self.accounting.samples,
            "skipped": self.accounting.skipped_episodes,
            "skipped_samples": self.accounting.skipped_samples,
        }
        failed = pipe.failed_samples.stats()
        return {k: float(v) for k, v in counters.items()} | failed | self._batch_stats

    def failed(self, batch: Batch, mask: torch.Tensor, kind: str) -> None:
        """Books samples of a batch that was handed out as failed: those under `mask` [B] bool, all
        rows of some rollouts, which batch.keep(~mask) leaves out. `kind` is one of
        api.inference.FAILURES."""
        self.accounting.fail(batch["episode_ids"][mask])
        lengths: Counter[int] = Counter()
        for unit, n in zip(batch.rollout_ids[mask].tolist(), batch.lengths[mask].tolist()):
            lengths[unit] += n
        with self.pipeline.changed:
            self.pipeline.failed_samples.add([(kind, n) for n in lengths.values()])

    def received(self, episode_ids: torch.Tensor) -> None:
        """Books the samples [B] of these episodes as handed out. Raises AccountingError for an
        episode that was handed out before."""
        with self.pipeline.changed:
            first_due = self.pipeline.first_due()
        self.accounting.receive(episode_ids, first_due)

    def trained(self, episode_ids: torch.Tensor, skipped: torch.Tensor | None = None) -> None:
        """Books the samples [B] of these episodes as trained, but those under `skipped` [B] bool as
        skipped. Raises AccountingError unless all that was ever handed out is one or the other."""
        self.accounting.train(episode_ids, skipped)
        self.accounting.check()
        with self.pipeline.changed:
            failed = self.pipeline.failed_samples.samples.total()
        self._batch_stats["failed_in_batch"] = failed - self._failed_before
        self._failed_before = failed
        done = self.accounting.episodes + self.accounting.skipped_episodes
        if done != self.pipeline.staleness.handed_out:
            raise AccountingError(
                f"{self.pipeline.staleness.handed_out} episodes were handed out, but "
                f"{self.accounting.episodes} trained and {self.accounting.skipped_episodes} skipped"
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns, between two batches, the counters and the rows drawn from the dataloader but not
        yet handed out, in order; a resumed run submits them before it draws more. It is plain
        data."""
        with self.pipeline.changed:
            state = self.pipeline.state_dict()
        state["rows"] += self._rows.buffered if self._rows else []
        return state | {"accounting": self.accounting.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`, before the first batch."""
        assert self._rows is None, "load_state_dict after the first batch"
        self.pipeline.load_state_dict(state)
        self.accounting.load_state_dict(state["accounting"])
        self._failed_before = self.pipeline.failed_samples.samples.total()
        self._rows = RowStream(first=state["rows"])

    def _feed_from(self, dataloader: Iterable[list[dict[str, Any]]]) -> RowStream:
        if self._rows is None:
            self._rows = RowStream()
        self._rows.attach(dataloader)
        self.pipeline.serve(self._rows.batch_size)
        return self._rows

    def _hand_out(self, episodes: list[Episode], begun: float) -> list[Padded]:
        with self.pipeline.changed:
            self.outcomes = self.pipeline.outcomes.tell(max(e.number for e in episodes))
        latencies = [e.latency for e in episodes]
        self._batch_stats = {
            "wait_time": time.monotonic() - begun,
            "latency_mean": sum(latencies) / len(latencies),
            "latency_max": max(latencies),
        }
        return batch_parts(episodes, group_ids=range(len(episodes)))

    def _check_signal(self, batch_size: int) -> None:
        rejected = self.pipeline.rejected_in_a_row
        if rejected >= MAX_REJECTED_BATCHES * batch_size:
            found = self.pipeline.failed_samples.samples
            kinds = ", ".join(f"{n} {kind}" for kind, n in found.items())
            raise RuntimeError(
                f"{rejected} groups in a row were rejected: nothing to train on; check the reward "
                "and should_accept (actor.dynamic_sampling)"
                + (f"; samples that failed in this run: {kinds}" if kinds else "")
            )

    async def _run_all(self, episodes: Sequence[Episode], width: int) -> None:
        slots = asyncio.Semaphore(width)

        async def one(episode: Episode) -> None:
            async with slots:
                await self.pipeline.run(episode)
            if episode.error is not None:
                raise episode.error

        tasks = [asyncio.ensure_future(one(e)) for e in episodes]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _workflow(workflow: RolloutWorkflow | None, builder: WorkflowBuilder | None) -> RolloutWorkflow:
    if workflow is not None and builder is None:
        return workflow
    if builder is not None and workflow is None:
        return builder()
    raise ValueError("pass either workflow or workflow_builder")
