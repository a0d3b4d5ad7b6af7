"""One episode: a row on its way through a workflow, and the batch it ends as."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megarl.api.inference import Batch, InferenceEngine, RolloutWorkflow
from megarl.rollout.episode_check import check_episode
from megarl.utils.batch import concat_padded


@dataclass(kw_only=True, eq=False)
class Episode:
    """Ends with `batch` (accepted), `error` (failed) or neither (rejected).

    number: place in the order of submission, unique in a run, also over resumes. drawn: the row
    came from prepare_batch's dataloader. drops: how often in a row its samples were too stale.
    """

    number: int
    row: dict[str, Any]
    workflow: RolloutWorkflow
    should_accept: Callable[[Batch], bool] | None = None
    drawn: bool = False
    drops: int = 0
    batch: Batch | None = None
    error: BaseException | None = None
    latency: float = 0.0

    @property
    def name(self) -> str:
        return f"row {self.row.get('row_id', '?')}"

    def oldest_version(self) -> int | None:
        """The smallest version that wrote a trained token; None when there is none."""
        if self.batch is None:
            return None
        trained = self.batch["versions"][self.batch["loss_mask"].bool()]
        return int(trained.min()) if trained.numel() else None


async def run_episode(
    episode: Episode, engine: InferenceEngine, *, timeout: float, vocab_size: int | None = None
) -> None:
    """Runs the workflow, checks what it returns, and records the outcome in `episode`; only our own
    cancellation of its task propagates. vocab_size: the model's, None where it is not known.
    """
    begun, task = time.monotonic(), asyncio.current_task()
    clock = asyncio.timeout(timeout)
    try:
        async with clock:
            data = {**episode.row, "episode_id": episode.number}
            batch = await episode.workflow.arun_episode(engine, data)
        if batch is not None:
            _check(batch, episode, engine, vocab_size)
            if episode.should_accept is None or episode.should_accept(batch):
                episode.batch = batch
    # handed to whoever waits for the episode, see RolloutExecutor.wait
    except (Exception, asyncio.CancelledError, SystemExit) as cause:
        error = cause
        if not isinstance(error, Exception):  # it would end the loop, or pass for our cancellation
            if task is not None and task.cancelling():
                raise
            error = RuntimeError(f"{type(episode.workflow).__name__} ended with {cause!r}")
        if clock.expired() and isinstance(error, TimeoutError):
            error = TimeoutError(
                f"episode of {episode.name} took longer than rollout.episode_timeout={timeout:g} s"
            )
        error.add_note(f"in the episode of {episode.name}")
        episode.error = error
    episode.latency = time.monotonic() - begun


def _check(batch: Any, episode: Episode, engine: InferenceEngine, vocab_size: int | None) -> None:
    try:
        check_episode(batch, version=engine.get_version(), vocab_size=vocab_size)
    except (TypeError, ValueError) as e:
        name = type(episode.workflow).__name__
        raise type(e)(f"{name} returned for {episode.name}: {e}") from None


def join_episodes(episodes: Sequence[Episode], *, group_ids: Sequence[int]) -> Batch:
    """All samples padded to one length; `group_ids` [B] holds each sample's episode's id."""
    batches = [e.batch for e in episodes if e.batch is not None]
    joined = concat_padded(batches)
    sizes = torch.tensor([len(b["input_ids"]) for b in batches])
    joined["group_ids"] = torch.repeat_interleave(torch.tensor(list(group_ids)), sizes)
    return joined
