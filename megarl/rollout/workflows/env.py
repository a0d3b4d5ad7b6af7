"""EnvWorkflow has the policy act in an Env, an environment in gymnasium's shape: reset and step."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, Unpack

from megarl.config.rollout import GenerationHyperparameters
from megarl.rollout.loop_thread import call
from megarl.rollout.trajectory import Trajectory
from megarl.rollout.workflows.multi_turn import (
    INTERACTION_TIMEOUT,
    Message,
    Partner,
    Reply,
    Row,
    TurnOptions,
    TurnsWorkflow,
    maker,
)
from megarl.utils.importing import call_problem


class Env(Protocol):
    """Answers the policy's texts with observations and rewards. An instance belongs to one sample.
    The methods may be plain or async; plain ones run in a thread, one after the other. `close()`
    may be there, too."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begins anew and returns the first observation and further information. The same seed and
        options, which are the row of the data, begin in the same way."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Returns what follows on the policy's answer: the observation, what the answer earned,
        whether the task has ended (terminated), whether it was cut off (truncated), and further
        information."""


class EnvWorkflow(TurnsWorkflow):
    """Shows the policy the observations as a user's messages and the environment its answers. What
    steps earn is added up, discounted by turn; reward_fn's number for the last answer is added (the
    reward `none` adds nothing). What the environment raises fails the sample ("environment").

    env: "pkg.module:Class" or a function that returns an Env, called with env_options for every
    sample. It is reset with the row's `seed`, else its row_id, so that a row always begins alike.
    step_timeout: seconds that one reset or step may take.
    """

    usual_turns = 16

    def __init__(
        self,
        reward_fn: Callable[..., float],
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        *,
        env: str,
        env_options: dict[str, Any] | None = None,
        step_timeout: float = INTERACTION_TIMEOUT,
        **common: Unpack[TurnOptions],
    ) -> None:
        super().__init__(reward_fn, gconfig, tokenizer, **common)
        self.timeout = step_timeout
        self._make = maker(env, env_options or {}, what="env")
        if inspect.isclass(self._make.func):
            _check_shape(env, self._make.func)

    def partner(self, row: Row) -> Partner:
        """Returns a new environment."""
        return _EnvPartner(self._make())


def _check_shape(env: str, env_class: type) -> None:
    """Raises ValueError where a class is not of an Env's shape."""
    for name, given, named in (("reset", ("self",), ("seed", "options")), ("step", "sa", ())):
        method = getattr(env_class, name, None)
        why = call_problem(method, given, named) if method else f"has no method {name}"
        if why:
            raise ValueError(f"env {env}: {why}; see {__name__}.Env")


class _EnvPartner(Partner):
    """Speaks for an environment."""

    def __init__(self, env: Env) -> None:
        self._env = env

    async def first_message(self, flow: TurnsWorkflow, row: Row) -> str | None:
        seed = row.get("seed", row.get("row_id", 0))
        begin = partial(self._env.reset, seed=seed, options=copy.deepcopy(row))
        first, _ = await call(begin, timeout=flow.timeout)
        return str(first)

    async def next_messages(
        self, flow: TurnsWorkflow, sample: Trajectory, row: Row
    ) -> Sequence[Message]:
        step = partial(self._env.step, flow.text(sample.answers[-1]))
        text, reward, terminated, truncated, _ = await call(step, timeout=flow.timeout)
        done = bool(terminated or truncated)
        return flow.heard(sample, Reply(text=str(text), done=done, reward=float(reward)))

    async def aclose(self) -> None:
        if (close := getattr(self._env, "close", None)) is not None:
            await call(close)
