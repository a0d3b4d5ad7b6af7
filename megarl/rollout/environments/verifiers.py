"""Defines a data set and a workflow of verifiers' environments: `tasks` and VerifiersWorkflow. What
is trained is what the server sampled, token by token: traces are brought together with what the
gateway recorded."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

from megarl.api.batch import Padded
from megarl.api.inference import SAMPLES_MISSING, InferenceEngine, RolloutWorkflow
from megarl.config.dataset import DatasetConfig
from megarl.config.rollout import GenerationHyperparameters
from megarl.observability.logging import get_logger, warn_recurring
from megarl.rollout.environments.client import (
    EnvironmentConfig,
    WorkerError,
    Workers,
    shared_workers,
)
from megarl.rollout.episode_context import attempt_key
from megarl.rollout.gateway.session import MODEL, Session
from megarl.rollout.loop_thread import all_of
from megarl.rollout.trajectory import Trajectory, Turn, to_batch

log = get_logger(__name__)

Row = dict[str, Any]


def tasks(cfg: DatasetConfig, *, seed: int, **options: Any) -> list[Row]:
    """Returns the tasks of an environment as rows: the first `cfg.size` of its taskset, in its
    order. options: see EnvironmentConfig. Raises ValueError where the environment has none."""
    config = EnvironmentConfig.read(options)
    with ThreadPoolExecutor(1) as thread:  # the caller may be inside of a loop, as a notebook is
        try:
            loaded = thread.submit(asyncio.run, _tasks(config, cfg.size)).result()
        except WorkerError as e:
            raise ValueError(str(e)) from e
    return [{"messages": _messages(t), "environment": options, "task_data": t} for t in loaded]


async def _tasks(config: EnvironmentConfig, count: int | None) -> list[Row]:
    workers = Workers(config)
    try:
        answer = await workers.ask("tasks", timeout=config.start_timeout, count=count)
    finally:
        await workers.close()
    loaded: list[Row] = answer["tasks"]
    return loaded


def _messages(task: Mapping[str, Any]) -> list[Row]:
    """Returns what a task says at its beginning; environments may say something else instead."""
    system, prompt = task.get("system_prompt"), task.get("prompt")
    messages = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, list):
        turns = [(m.get("role", "user"), m.get("content")) for m in prompt]
    else:
        turns = [("user", prompt or task.get("name") or "")]
    return messages + [{"role": r, "content": c if isinstance(c, str) else ""} for r, c in turns]


class VerifiersWorkflow(RolloutWorkflow):
    """Runs gconfig.n_samples episodes of each row of `tasks`.

    Every trainable trace of an episode is a rollout with the reward of the trace. An episode that
    verifiers reports as failed, whose worker ended, or in which the policy wrote nothing to train
    on counts as so many failed rollouts as others have traces; only such episodes run again
    (rollout.failure_retries). The reward function of the data set is not called; name none.
    """

    def __init__(
        self,
        reward_fn: Callable[..., float],
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        *,
        reward_pool: Any = None,
    ) -> None:
        self.gconfig, self.tokenizer = gconfig, tokenizer
        self._traces: dict[str, int] = {}  # of an episode, by environment

    async def arun_episode(self, engine: InferenceEngine, data: Row) -> Padded:
        """Returns the batch of the rollouts, by trajectory.to_batch: those of gconfig.n_samples
        episodes, or of as many as are to be made anew. Raises NotRecorded for a trace that would
        train what was not sampled."""
        if "environment" not in data or "task_data" not in data:
            raise ValueError(
                "VerifiersWorkflow needs rows of megarl.rollout.environments.verifiers:tasks: set "
                f"the data set's type to it; this row has {sorted(data)}"
            )
        config = EnvironmentConfig.read(data["environment"])
        count, known = self.gconfig.n_samples, self._traces.get(config.key, 1)
        if SAMPLES_MISSING in data:
            count = math.ceil(data[SAMPLES_MISSING] / known)
        parts = await all_of(self._rollouts(engine, config, data, i) for i in range(count))
        whole = [len(part) for part in parts if part[0].failure is None]
        traces = self._traces[config.key] = max(whole, default=known)
        for part in parts:
            if part[0].failure is not None:
                part += [_failed_trace(part[0]) for _ in range(traces - 1)]
        return to_batch([rollout for part in parts for rollout in part])

    async def _rollouts(
        self, engine: InferenceEngine, config: EnvironmentConfig, data: Row, index: int
    ) -> list[Trajectory]:
        """Returns the rollouts of one episode, or one that failed."""
        key = (data.get("row_id"), data.get("episode_id", 0), *attempt_key(), index)
        async with engine.session(
            self.gconfig, self.tokenizer, index=index, seed_key=key
        ) as session:
            try:
                episode = await self._run(config, data, session)
                if not episode["ok"] or session.failures:
                    raise WorkerError("; ".join([*episode["errors"], *session.failures]))
                if rollouts := _rollouts(session, episode):
                    return rollouts
                raise WorkerError("the policy wrote nothing that is trained on")
            except WorkerError as e:
                warn_recurring(log, f"row {data.get('row_id', '?')}", str(e))
        return [_failed(session)]

    async def _run(self, config: EnvironmentConfig, data: Row, session: Session) -> Row:
        answer = await shared_workers(config).ask(
            "run",
            timeout=config.episode_timeout,
            task=data["task_data"],
            model=MODEL,
            key=session.worker_key,
            client={
                "base_url": session.worker_url,
                "renderer": config.renderer,
                "renderer_model_name": _absolute(self.tokenizer.name_or_path),
            },
            sampling={
                "session": session.id,
                "max_tokens": self.gconfig.max_new_tokens,
                "temperature": 0.0 if self.gconfig.greedy else self.gconfig.temperature,
            },
        )
        episode: Row = answer["episode"]
        return episode


def _absolute(name: str) -> str:
    """Returns a directory as a worker finds it; a hub name stays."""
    return os.path.abspath(name) if os.path.isdir(name) else name


def _rollouts(session: Session, episode: Mapping[str, Any]) -> list[Trajectory]:
    """Returns a rollout for each trace that trains something."""
    rollouts = []
    for trace in episode["traces"]:
        if not trace["samples"]:
            continue
        recorded = session.traces.get(trace["id"]) or Trajectory(index=session.trajectory.index)
        rollout, dropped = trained_part(recorded, trace)
        if dropped:
            log.info("trace %s: %d answers are not trained", trace["id"], dropped)
        if not math.isfinite(trace["reward"]):
            raise WorkerError(f"trace {trace['id']} has a reward of {trace['reward']}")
        rollout.score(float(trace["reward"]))
        rollouts.append(rollout)
    return rollouts


def _failed(session: Session) -> Trajectory:
    """Returns the longest of what the policy wrote before the episode failed."""
    wrote = session.traces.values()
    longest = max(wrote, key=lambda t: t.head.end, default=session.trajectory)
    longest.fail("server" if session.failures else "environment")
    return longest


def _failed_trace(other: Trajectory) -> Trajectory:
    """Returns a further rollout of the failed episode that `other` is of."""
    rollout = Trajectory(index=other.index)
    rollout.fail(other.failure or "environment")
    return rollout


class NotRecorded(RuntimeError):
    """Says that a trace would train a token which the policy did not sample in it."""


def trained_part(recorded: Trajectory, trace: Mapping[str, Any]) -> tuple[Trajectory, int]:
    """Returns the turns which the samples of a trace train, with all that stands before them, as a
    trajectory, and the number of recorded answers that no sample trains.

    A sample has token_ids, mask and logprobs of the same length. Raises NotRecorded where a token
    under the mask is not in `recorded` with exactly this logprob after exactly these tokens.
    """
    paths, trained = [], set()
    for number, sample in enumerate(trace["samples"]):
        match = _find(recorded, sample["token_ids"], sample["mask"], sample["logprobs"])
        if match is None:
            raise NotRecorded(
                f"trace {trace['id']}: sample {number} trains tokens that the policy did not "
                "sample in it, or with other logprobs: the environment changed them on the way"
            )
        path, masked = match
        paths.append(path)
        trained |= masked
    part = Trajectory(index=recorded.index)
    copies = {recorded.root.number: part.root}
    for path in paths:
        for before, turn in pairwise(path):
            if turn.number in copies:
                continue
            at = copies[before.number]
            if turn.response is not None and turn.number in trained:
                copies[turn.number] = part.wrote(turn.response, after=at)
            else:
                copies[turn.number] = part.read(turn.tokens, after=at)
    answers = sum(t.response is not None and len(t.tokens) > 0 for t in recorded.turns)
    return part, answers - len(trained)


def _find(
    recorded: Trajectory, ids: Sequence[int], mask: Sequence[int], logprobs: Sequence[float]
) -> tuple[list[Turn], set[int]] | None:
    """Returns a path of turns that accounts for every masked token, and the numbers of those turns
    that are masked; None where there is none."""
    last = max((i for i, m in enumerate(mask) if m), default=-1)
    todo: list[tuple[Turn, set[int]]] = [(recorded.root, set())]
    while todo:
        turn, masked = todo.pop()
        if turn.end > last:
            return turn.path(), masked
        for child in turn.children:
            place = slice(turn.end, child.end)
            if not child.tokens or list(ids[place]) != list(child.tokens):
                continue
            if not any(mask[place]):
                todo.append((child, masked))
            elif (
                child.response is not None
                and all(mask[place])
                and list(logprobs[place]) == list(child.response.output_logprobs)
            ):
                todo.append((child, masked | {child.number}))
    return None
