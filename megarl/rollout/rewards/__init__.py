"""Rewards: `reward_fn(prompt, completion, prompt_ids, completion_ids, **row) -> float`.

`prompt` and `completion` are text, the ids are tokens, `row` is the rest of the data row (`answer`,
`task`, ...). A reward runs in a worker process (RewardPool): it must be a module-level function.

To add one: write the function in a module of its own and name it in `_REWARDS`; or pass
"package.module:function" to `get_reward_fn`. The module's imports happen before the clock starts,
so heavy ones belong at its top.
"""

from __future__ import annotations

from collections.abc import Callable

from megarl.rollout.rewards.pool import RewardError, RewardPool, RewardTimeout
from megarl.utils.importing import load_object

RewardFn = Callable[..., float]

_REWARDS = {
    "arithmetic": "megarl.rollout.rewards.arithmetic:arithmetic_reward",
    "gsm8k": "megarl.rollout.rewards.gsm8k:gsm8k_reward",
    "reasoning_gym": "megarl.rollout.rewards.reasoning_gym:reasoning_gym_reward",
}


def is_registered(name: str) -> bool:
    """Whether `name` is short for a reward of megarl's own."""
    return name in _REWARDS


def get_reward_fn(name: str) -> RewardFn:
    """A reward by its registered name or by "package.module:function"."""
    target = _REWARDS.get(name, name)
    if ":" not in target:
        raise ValueError(
            f"unknown reward {name!r}: use one of {sorted(_REWARDS)} or 'package.module:function'"
        )
    return load_object(target, what="reward")


__all__ = ["RewardError", "RewardFn", "RewardPool", "RewardTimeout", "get_reward_fn"]
