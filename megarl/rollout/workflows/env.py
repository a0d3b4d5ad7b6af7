"""EnvWorkflow has the policy act in an environment with reset and step."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Unpack

from megarl.config.rollout import GenerationHyperparameters
from megarl.rollout.env import Env
from megarl.rollout.user_calls import call
from megarl.rollout.workflows.multi_turn import (
    INTERACTION_TIMEOUT,
    Interaction,
    MultiTurnWorkflow,
    Reply,
)
from megarl.rollout.workflows.turns import Row, TurnOptions
from megarl.utils.importing import call_problem, load_object, option_problems


class EnvWorkflow(MultiTurnWorkflow):
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
        super().__init__(reward_fn, gconfig, tokenizer, interaction_timeout=None, **common)
        if problem := next(self.check_options(env=env, env_options=env_options), None):
            raise ValueError(problem)
        make, options = load_object(env, what="env"), dict(env_options or {})
        self._partner = lambda: _EnvPartner(make(**options), step_timeout)

    @classmethod
    def check_options(
        cls, *, env: str = "", env_options: dict[str, Any] | None = None, **others: Any
    ) -> Iterator[str]:
        """Yields what is wrong with the options, before anything starts."""
        try:
            make = load_object(env, what="env")
        except ValueError as e:
            yield str(e)
            return
        if not callable(make):
            yield f"env {env}: a {type(make).__name__}, neither a class nor a function"
            return
        yield from option_problems(make, env_options or {}, key="env_options")
        if inspect.isclass(make):
            yield from _shape_problems(env, make)


def _shape_problems(env: str, made: type) -> Iterator[str]:
    """Yields how a class is not of an Env's shape."""
    for name, given, named in (("reset", ("self",), ("seed", "options")), ("step", "sa", ())):
        method = getattr(made, name, None)
        if method is None:
            yield f"env {env}: has no method {name}; see megarl.rollout.env.Env"
        elif problem := call_problem(method, given, named):
            yield f"env {env}: {problem}; see megarl.rollout.env.Env"


class _EnvPartner(Interaction):
    """Speaks for an environment."""

    def __init__(self, env: Env, timeout: float) -> None:
        self._env, self._timeout = env, timeout

    async def start(self, row: Row) -> str | None:
        seed = row.get("seed", row.get("row_id", 0))
        begin = partial(self._env.reset, seed=seed, options=copy.deepcopy(row))
        first, _ = await call(begin, timeout=self._timeout)
        return str(first)

    async def respond(self, messages: list[dict[str, Any]], row: Row) -> Reply:
        step = partial(self._env.step, messages[-1]["content"])
        text, reward, terminated, truncated, _ = await call(step, timeout=self._timeout)
        return Reply(text=str(text), done=bool(terminated or truncated), reward=float(reward))

    async def aclose(self) -> None:
        if (close := getattr(self._env, "close", None)) is not None:
            await call(close)
