"""Defines Env, an environment in gymnasium's shape: five lines of reset and step."""

from __future__ import annotations

from typing import Any, Protocol


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
