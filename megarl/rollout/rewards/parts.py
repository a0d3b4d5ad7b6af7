"""Adds rewards up, each with a weight, and keeps the parts for the figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class Scored(float):
    """Is a reward that knows its parts: `parts` are the numbers that it was made of, by name. A
    reward of your own may return one; reward/<name> shows the mean of each part."""

    parts: dict[str, float]

    def __new__(cls, value: float, parts: Mapping[str, float]) -> Scored:
        made = super().__new__(cls, value)
        made.parts = {name: float(part) for name, part in parts.items()}
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return Scored, (float(self), self.parts)


def weighted_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    parts: dict[str, Any],
    **row: Any,
) -> Scored:
    """Returns the sum of rewards, each times its weight. parts: by the name that the figures show,
    {type: a reward's name, options: its options, weight: a number, 1 where it is left out}, or the
    reward's name alone. Raises ValueError for a part that is no such thing."""
    from megarl.rollout.rewards import reward_arguments

    found, total = {}, 0.0
    own = (prompt, completion, prompt_ids, completion_ids)
    for name, (fn, weight) in _parts(parts).items():
        args, by_name = reward_arguments(fn, own, row)
        found[name] = float(fn(*args, **by_name))
        total += weight * found[name]
    return Scored(total, found)


def check_options(*, parts: dict[str, Any]) -> None:
    """Raises ValueError for a part that is none, or that does not take its options."""
    _parts(parts)


def _parts(parts: dict[str, Any]) -> dict[str, tuple[Callable[..., float], float]]:
    """Returns the rewards and weights of the parts by name."""
    from megarl.rollout.rewards import get_reward_fn

    if not parts:
        raise ValueError("parts={}: name one reward at least")
    found = {}
    for name, part in parts.items():
        part = {"type": part} if isinstance(part, str) else part
        if not isinstance(part, dict) or not {"type"} <= set(part) <= {"type", "options", "weight"}:
            raise ValueError(f"parts.{name}={part!r}: use type, options and weight")
        weight = part.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ValueError(f"parts.{name}.weight={weight!r}: use a number")
        found[name] = (get_reward_fn(part["type"], part.get("options")), float(weight))
    return found
