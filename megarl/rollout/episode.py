"""Runs one episode: a row on its way through a workflow, and the batch it ends as."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from megarl.api.batch import Padded
from megarl.api.inference import (
    SAMPLES_MISSING,
    InferenceEngine,
    RolloutFailed,
    RolloutWorkflow,
)
from megarl.api.tokens import concat_padded
from megarl.config.rollout import RolloutConfig
from megarl.observability.logging import get_logger
from megarl.observability.timeline import EPISODES, timeline
from megarl.rollout.answers import AnswerLog
from megarl.rollout.episode_context import EpisodeContext, Home, current_episode
from megarl.rollout.loop_thread import PauseClock
from megarl.rollout.rewards.results import RewardError, fails_sample
from megarl.rollout.rollouts import (
    Failed,
    by_kind,
    check_episode,
    first_rollouts,
    numbered_through,
    rewards_of,
    without_failed,
)

log = get_logger(__name__)


MAX_DROPS = 8  # of one row in a row, as too stale: more is a workflow that returns old tokens

ShouldAccept = Callable[[Padded], bool]


class State(Enum):
    """Says where an episode is: from TAKEN on, at its end.

    ready: accepted, for a batch to come; broken: it ended with an error that nobody was told of;
    taken: a batch has it; failed: its error was raised; dropped: it was too stale. A value that is
    the name of a metric is that of its count.
    """

    WAITING, RUNNING, READY, BROKEN = "pending", "running", "ready", "broken"
    TAKEN, REJECTED, FAILED, DROPPED = "accepted", "rejected", "failed", "dropped"


@dataclass(kw_only=True, eq=False)
class Episode:
    """Describes an episode, which ends with `batch` (accepted), `error` (failed) or neither
    (rejected).

    number: place in the order of submission, unique in a run, also over resumes; episodes.Episodes
        gives it.
    state: where it is, which Episodes alone changes.
    drawn: the row came from prepare_batch's dataloader.
    drops: how often in a row its samples were too stale.
    may_fail: whether it may overrun its time: another row takes its place, or the batch goes
        without it. Else that is an error.
    failed: kind and length of rollouts that are not in `batch` because something failed.
    lost: their samples, as far as the workflow returned them; but for the ids, of any content.
    good: how many rollouts did not fail, whether they are in `batch` or were rejected.
    retried: how many of these were made anew in place of failed ones.
    missing: how many rollouts it ended without, because they failed and were not made anew.
    notes: {"rollout": its index, name: text} of every reward that came with texts, such as a
        judge's, in the order of scoring.
    rewards: of these, once the episode has ended, one for each rollout.
    began: the oldest version that its tokens may be of: that of its begin, or of answers that are
        kept; None before it begins.
    admitted: the version at its begin, before a resume too, which keys its seeds.
    place: place in the order of completion, None until it is counted as accepted.
    answers: of its requests, where they are kept for a resume.
    vocab_size: the model's, where it is known; no sample may have a token beyond it.
    wanted_by: the function of a consumer that accepted it, too.
    latency: seconds from begin to end.
    oldest: the version of the oldest trained token of `batch`; None where there is none.
    routes: whether its answers carry routes, where the client asks servers for them.
    """

    row: dict[str, Any]
    workflow: RolloutWorkflow
    number: int = -1
    state: State = State.WAITING
    should_accept: ShouldAccept | None = None
    drawn: bool = False
    drops: int = 0
    may_fail: bool = False
    batch: Padded | None = None
    failed: Sequence[Failed] = ()
    lost: Sequence[Padded] = ()
    good: int = 0
    retried: int = 0
    missing: int = 0
    notes: list[dict[str, Any]] = field(default_factory=list)
    rewards: Sequence[float] = ()
    began: int | None = None
    admitted: int | None = None
    place: int | None = None
    wanted_by: ShouldAccept | None = None
    vocab_size: int | None = None
    error: BaseException | None = None
    latency: float = 0.0
    oldest: int | None = None
    routes: bool = True
    answers: AnswerLog | None = None

    @property
    def name(self) -> str:
        """Returns how messages name the episode: by its row's id."""
        return f"row {self.row.get('row_id', '?')}"

    def begin(self, version: int) -> None:
        """Notes the version of the weights under which it begins."""
        self.began = version if self.began is None else min(self.began, version)
        if self.admitted is None:
            self.admitted = version
        if self.answers is not None:
            self.answers.admitted = self.admitted

    def again(self, version: int, bound: int) -> Episode:
        """Returns an episode of the same row, for one that was too stale at `version` under the
        staleness bound. Raises RuntimeError where that was MAX_DROPS times in a row."""
        if self.drops + 1 == MAX_DROPS:  # begun anew under newer weights every time
            raise RuntimeError(
                f"{self.name} was dropped {MAX_DROPS} times in a row: at version {version} "
                f"{type(self.workflow).__name__} returned trained tokens of version {self.oldest}, "
                f"which rollout.max_head_offpolicyness={bound} is too low for; give tokens the "
                "output_versions of the response that brought them, or raise the bound"
            )
        return Episode(
            row=self.row,
            workflow=self.workflow,
            should_accept=self.should_accept,
            drawn=self.drawn,
            drops=self.drops + 1,
            may_fail=self.drawn,
        )


