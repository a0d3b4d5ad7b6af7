"""What a reward may come to: a number with its parts, an error of a kind, or `late`.

A policy may write an expression that nobody can compute. That is a wrong answer, on every machine
and under any load, so `bounded` bounds the CPU time of a reward that reads what a policy wrote. A
signal ends what is written in Python; what C computes without a look at signals ends the worker
process, by the kernel, and the pool takes that for the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import reprlib
import resource
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

RewardFn = Callable[..., float]
OWN_ARGUMENTS = ("prompt", "completion", "prompt_ids", "completion_ids")  # in their order

LATE = "late"  # the part of a reward that is 1 where the answer took too much work
CPU_SECONDS = 4.0  # for one reward; a usual one takes hundredths
_MORE = 3  # seconds of CPU time after which the kernel ends the process, where no signal did


class RewardError(RuntimeError):
    """Says that a reward raised, died or returned no finite number; the message names the row."""


class RewardUnavailable(RewardError):
    """Says that nobody could tell the reward, as where a judge gives no verdict. It fails the
    sample alone, also with rollout.on_reward_error=raise: the reward is not at fault."""


class WorkerLost(RewardUnavailable):
    """Says that a reward node cannot be reached; others may be."""


class RewardTimeout(RewardError):
    """Says that a reward took longer than rollout.reward_timeout and was killed."""


def fails_sample(error: RewardError, on_reward_error: str) -> bool:
    """Returns whether the error fails its sample (then it is made anew, see rollout.episode), and
    not the run. on_reward_error: rollout's."""
    return on_reward_error == "reject" or isinstance(error, RewardUnavailable)


class Scored(float):
    """Is a reward that knows its parts: `parts` are the numbers that it was made of, by name, and
    `notes` the texts that explain it, such as a judge's. A reward of your own may return one;
    reward/<name> shows the mean of each part, and the notes are kept with the episode."""

    parts: dict[str, float]
    notes: dict[str, str]

    def __new__(
        cls, value: float, parts: Mapping[str, float] = {}, notes: Mapping[str, str] = {}
    ) -> Scored:
        scored = super().__new__(cls, value)
        scored.parts = {name: float(part) for name, part in parts.items()}
        scored.notes = {name: str(note) for name, note in notes.items()}
        return scored

    def __reduce__(self) -> tuple[Any, ...]:
        return Scored, (float(self), self.parts, self.notes)


def finite(value: Any) -> float:
    """Returns what a reward returned as a number. Raises TypeError if it is no number, such as a
    list, ValueError if the number is not finite, or a part of it is infinite. A part that is NaN
    counts as absent."""
    try:
        number = float(value)
    except (TypeError, ValueError) as e:
        kind = "" if value is None else f", a {type(value).__name__}"
        raise TypeError(
            f"it returned {reprlib.repr(value)}{kind}: a reward gets one completion, as text, and "
            "returns one number"
        ) from e
    if not math.isfinite(number):
        raise ValueError(f"the reward is {number}, not a finite number")
    if not isinstance(value, Scored):
        return number
    for name, part in value.parts.items():
        if math.isinf(part):
            raise ValueError(f"the part {name!r} of the reward is {part}, not a finite number")
    return value


def is_asynchronous(fn: Callable[..., Any]) -> bool:
    """Returns whether calling `fn`, a function or an object, gives something to await."""
    return any(map(inspect.iscoroutinefunction, (fn, getattr(fn, "__call__", None))))  # noqa: B004


