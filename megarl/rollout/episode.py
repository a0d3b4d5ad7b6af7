"""Runs one episode: a row on its way through a workflow, and the batch it ends as. Checks the
rollouts that the workflow returned, tells which failed, and joins those of several runs of it.

A workflow is other people's code. A batch that breaks a rule here would train wrong numbers, or
fail far away in words that nobody can trace to it.

What failed is made anew in a fresh environment, since leaving it out would favour prompts whose
environments seldom fail. Only as many rollouts are taken as are missing, the first ones: no rule
that looks at what they earned may choose among them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.api.batch import Padded
from megarl.api.inference import (
    FAILURES,
    SAMPLES_MISSING,
    InferenceEngine,
    RolloutFailed,
    RolloutWorkflow,
)
from megarl.api.tokens import REWARD_PART, concat_padded, is_per_token, select
from megarl.config.rollout import RolloutConfig
from megarl.observability.logging import get_logger, warn_recurring
from megarl.observability.timeline import EPISODES, timeline
from megarl.rollout.episode_context import EpisodeContext, Home, current_episode
from megarl.rollout.episodes import Episode, Failed, Runner, by_kind
from megarl.rollout.loop_thread import PauseClock, all_of
from megarl.rollout.rewards.results import RewardError, fails_sample

log = get_logger(__name__)

_INTEGERS = (torch.int64, torch.int32, torch.int16)
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# the contract's dtypes are int64, bool, float32 and int32
_KINDS = {
    "integers": _INTEGERS,
    "booleans": (torch.bool,),
    "floating-point numbers": _FLOATS,
    "numbers": _FLOATS + _INTEGERS,
}
# field -> what it holds: of every token [n,S], and of every row [n]
_PER_TOKEN = {
    "input_ids": "integers",
    "attention_mask": "booleans",
    "loss_mask": "booleans",
    "logprobs": "floating-point numbers",
    "versions": "integers",
}
_PER_ROW = {
    "rewards": "numbers",
    "valid": "booleans",
    "failure": "integers",
    "unit_ids": "integers",
    "rollout_ids": "integers",
}
# of a rollout's rows: field [n] -> why all of them have one value
_ONE_IN_A_ROLLOUT = {
    "rewards": "an earlier row of its rollout has another; every row has the whole rollout's",
    "unit_ids": "an earlier row of its rollout has another; a rollout stays in one unit",
}
ROUNDING = 1e-3  # a logprob of 0 may come out this much above
_NOT_WRITTEN = (
    "loss_mask marks a token that no weights wrote; mark only tokens of a response, and give them "
    "its output_versions"
)


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
    clock = clock or PauseClock()
    bound: asyncio.Timeout | None = None
    try:
        async with clock.timeout(timeout) as bound:
            episode.batch = await _gathered(episode, engine, config, clock)
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


def has_signal(
    batch: Padded,
    parts: Collection[str] = (),
    limits: tuple[float, float] | None = (-math.inf, math.inf),
) -> bool:
    """Returns whether the rewards of a group differ; equal rewards teach nothing (DAPO's dynamic
    sampling, arXiv 2503.14476, eq. 11). parts: names of parts of the reward, of which one has to
    differ, too; a rollout that lacks a part differs from none. limits: of the rewards
    (PPOActorConfig.reward_limits), beyond which they count as equal; None where the advantages do
    not read the reward but its parts."""
    names = [f"{REWARD_PART}{name}" for name in parts]
    rewards = batch["rewards"] if limits is None else batch["rewards"].clamp(*limits)
    named = [batch[name] for name in names if name in batch] or [rewards]
    return any(map(_differ, named)) and (limits is None or _differ(rewards))


def _differ(values: Tensor) -> bool:
    return len(values[~values.isnan()].unique()) > 1


async def run_all(episodes: Sequence[Episode], width: int, run: Runner) -> None:
    """Runs episodes, `width` at a time. The first that ends with an error cancels the others, and
    its error is raised."""
    slots = asyncio.Semaphore(width)

    async def one(episode: Episode) -> None:
        async with slots:
            await run(episode)
        if episode.error is not None:
            raise episode.error

    await all_of(one(episode) for episode in episodes)


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
    episode: Episode, engine: InferenceEngine, config: RolloutConfig, clock: PauseClock
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
                clock=clock,
                home=home,
                answers=episode.answers,
                notes=episode.notes,
                routes=episode.routes,
            )
        )
        batch: Padded | None = None
        notes = len(episode.notes)
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
                warn_recurring(log, f"{episode.name}: rollouts failed", by_kind(failed))
        except (RolloutFailed, RewardError) as e:
            if isinstance(e, RewardError) and not fails_sample(e, config.on_reward_error):
                raise
            warn_recurring(log, f"{episode.name}: all rollouts failed", e)
            kind = e.kind if isinstance(e, RolloutFailed) else "reward"
            failed = [(kind, 0)] * episode.missing
        episode.failed = [*episode.failed, *failed]
        if batch is not None:
            parts.append(first_rollouts(batch, episode.missing))
            count = len(rewards_of(parts[-1]))
            episode.good += count
            episode.missing -= count
            episode.retried += count if again else 0
        for note in episode.notes[notes:]:
            kept = [] if batch is None else sorted({*rollout_ids(parts[-1]).tolist()})
            at = kept.index(note["rollout"]) if note["rollout"] in kept else None
            note["rollout"] = -1 if at is None else episode.good - len(kept) + at
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
        kept, failed = without_failed(_with_boolean_masks(batch))
        if kept is not None:
            check_episode(kept, version=engine.get_version(), vocab_size=episode.vocab_size)
        return kept, failed
    except (TypeError, ValueError) as e:
        name = type(episode.workflow).__name__
        raise type(e)(f"{name} returned for {episode.name}: {e}") from None


def _with_boolean_masks(batch: Any) -> Any:
    """Returns the batch with booleans in place of masks of integers that are all 0 or 1."""
    if not isinstance(batch, dict):
        return batch
    kinds = _PER_TOKEN | _PER_ROW
    masks = {
        key: value.bool()
        for key, value in batch.items()
        if kinds.get(key) == "booleans"
        and isinstance(value, Tensor)
        and value.dtype in _INTEGERS
        and not (value & ~1).any()
    }
    return batch | masks


def batch_parts(episodes: Sequence[Episode], *, group_ids: Sequence[int]) -> list[Padded]:
    """Returns the samples of each episode, padded to its own length, with group_ids and episode_ids
    [n]. unit_ids and rollout_ids [n], where a workflow gives them, are numbered through all
    episodes; rollout_ids are left out where every rollout has one row."""
    parts: list[Padded] = []
    for episode, group in zip(episodes, group_ids, strict=True):
        assert episode.batch is not None
        n = episode.batch["rewards"].shape[0]
        part = episode.batch | {
            "group_ids": torch.full((n,), group),
            "episode_ids": torch.full((n,), episode.number),
        }
        parts.append(part)
    parts = numbered_through(parts)
    if all(len(rewards_of(p)) == len(p["rewards"]) for p in parts if "rollout_ids" in p):
        for part in parts:
            part.pop("rollout_ids", None)
    return parts


# -- rollouts that a workflow returned


def check_episode(batch: Any, *, version: int, vocab_size: int | None = None) -> None:
    """Raises TypeError for a result that is no batch and ValueError for a batch that breaks a rule:
    right-padded input_ids, attention_mask, loss_mask, logprobs and versions, all [n,S] with n >= 1,
    rewards [n], and other fields [n] or [n,S,...]. `version` is the newest weights'; `vocab_size`
    the model's, if known."""
    _check_tensors(batch, *_PER_TOKEN, "rewards")
    shape = tuple(batch["input_ids"].shape)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"input_ids of shape {shape}: use [n,S], one sample and token at least")
    for key, value in batch.items():
        _check_field(key, value, *shape)
        is_per_token(key, value, batch)
    mask, trained = batch["attention_mask"], batch["loss_mask"]
    ids, logprobs, versions = (batch[k] for k in ("input_ids", "logprobs", "versions"))
    rules = [
        ("attention_mask", ~mask[:, :1], "a sample begins with a real token"),
        ("attention_mask", _after_padding(mask), "a real token stands after padding; pad right"),
        ("input_ids", mask & (ids < 0), "no token has such an id"),
        ("loss_mask", trained & ~mask, "only padding stands there (attention_mask)"),
        ("loss_mask", trained & _first(mask), "nothing comes before it, so it has no logprob"),
        ("logprobs", ~logprobs.isfinite(), "must be a finite number"),
        ("logprobs", trained & (logprobs > ROUNDING), "must not be above 0"),
        ("versions", trained & (versions < 0), _NOT_WRITTEN),
        ("versions", versions > version, f"the newest weights are version {version}"),
        ("rewards", ~batch["rewards"].isfinite(), "must be a finite number"),
    ]
    parts = (key for key in batch if key.startswith(REWARD_PART))
    rules += [
        (key, batch[key].isinf(), "must be a finite number, or NaN for none") for key in parts
    ]
    if vocab_size is not None:
        bad = mask & (ids >= vocab_size)
        rules.append(("input_ids", bad, f"the model's vocabulary has {vocab_size} tokens"))
    if "rollout_ids" in batch:
        rules += [
            (key, _differs(batch[key], batch["rollout_ids"]), why)
            for key, why in _ONE_IN_A_ROLLOUT.items()
            if key in batch
        ]
    for key, bad, why in rules:
        if bad.any():
            place = bad.nonzero()[0].tolist()
            where = ", ".join(f"{name} {i}" for name, i in zip(("sample", "position"), place))
            raise ValueError(f"{key} of {where} is {batch[key][tuple(place)].item()}: {why}")


