"""Runs one episode: a row on its way through a workflow, and the batch it ends as."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megarl.api.batch import Padded
from megarl.api.inference import (
    FAILURES,
    SAMPLES_MISSING,
    InferenceEngine,
    RolloutFailed,
    RolloutWorkflow,
)
from megarl.api.tokens import select
from megarl.observability.logging import get_logger
from megarl.observability.timeline import EPISODES, timeline
from megarl.rollout.answers import AnswerLog
from megarl.rollout.episode_check import check_episode, check_valid
from megarl.rollout.episode_context import EpisodeContext, Home, current_episode
from megarl.rollout.loop_thread import PauseClock
from megarl.rollout.retries import (
    Failed,
    Gathered,
    by_kind,
    count_rollouts,
    numbered_through,
    rewards_of,
)
from megarl.rollout.rewards.results import RewardError, fails_sample

log = get_logger(__name__)


@dataclass(kw_only=True, eq=False)
class Episode:
    """Describes an episode, which ends with `batch` (accepted), `error` (failed) or neither
    (rejected).

    number: place in the order of submission, unique in a run, also over resumes.
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
    place: place in the order of completion, None until the pipeline has counted it as accepted.
    answers: of its requests, where they are kept for a resume.
    wanted_by: the function of a consumer that accepted it, too.
    latency: seconds from begin to end.
    oldest: the version of the oldest trained token of `batch`; None where there is none.
    routes: whether its answers carry routes, where the client asks servers for them.
    """

    number: int
    row: dict[str, Any]
    workflow: RolloutWorkflow
    should_accept: Callable[[Padded], bool] | None = None
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
    wanted_by: Callable[[Padded], bool] | None = None
    error: BaseException | None = None
    latency: float = 0.0
    oldest: int | None = None
    routes: bool = True
    answers: AnswerLog | None = None

    @property
    def name(self) -> str:
        """Returns how messages name the episode: by its row's id."""
        return f"row {self.row.get('row_id', '?')}"


async def run_episode(
    episode: Episode,
    engine: InferenceEngine,
    *,
    timeout: float,
    clock: PauseClock | None = None,
    vocab_size: int | None = None,
    retries: int = 0,
    min_rollouts: int = 1,
    on_reward_error: str = "raise",
) -> None:
    """Runs the workflow for at most `timeout` s, checks what it returns, and records the outcome in
    `episode`; only our own cancellation of its task propagates. clock: what `timeout` goes by,
    which stands still in pauses; vocab_size: the model's, if known; retries: how often failed
    rollouts are made anew; min_rollouts, on_reward_error: see config.rollout."""
    begun, start, task = time.monotonic(), time.time(), asyncio.current_task()
    bound: asyncio.Timeout | None = None
    try:
        async with (clock or PauseClock()).timeout(timeout) as bound:
            found = await _gathered(episode, engine, vocab_size, retries, on_reward_error)
        batch = None if found is None else found.joined(min_rollouts)
        episode.rewards = rewards_of(batch)
        accept = episode.should_accept
        if batch is not None and (accept is None or accept(batch)):
            episode.batch, episode.oldest = batch, _oldest_version(batch)
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
    show(episode, start)


def _too_late(episode: Episode, timeout: float) -> None:
    error = TimeoutError(
        f"episode of {episode.name} took longer than rollout.episode_timeout={timeout:g} s"
    )
    if episode.may_fail:
        log.warning("%s; its rollouts count as failed", error)
        cut = _cut_short(episode)
        episode.failed = [*episode.failed, *cut]
        episode.missing = episode.good + len(cut)
    else:
        _failed(episode, error)


def _failed(episode: Episode, error: Exception) -> None:
    error.add_note(f"in the episode of {episode.name}")
    episode.error = error


def judge(episode: Episode) -> None:
    """Has should_accept decide on the batch of an episode that was run without it, elsewhere."""
    try:
        accept = episode.should_accept
        if accept is not None and episode.batch is not None and not accept(episode.batch):
            episode.batch = None
    except Exception as error:
        episode.batch = None
        _failed(episode, error)


