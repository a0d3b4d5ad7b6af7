"""Says how the computation of a reward can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class RewardError(RuntimeError):
    """Says that a reward raised, died or returned no finite number; the message names the row."""


class RewardUnavailable(RewardError):
    """Says that nobody could tell the reward, as where a judge gives no verdict. It fails the
    sample alone, also with rollout.on_reward_error=raise: the reward is not at fault."""


class WorkerLost(RewardUnavailable):
    """Says that a reward worker on another machine cannot be reached; others may be."""


class RewardTimeout(RewardError):
    """Says that a reward took longer than rollout.reward_timeout and was killed."""


def fails_sample(error: RewardError, on_reward_error: str) -> bool:
    """Returns whether the error fails its sample (then it is made anew, see rollout.retries), and
    not the run. on_reward_error: rollout's."""
    return on_reward_error == "reject" or isinstance(error, RewardUnavailable)


def titled(fn: Callable[..., Any], row_id: object) -> str:
    """Returns how messages call a reward of a row."""
    return f"reward {getattr(fn, '__name__', repr(fn))} on row {row_id}"