def without_failed(batch: Any) -> tuple[Any, list[Failed]]:
    """Returns the batch without the samples whose `valid` [n] is False (None if all are), and
    (kind, length) of each rollout that failed. A failed sample may hold anything: NaN, garbage, no
    token at all. Raises TypeError or ValueError for a `valid` that is not [n] booleans, a `failure`
    that is not [n] numbers of api.inference.FAILURES, or rows that cannot be told apart."""
    _check_tensors(batch)
    if "valid" not in batch:
        return batch, []
    _check_valid(batch)
    batch = dict(batch)
    valid, kinds = batch.pop("valid"), batch.pop("failure", None)
    lengths = batch["attention_mask"].bool().sum(1).tolist()
    ids = rollout_ids(batch).tolist()
    failed: dict[int, Failed] = {}
    for i in (~valid).nonzero().flatten().tolist():
        kind, length = failed.get(ids[i], (FAILURES[0 if kinds is None else int(kinds[i])], 0))
        failed[ids[i]] = kind, length + lengths[i]
    kept = select(batch, valid.nonzero().flatten()) if valid.any() else None
    return kept, list(failed.values())


def rollout_ids(batch: Padded) -> Tensor:
    """Returns which rollout each row of a batch [n,S] is of, [n]."""
    return batch.get("rollout_ids", torch.arange(len(batch["input_ids"])))