def show(episode: Episode, start: float) -> None:
    """Shows an episode that has ended in the timeline. start: in Unix seconds."""
    if timeline.recording:
        about = {"number": episode.number} | _outcome(episode)
        timeline.record(EPISODES, episode.name, start, episode.latency, **about)


def _oldest_version(batch: Padded) -> int | None:
    """Returns the smallest version that wrote a trained token; None for no such token."""
    trained = batch["versions"][batch["loss_mask"].bool()]
    return int(trained.min()) if trained.numel() else None


def _cut_short(episode: Episode) -> list[Failed]:
    """Returns kind and length of the rollouts of an episode that took too long: those that its
    workflow was to make and has not, one at least."""
    count = max(1, _samples_of(episode.workflow) - episode.good)
    length = episode.answers.tokens // count if episode.answers is not None else 0
    return [("timeout", length)] * count


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
    episode: Episode,
    engine: InferenceEngine,
    vocab_size: int | None,
    retries: int,
    on_reward_error: str,
) -> Gathered | None:
    """Returns the episode's rollouts, for which the workflow runs again where some failed; None
    where it rejects the row."""
    found = Gathered(_samples_of(episode.workflow))
    data, home = {**episode.row, "episode_id": episode.number}, Home()
    for again in range(retries + 1):
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
        try:
            made = await episode.workflow.arun_episode(engine, data)
            if made is None:
                episode.missing = 0
                return None
            batch, failed = _checked(made, episode, engine, vocab_size)
            found.add(batch, failed)
            if failed:
                episode.lost = [*episode.lost, {k: v[~made["valid"]] for k, v in made.items()}]
                log.warning("%s: rollouts failed: %s", episode.name, by_kind(failed))
        except (RolloutFailed, RewardError) as e:
            if isinstance(e, RewardError) and not fails_sample(e, on_reward_error):
                raise
            log.warning("%s: all rollouts failed: %s", episode.name, e)
            found.add_failure(e.kind if isinstance(e, RolloutFailed) else "reward")
        finally:
            episode.failed = found.failed
            episode.good, episode.retried = found.good, found.retried
        episode.missing = found.missing
        if found.missing == 0:
            break
        if found.counted:
            data[SAMPLES_MISSING] = found.missing
    return found


def _checked(
    batch: Any, episode: Episode, engine: InferenceEngine, vocab_size: int | None
) -> tuple[Padded | None, list[Failed]]:
    """Returns what `without_failed` makes of the workflow's batch, checked."""
    try:
        kept, failed = without_failed(batch)
        if kept is not None:
            check_episode(kept, version=engine.get_version(), vocab_size=vocab_size)
        return kept, failed
    except (TypeError, ValueError) as e:
        name = type(episode.workflow).__name__
        raise type(e)(f"{name} returned for {episode.name}: {e}") from None


def without_failed(batch: Any) -> tuple[Any, list[Failed]]:
    """Returns the batch without the samples whose `valid` [n] is False (None if all are), and
    (kind, length) of each rollout that failed. A failed sample may hold anything: NaN, garbage, no
    token at all."""
    if not isinstance(batch, dict) or "valid" not in batch:
        return batch, []
    check_valid(batch)
    batch = dict(batch)
    valid, kinds = batch.pop("valid"), batch.pop("failure", None)
    lengths = batch["attention_mask"].bool().sum(1).tolist()
    ids = batch.get("rollout_ids", torch.arange(len(valid))).tolist()
    failed: dict[int, Failed] = {}
    for i in (~valid).nonzero().flatten().tolist():
        kind, length = failed.get(ids[i], (FAILURES[0 if kinds is None else int(kinds[i])], 0))
        failed[ids[i]] = kind, length + lengths[i]
    kept = select(batch, valid.nonzero().flatten()) if valid.any() else None
    return kept, list(failed.values())


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
    if all(count_rollouts(p) == len(p["input_ids"]) for p in parts):
        parts = [{k: v for k, v in p.items() if k != "rollout_ids"} for p in parts]
    return parts
