"""Adds rewards up, each with a weight, and keeps the parts for the figures."""

from __future__ import annotations

import asyncio
import inspect
import math
import reprlib
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

LATE = "late"  # the part of a reward that is 1 where the answer took too much work (bounded.py)


class Scored(float):
    """Is a reward that knows its parts: `parts` are the numbers that it was made of, by name, and
    `notes` the texts that explain it, such as a judge's. A reward of your own may return one;
    reward/<name> shows the mean of each part, and the notes are kept with the episode."""

    parts: dict[str, float]
    notes: dict[str, str]

    def __new__(
        cls, value: float, parts: Mapping[str, float] = {}, notes: Mapping[str, str] = {}
    ) -> Scored:
        made = super().__new__(cls, value)
        made.parts = {name: float(part) for name, part in parts.items()}
        made.notes = {name: str(note) for name, note in notes.items()}
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return Scored, (float(self), self.parts, self.notes)


def finite(value: Any) -> float:
    """Returns what a reward returned as a number. Raises TypeError where it is none, such as a
    list, ValueError where it is not finite."""
    try:
        number = float(value)
    except (TypeError, ValueError) as e:
        raise TypeError(
            f"it returned {reprlib.repr(value)}, a {type(value).__name__}: a reward gets one "
            "completion, as text, and returns one number"
        ) from e
    if not math.isfinite(number):
        raise ValueError(f"the reward is {number}, not a finite number")
    return value if isinstance(value, Scored) else number


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

    own, found = (prompt, completion, prompt_ids, completion_ids), {}
    made = _parts(parts)
    for name, (fn, _) in made.items():
        args, by_name = reward_arguments(fn, own, row)
        found[name] = _of_part(name, fn(*args, **by_name))
    return _added(found, {name: weight for name, (_, weight) in made.items()})


def is_asynchronous(fn: Callable[..., Any]) -> bool:
    """Returns whether calling `fn`, a function or an object, gives something to await."""
    return any(map(inspect.iscoroutinefunction, (fn, getattr(fn, "__call__", None))))  # noqa: B004


class MixedReward:
    """Is a weighted sum with asynchronous parts (`awaits` says whether it has any): RewardPool
    awaits those, and computes the others together in a worker. `functions` are the parts'."""

    def __init__(self, parts: dict[str, Any]) -> None:
        made = _parts(parts)
        self.functions = [fn for fn, _ in made.values()]
        self.awaits = any(map(is_asynchronous, self.functions))
        self._weights = {name: weight for name, (_, weight) in made.items()}
        self._awaited = {name: fn for name, (fn, _) in made.items() if is_asynchronous(fn)}
        others = {name: part for name, part in parts.items() if name not in self._awaited}
        self._others = partial(weighted_reward, parts=others) if others else None

    async def score(
        self, score: Callable[..., Awaitable[float]], own: tuple[Any, ...], row: dict[str, Any]
    ) -> Scored:
        """Returns the sum. score: RewardPool.score; own, row: see rewards.reward_arguments."""
        from megarl.rollout.rewards import reward_arguments

        calls = {n: (fn, *reward_arguments(fn, own, row)) for n, fn in self._awaited.items()}
        if self._others is not None:
            calls[""] = (self._others, own, row)
        try:
            async with asyncio.TaskGroup() as group:  # one that raises ends the others
                tasks = [group.create_task(_awaited(score(*call))) for call in calls.values()]
        except ExceptionGroup as e:
            raise e.exceptions[0] from None
        values = [task.result() for task in tasks]
        found = dict(zip(calls, values, strict=True))
        together: Any = found.pop("", Scored(0.0))
        added = _added({**together.parts, **found}, self._weights)
        return Scored(added, added.parts, together.notes | added.notes)


def _of_part(name: str, value: Any) -> float:
    try:
        return finite(value)
    except (TypeError, ValueError) as e:
        raise type(e)(f"parts.{name}: {e}") from e


async def _awaited(value: Awaitable[float]) -> float:
    return await value


def _added(found: Mapping[str, float], weights: Mapping[str, float]) -> Scored:
    """Returns the weighted sum of `found`, with its parts and their notes, in the order of
    `weights`."""
    parts, notes, total = {}, {}, 0.0
    inner = [getattr(part, "parts", {}).get(LATE) for part in found.values()]
    late = [part for part in (*inner, None if LATE in weights else found.get(LATE)) if part]
    if late:
        parts[LATE] = max(late)
    for name, weight in weights.items():
        parts[name] = float(found[name])
        total += weight * parts[name]
        for key, text in getattr(found[name], "notes", {}).items():
            notes[f"{name}/{key}"] = text
    return Scored(total, parts, notes)


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