# brings an episode to its end, in this process or another
Runner = Callable[[Episode], Awaitable[None]]


async def run_episode(
    episode: Episode,
    engine: InferenceEngine,
    config: RolloutConfig,
    *,
    clock: PauseClock | None = None,
) -> None:
    """Runs the workflow for at most rollout.episode_timeout s, checks what it returns, and records
    the outcome in `episode`; only our own cancellation of its task propagates. clock: what the
    time-out goes by, which stands still in pauses."""
    timeout, begun, task = config.episode_timeout, time.monotonic(), asyncio.current_task()
    bound: asyncio.Timeout | None = None
    try:
        async with (clock or PauseClock()).timeout(timeout) as bound:
            episode.batch = await _gathered(episode, engine, config)
        episode.rewards = rewards_of(episode.batch)
        episode.oldest = _oldest_version(episode.batch)
    # handed to whoever waits for the episode, see RolloutExecutor.wait
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        if task is not None and task.cancelling() and not isinstance(error, Exception):
            raise
        if bound is not None and bound.expired() and isinstance(error, TimeoutError):
            _too_late(episode, timeout)
        elif isinstance(error, Exception):
            _failed(episode, error)
        else:  # it would end the loop, or pass for our cancellation
            name = type(episode.workflow).__name__
            _failed(episode, RuntimeError(f"{name} ended with {error!r}"))
    if episode.answers is not None:
        episode.answers.end()
    episode.latency = time.monotonic() - begun


def _too_late(episode: Episode, timeout: float) -> None:
    """Counts those rollouts as failed that the workflow was to make and has not, one at least."""
    error = TimeoutError(
        f"episode of {episode.name} took longer than rollout.episode_timeout={timeout:g} s"
    )
    if not episode.may_fail:
        _failed(episode, error)
        return
    log.warning("%s; its rollouts count as failed", error)
    count = max(1, _samples_of(episode.workflow) - episode.good)
    length = episode.answers.tokens // count if episode.answers is not None else 0
    episode.failed = [*episode.failed, *[("timeout", length)] * count]
    episode.missing = episode.good + count


def _failed(episode: Episode, error: Exception) -> None:
    error.add_note(f"in the episode of {episode.name}")
    episode.error = error


def has_signal(batch: Padded) -> bool:
    """Returns whether the rewards of a group differ; equal rewards teach nothing (DAPO's dynamic
    sampling, arXiv 2503.14476)."""
    return bool(batch["rewards"].min() != batch["rewards"].max())


async def run_all(episodes: Sequence[Episode], width: int, run: Runner) -> None:
    """Runs episodes, `width` at a time. The first that ends with an error cancels the others, and
    its error is raised."""
    slots = asyncio.Semaphore(width)

    async def one(episode: Episode) -> None:
        async with slots:
            await run(episode)
        if episode.error is not None:
            raise episode.error

    tasks = [asyncio.ensure_future(one(e)) for e in episodes]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def conclude(episode: Episode) -> None:
    """Has should_accept decide on the batch of an episode that was run, and shows the episode in
    the timeline."""
    accept = episode.should_accept
    try:
        if accept is not None and episode.batch is not None and not accept(episode.batch):
            episode.batch = None
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # user code, in the loop that runs all episodes
        episode.batch = None
        if not isinstance(error, Exception):
            error = RuntimeError(f"should_accept ended with {error!r}")
        _failed(episode, error)
    if timeline.recording:
        about = {"number": episode.number} | _outcome(episode)
        start = time.time() - episode.latency
        timeline.record(EPISODES, episode.name, start, episode.latency, **about)


