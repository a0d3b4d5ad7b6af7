"""Defines AgentWorkflow: an agent of any kind, which reaches the policy through the gateway."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any, Unpack

from megarl.api.batch import Padded
from megarl.api.inference import InferenceEngine
from megarl.config.rollout import GenerationHyperparameters
from megarl.observability.logging import get_logger, warn_recurring
from megarl.rollout.chat import ChatOptions, ChatWorkflow
from megarl.rollout.episode_context import attempt_key
from megarl.rollout.gateway.session import MOST_REWARD, Session
from megarl.rollout.loop_thread import ThreadsExhausted, all_of, call
from megarl.rollout.rewards import no_reward
from megarl.rollout.trajectory import Trajectory, to_batch
from megarl.utils.importing import load_object, option_problems

log = get_logger(__name__)


class AgentWorkflow(ChatWorkflow):
    """Runs an agent gconfig.n_samples times for each row, each time with a session of its own.

    agent: a function (data, base_url, api_key) -> reward or None, or a class whose objects have a
    method `run` of this form; or an import path of one. It may be asynchronous; one that is not
    runs in a thread of its own. data: a copy of the row. base_url, api_key: for an OpenAI client;
    the Anthropic client gets the same. agent_options: what a class is made with.

    A rollout's reward is the number that the agent returns; then nothing that was sent to
    POST .../reward counts. If the agent returns None, the reward is what was sent, otherwise that
    of reward_fn for the policy's last answer. A class computes the reward itself: its sessions
    refuse to be sent rewards, as do those of a workflow with a reward_fn, unless
    rollout.gateway.rewards is "always".

    An agent that raises an error, ends its thread, returns anything else, or never asks the policy,
    is a rollout that failed: it is counted and not trained on.
    """

    def __init__(
        self,
        reward_fn: Callable[..., float],
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        *,
        agent: str | Callable[..., Any],
        agent_options: dict[str, Any] | None = None,
        **common: Unpack[ChatOptions],
    ) -> None:
        super().__init__(reward_fn, gconfig, tokenizer, **common)
        named: Any = load_object(agent, what="agent") if isinstance(agent, str) else agent
        called = getattr(named, "run", None) if isinstance(named, type) else named
        if not callable(called):
            raise ValueError(f"agent {agent!r}: give a function, or a class with a method run")
        options = agent_options or {}
        if options and not isinstance(named, type):
            raise ValueError(f"agent_options={options}: a function takes none; name a class")
        self._scores = isinstance(named, type)
        if isinstance(named, type):
            if problems := "; ".join(option_problems(named, options, key="agent_options")):
                raise ValueError(problems)
            named = named(**options).run
        self._agent: Callable[..., Any] = named

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Padded:
        """Returns the batch of gconfig.n_samples rollouts, or of as many as are to be made anew, by
        trajectory.to_batch."""
        runs = (self._rollout(engine, data, i) for i in range(self.count(data)))
        return to_batch(await all_of(runs))

    async def _rollout(
        self, engine: InferenceEngine, data: dict[str, Any], index: int
    ) -> Trajectory:
        key = (data.get("row_id"), data.get("episode_id", 0), *attempt_key(), index)
        async with engine.session(
            self.gconfig,
            self.tokenizer,
            template_kwargs=self.chat_template_kwargs,
            index=index,
            seed_key=key,
            rewarded=self._scores or self.reward_fn is not no_reward,
        ) as session:
            try:
                returned = _reward(await self._run(data, session))
                if session.failures:  # the agent went on without an answer that it should have got
                    raise RuntimeError(f"the policy did not answer: {session.failures[0]}")
            except ThreadsExhausted:
                raise
            except Exception as e:
                kind = "server" if session.failures else "environment"
                warn_recurring(log, f"agent failed on row {data.get('row_id', '?')} ({kind})", e)
                session.trajectory.fail(kind)
                return session.trajectory
        return await self._scored(session, returned, data)

    async def _run(self, data: dict[str, Any], session: Session) -> Any:
        row = copy.deepcopy(data)
        return await call(partial(self._agent, row, session.base_url, session.api_key))

    async def _scored(
        self, session: Session, returned: float | None, data: dict[str, Any]
    ) -> Trajectory:
        rollout = session.trajectory
        if not rollout.answers:
            warn_recurring(log, f"agent of row {data.get('row_id', '?')}", "never asked the policy")
            rollout.fail("environment")
            return rollout
        reward = session.reward
        if returned is not None:
            reward = returned
            for turn in rollout.turns:  # whatever the session's key has sent
                turn.reward = 0.0
        if reward is None:
            reward = (await self.score([rollout], data))[0]
            if rollout.failure is not None:
                return rollout
        rollout.score(reward)
        return rollout


def _reward(returned: Any) -> float | None:
    """Returns what an agent returned as its reward. Raises TypeError and ValueError for what is
    none."""
    if returned is None:
        return None
    if isinstance(returned, bool) or not isinstance(returned, Real):
        raise TypeError(f"the agent returned {returned!r}: return a reward as a number, or None")
    reward = float(returned)
    if not abs(reward) <= MOST_REWARD:
        raise ValueError(f"the agent returned a reward of {reward}: no more than {MOST_REWARD:g}")
    return reward