def reward_arguments(
    reward_fn: RewardFn, own: tuple[Any, ...], row: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of a reward, by name: what its parameters name of prompt(s),
    completion(s), prompt_ids, completion_ids and the row; all of it where it takes `**row`.

    own: prompt, completion, prompt_ids, completion_ids; row: the rest of the data row.
    """
    given = dict(row) | dict(zip(OWN_ARGUMENTS, own, strict=True))
    parameters = inspect.signature(reward_fn).parameters
    for name in {"prompts", "completions"} & parameters.keys():
        given[name] = given[name.removesuffix("s")]
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in parameters}


class WeightedReward:
    """Is the sum of rewards, each times its weight.

    parts: by the name that the figures show, {type: a reward's name, options: its options, weight:
    a number, 1 where it is left out}, or the reward's name alone. Raises ValueError for a part that
    is no such thing.
    """

    def __init__(self, *, parts: dict[str, Any]) -> None:
        if not parts:
            raise ValueError("parts={}: name one reward at least")
        self.__name__ = type(self).__name__
        self._parts = {name: _part(name, part) for name, part in parts.items()}

    @property
    def functions(self) -> list[RewardFn]:
        """Returns the rewards of the parts, and of a part that is a sum those of its own."""
        return [f for fn, _ in self._parts.values() for f in getattr(fn, "functions", [fn])]

    def __call__(
        self,
        /,  # a row may have a column of any name
        prompt: str,
        completion: str,
        prompt_ids: list[int],
        completion_ids: list[int],
        **row: Any,
    ) -> Scored:
        """Returns the sum, of parts that are not asynchronous."""
        own, values = (prompt, completion, prompt_ids, completion_ids), {}
        for name, (fn, _) in self._parts.items():
            try:
                values[name] = finite(fn(**reward_arguments(fn, own, row)))
            except (TypeError, ValueError) as e:
                raise type(e)(f"parts.{name}: {e}") from e
        return self._sum(values)

    async def score(
        self,
        score: Callable[[RewardFn, tuple[Any, ...], dict[str, Any]], Awaitable[float]],
        /,
        prompt: str,
        completion: str,
        prompt_ids: list[int],
        completion_ids: list[int],
        **row: Any,
    ) -> Scored:
        """Returns the sum. score: RewardPool.score, which computes a part."""
        own = prompt, completion, prompt_ids, completion_ids

        async def part(name: str, fn: RewardFn) -> float:
            try:
                return await score(fn, (), reward_arguments(fn, own, row))
            except RewardError as e:
                raise type(e)(f"parts.{name}: {e}") from e

        try:
            async with asyncio.TaskGroup() as group:  # a part that raises ends the others
                tasks = {n: group.create_task(part(n, fn)) for n, (fn, _) in self._parts.items()}
        except ExceptionGroup as e:
            raise e.exceptions[0] from None
        return self._sum({name: task.result() for name, task in tasks.items()})

    def _sum(self, values: Mapping[str, float]) -> Scored:
        parts, notes, total = dict[str, float](), {}, 0.0
        if late := max(getattr(value, "parts", {}).get(LATE, 0.0) for value in values.values()):
            parts[LATE] = late
        for name, (_, weight) in self._parts.items():
            parts[name] = float(values[name])
            total += weight * parts[name]
            for key, text in getattr(values[name], "notes", {}).items():
                notes[f"{name}/{key}"] = text
        return Scored(total, parts, notes)


def _part(name: str, part: Any) -> tuple[RewardFn, float]:
    """Returns a part's reward and weight."""
    from megarl.rollout.rewards import get_reward_fn

    part = {"type": part} if isinstance(part, str) else part
    if not isinstance(part, dict) or not {"type"} <= set(part) <= {"type", "options", "weight"}:
        raise ValueError(f"parts.{name}={part!r}: use type, options and weight")
    weight = part.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ValueError(f"parts.{name}.weight={weight!r}: use a number")
    return get_reward_fn(part["type"], part.get("options")), float(weight)


# the bound on the work for an answer


class TooMuchWork(BaseException):
    """Says that an answer takes more work than a right one would. It is no Exception: libraries
    catch those and go on."""


def late() -> Scored:
    """Returns the reward of such an answer: 0, counted as reward/late."""
    return Scored(0.0, {LATE: 1.0})


def bounded(reward: RewardFn) -> RewardFn:
    """Decorates a reward that reads what a policy wrote: it gives `late()` for what takes more than
    CPU_SECONDS of CPU time. Outside of a process's main thread there is no bound."""

    @functools.wraps(reward)
    def within(*args: Any, **kw: Any) -> float:
        try:
            with _limit():
                return reward(*args, **kw)
        except TooMuchWork:
            return late()

    return within


def end_process_when_late() -> None:
    """Has the kernel end this process, by SIGXCPU, where a reward goes on after its signal. For
    processes that can be replaced."""
    _Worker.replaceable = True


class _Worker:
    replaceable = False


@contextlib.contextmanager
def _limit() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPROF, _stop)
    limits = resource.getrlimit(resource.RLIMIT_CPU)
    if _Worker.replaceable:
        used = resource.getrusage(resource.RUSAGE_SELF)
        most = int(used.ru_utime + used.ru_stime + CPU_SECONDS) + _MORE
        if limits[1] == resource.RLIM_INFINITY or most < limits[1]:
            resource.setrlimit(resource.RLIMIT_CPU, (most, limits[1]))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_CPU, limits)


def _stop(*_: Any) -> None:
    raise TooMuchWork