def _oldest_version(batch: Padded | None) -> int | None:
    """Returns the smallest version that wrote a trained token; None for no such token."""
    if batch is None:
        return None
    trained = batch["versions"][batch["loss_mask"].bool()]
    return int(trained.min()) if trained.numel() else None


def _samples_of(workflow: RolloutWorkflow) -> int:
    """Returns how many rollouts a workflow makes of a row, as far as its gconfig says so."""
    samples: int = getattr(getattr(workflow, "gconfig", None), "n_samples", 1)
    return samples


def _outcome(episode: Episode) -> dict[str, Any]:
    """Returns in a few words how the episode ended, for the timeline."""
    if episode.error is not None:
        return {"outcome": "failed", "error": type(episode.error).__name__}
    if episode.batch is None:
        return {"outcome": "rejected"}
    tokens = int(episode.batch["attention_mask"].sum())
    return {"outcome": "accepted", "samples": len(episode.batch["input_ids"]), "tokens": tokens}


async def _gathered(
    episode: Episode, engine: InferenceEngine, config: RolloutConfig
) -> Padded | None:
    """Returns the episode's rollouts, those made anew at the end, for which the workflow runs again
    where some failed; None where it rejects the row, or too few are left."""
    data, home = {**episode.row, "episode_id": episode.number}, Home()
    parts = list[Padded]()
    episode.missing, counted = _samples_of(episode.workflow), False
    for again in range(config.failure_retries + 1):
        current_episode.set(
            EpisodeContext(
                number=episode.number,
                attempt=again,
                admitted=episode.admitted,
                began=engine.get_version(),
                home=home,
                answers=episode.answers,
                notes=episode.notes,
                routes=episode.routes,
            )
        )
        batch: Padded | None = None
        try:
            returned = await episode.workflow.arun_episode(engine, data)
            if returned is None:
                episode.missing = 0
                return None
            batch, failed = _checked(returned, episode, engine)
            if not counted:
                episode.missing, counted = len(rewards_of(batch)) + len(failed), True
            if failed:
                lost = {name: values[~returned["valid"]] for name, values in returned.items()}
                episode.lost = [*episode.lost, lost]
                log.warning("%s: rollouts failed: %s", episode.name, by_kind(failed))
        except (RolloutFailed, RewardError) as e:
            if isinstance(e, RewardError) and not fails_sample(e, config.on_reward_error):
                raise
            log.warning("%s: all rollouts failed: %s", episode.name, e)
            kind = e.kind if isinstance(e, RolloutFailed) else "reward"
            failed = [(kind, 0)] * episode.missing
        episode.failed = [*episode.failed, *failed]
        if batch is not None:
            parts.append(first_rollouts(batch, episode.missing))
            count = len(rewards_of(parts[-1]))
            episode.good += count
            episode.missing -= count
            episode.retried += count if again else 0
        if not episode.missing:
            break
        if counted:
            data[SAMPLES_MISSING] = episode.missing
    fewest = config.min_rollouts if episode.drawn else 1
    if not parts or (episode.missing and episode.good < fewest):
        return None
    return concat_padded(numbered_through(parts))


def _checked(
    batch: Any, episode: Episode, engine: InferenceEngine
) -> tuple[Padded | None, list[Failed]]:
    """Returns what `without_failed` makes of the workflow's batch, checked."""
    try:
        kept, failed = without_failed(batch)
        if kept is not None:
            check_episode(kept, version=engine.get_version(), vocab_size=episode.vocab_size)
        return kept, failed
    except (TypeError, ValueError) as e:
        name = type(episode.workflow).__name__
        raise type(e)(f"{name} returned for {episode.name}: {e}") from None


def batch_parts(episodes: Sequence[Episode], *, group_ids: Sequence[int]) -> list[Padded]:
    """Returns the samples of each episode, padded to its own length, with group_ids and episode_ids
    [n]. unit_ids and rollout_ids [n], where a workflow gives them, are numbered through all
    episodes; rollout_ids are left out where every rollout has one row."""
    parts: list[Padded] = []
    for episode, group in zip(episodes, group_ids, strict=True):
        assert episode.batch is not None
        n = len(episode.batch["input_ids"])
        part = episode.batch | {
            "group_ids": torch.full((n,), group),
            "episode_ids": torch.full((n,), episode.number),
        }
        parts.append(part)
    parts = numbered_through(parts)
    if all(len(rewards_of(p)) == len(p["input_ids"]) for p in parts):
        parts = [{k: v for k, v in p.items() if k != "rollout_ids"} for p in parts]
    return parts