def rewards_of(batch: Padded | None) -> list[float]:
    """Returns the reward of each rollout, however many rows it has, by their first rows; [] for
    None."""
    if batch is None:
        return []
    rewards: list[float] = batch["rewards"].tolist()
    if "rollout_ids" not in batch:
        return rewards
    return list(dict(zip(batch["rollout_ids"].tolist(), rewards)).values())


def first_rollouts(batch: Padded, n: int) -> Padded:
    """Returns the first `n` rollouts of a batch, by their first rows."""
    if len(rewards_of(batch)) <= n:
        return batch
    ids = rollout_ids(batch)
    first = list(dict.fromkeys(ids.tolist()))[:n]
    keep = torch.isin(ids, torch.tensor(first, dtype=ids.dtype))
    return select(batch, keep.nonzero().flatten())


def numbered_through(parts: Sequence[Padded]) -> list[Padded]:
    """Returns batches [n,S] whose unit_ids and rollout_ids [n], where there are any, are numbered
    through all of them, and which all have the parts of rewards that any has."""
    names = (name for part in parts for name in part if name.startswith(REWARD_PART))
    rewards = list(dict.fromkeys(names))
    count = dict.fromkeys(("unit_ids", "rollout_ids"), 0)
    out = []
    for part in parts:
        n = part["rewards"].shape[0]
        numbered = {name: torch.full((n,), torch.nan) for name in rewards} | part
        for key in count.keys() & part.keys():
            names, local = part[key].unique(return_inverse=True)
            numbered[key], count[key] = local + count[key], count[key] + len(names)
        out.append(numbered)
    return out


def _check_valid(batch: Padded) -> None:
    _check_tensors(batch, "input_ids", "attention_mask")
    n, valid, kinds = len(batch["input_ids"]), batch["valid"], batch.get("failure")
    for key in ("valid", "failure", "unit_ids", "rollout_ids"):
        if key in batch:
            _check_field(key, batch[key], n)
    if kinds is not None and not set(kinds.tolist()) <= set(range(len(FAILURES))):
        named = ", ".join(f"{i} {name}" for i, name in enumerate(FAILURES))
        raise ValueError(f"failure {kinds.tolist()}: use [n={n}] of {named}")
    if _differs(valid, rollout_ids(batch)).any():
        raise ValueError(
            f"valid {valid.tolist()} of rollout_ids {batch['rollout_ids'].tolist()}: a rollout "
            "fails as a whole, so valid is the same for all of its rows"
        )


def _check_tensors(batch: Any, *needed: str) -> None:
    """Raises TypeError for what is no dict of tensors, ValueError where it lacks one."""
    if not isinstance(batch, dict):
        raise TypeError(f"{type(batch).__name__}: use a padded batch [n,S] of tensors, or None")
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            what = f"a dict whose {key!r} is a {type(value).__name__}"
            raise TypeError(f"{what}: use a padded batch [n,S] of tensors, or None")
    if missing := [key for key in needed if key not in batch]:
        raise ValueError(f"a batch without {missing[0]!r} (it has {', '.join(batch) or 'nothing'})")


def _check_field(key: str, value: Tensor, n: int, width: int | None = None) -> None:
    """Raises ValueError for a field of n rows, of `width` tokens each, that holds something
    else."""
    kind = _PER_TOKEN.get(key) or _PER_ROW.get(key)
    shape = (n, width) if key in _PER_TOKEN else (n,)
    found = tuple(value.shape) if kind else tuple(value.shape[:1])
    if found != shape or (kind and value.dtype not in _KINDS[kind]):
        use = f"[n={n},S={width}]" if key in _PER_TOKEN else f"[n={n}{'' if kind else ',...'}]"
        what = f"{key} of {value.dtype} and shape {tuple(value.shape)}"
        raise ValueError(f"{what}: use {use} {kind or ''}".rstrip())


def _differs(values: Tensor, ids: Tensor) -> Tensor:
    """Returns [n], True where a value is not that of the first row with the same id."""
    _, index = ids.unique(return_inverse=True)
    rows = torch.arange(len(ids))
    first = torch.zeros_like(rows).scatter_reduce(0, index, rows, "amin", include_self=False)
    return values != values[first[index]]


def _first(mask: Tensor) -> Tensor:
    """Returns [n,S], True at the first position."""
    return torch.arange(mask.shape[1]).expand_as(mask) == 0


def _after_padding(mask: Tensor) -> Tensor:
    """Returns [n,S], True where a real token follows a padded one."""
    return mask & ((~mask).cumsum(1) > 0)
