"""Defines rewards: `reward_fn(prompt, completion, prompt_ids, completion_ids, **row) -> float`.

`prompt` and `completion` are text, the ids are tokens, `row` is the rest of the data row (`answer`,
`task`, ...). A reward is called by name, with what its parameters name of these. It runs in a
worker process (RewardPool): it must be a module-level function. An asynchronous one is awaited
instead: an `async def` function, or a class whose objects have an async `__call__`, made once with
the options.

To add one: write the function in a module of its own and name it in `_REWARDS`; or pass
"package.module:function" to `get_reward_fn`, with options. The module's imports happen before the
clock starts, so heavy ones belong at its top. A function `check_row(**row)` beside the reward, in
the same module, is called with every row before the run begins: it raises ValueError for a row
whose gold answer the reward cannot compare with. Objects may have it as a method.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial, update_wrapper
from typing import Any, cast

from megarl.config.dataset import SourceConfig
from megarl.config.rollout import RolloutConfig
from megarl.rollout.rewards.pool import RewardPool
from megarl.rollout.rewards.results import (
    OWN_ARGUMENTS,
    RewardError,
    RewardFn,
    RewardTimeout,
    RewardUnavailable,
    Scored,
    WeightedReward,
    bounded,
    reward_arguments,
)
from megarl.utils.importing import is_import_path, load_object, option_problems

# a module with rewards may have a function of this name, called with every row at the start
CHECK = "check_row"
# and one of this name, called with the options and every row: the most seconds that it may take
MOST_SECONDS = "most_seconds"

_REWARDS = {
    "none": "megarl.rollout.rewards:no_reward",
    "arithmetic": "megarl.rollout.rewards:exact_reward",
    "gsm8k": "megarl.rollout.rewards.gsm8k:gsm8k_reward",
    "code": "megarl.rollout.rewards.code:code_reward",
    "exact": "megarl.rollout.rewards:exact_reward",
    "regex": "megarl.rollout.rewards:regex_reward",
    "format": "megarl.rollout.rewards:format_reward",
    "length": "megarl.rollout.rewards:length_reward",
    "overlong": "megarl.rollout.rewards:overlong_reward",
    "judge": "megarl.rollout.rewards.judge:JudgeReward",
    "weighted": "megarl.rollout.rewards.results:WeightedReward",
    "reasoning_gym": "megarl.rollout.rewards.reasoning_gym:reasoning_gym_reward",
}


_LIST = re.compile(r"(typing\.)?[lL]ist\b")


def no_reward(**row: Any) -> float:
    """Returns 0, for runs whose rewards come from a reward model or from the workflow."""
    return 0.0


def shared_pool(config: RolloutConfig | None = None) -> RewardPool:
    """Returns the pool, as `config` says (None: by default), of all workflows that are made without
    one; it ends with the process."""
    c = config or RolloutConfig()
    return _pool(c.reward_workers, c.reward_timeout, tuple(c.reward_addresses), c.on_reward_error)


@cache
def _pool(workers: int, timeout: float, addresses: tuple[str, ...], on_error: str) -> RewardPool:
    return RewardPool(workers, timeout=timeout, addresses=addresses, on_error=on_error)


def is_registered(name: str) -> bool:
    """Returns whether `name` is that of a reward of megarl's own."""
    return name in _REWARDS


def load_reward(name: str) -> Any:
    """Returns the function or class of a reward's registered name or "package.module:name". Raises
    ValueError for one that there is not."""
    target = _REWARDS.get(name, name)
    if not is_import_path(target):
        raise ValueError(
            f"unknown reward {name!r}: use one of {sorted(_REWARDS)} or 'package.module:function'"
        )
    fn = load_object(target, what="reward")
    if _returns_list(fn):
        raise ValueError(
            f"reward {name!r} returns a list: a reward gets one completion, as text, and returns "
            "one number; return the number"
        )
    return fn


def _returns_list(fn: Any) -> bool:
    """Returns whether the annotation of a function, or each of its return statements, names a list,
    as TRL's rewards do. A decorator may change the result, so it makes the answer False."""
    if not inspect.isfunction(fn) or hasattr(fn, "__wrapped__"):
        return False
    returned = fn.__annotations__.get("return")
    if _LIST.match(returned if isinstance(returned, str) else inspect.formatannotation(returned)):
        return True
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(fn)))
    except (OSError, SyntaxError):
        return False
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    return bool(values) and all(isinstance(v, ast.List | ast.ListComp) for v in values)


def reward_problems(
    fn: Any, options: Mapping[str, Any], *, key: str, row: Sequence[str] = ()
) -> list[str]:
    """Returns a line for each option that `fn` (see load_reward) does not take. key: as in
    option_problems. row: the names of the row's columns, where they are known."""
    if inspect.isclass(fn):
        return list(option_problems(fn, options, key=key))
    given = (*OWN_ARGUMENTS, "prompts", "completions", *row)
    problems = option_problems(fn, options, key=key, by_name=given)
    return [problem for problem in problems if "needs it" not in problem]  # a row may have it


def get_reward_fn(name: str, options: Mapping[str, Any] | None = None) -> RewardFn:
    """Returns a reward by its registered name or by "package.module:function", with `options` as
    further keyword arguments. Raises ValueError for one that there is not, or that does not take
    them."""
    fn, options = load_reward(name), options or {}
    if not (options or inspect.isclass(fn)):
        return cast(RewardFn, fn)
    if problems := "; ".join(reward_problems(fn, options, key="options")):
        raise ValueError(f"reward {name}: {problems}")
    if inspect.isclass(fn):
        return cast(RewardFn, fn(**options))
    return update_wrapper(partial(fn, **options), fn, ("__module__", "__name__"), ())


def reward_of(cfg: SourceConfig) -> RewardFn:
    """Returns the reward of a data set: the one it names, else that of its type."""
    return get_reward_fn(cfg.reward.type or cfg.type, cfg.reward.options)


def check_rows(
    reward_fn: RewardFn, rows: Iterable[dict[str, Any]], *, timeout: float | None = None
) -> None:
    """Has the `check_row` of the reward, or of its module, if there is one, look at every row, and
    compares the seconds that its `most_seconds` names with `timeout`, rollout.reward_timeout; of a
    weighted sum, those of each part. Raises ValueError naming the first row that is refused."""
    parts = reward_fn.functions if isinstance(reward_fn, WeightedReward) else [reward_fn]
    checks = [check for fn in parts if (check := _beside(fn, CHECK)) is not None]
    bounds = [bound for fn in parts if (bound := _beside(fn, MOST_SECONDS)) is not None]
    timeout = math.inf if timeout is None else timeout
    for row in rows if checks or bounds else ():
        try:
            for check in checks:
                check(**row)
            for bound in bounds:
                _check_seconds(bound(**row), timeout)
        except (TypeError, ValueError) as e:
            raise ValueError(f"row {row.get('row_id', '?')}: {e}") from e


def _beside(reward_fn: Any, name: str) -> Callable[..., Any] | None:
    """Returns a function of the reward's, or of its module, CHECK or MOST_SECONDS, which has the
    reward's options."""
    own = reward_fn.func if isinstance(reward_fn, partial) else reward_fn
    fn = getattr(own, name, None) or getattr(inspect.getmodule(reward_fn), name, None)
    if fn is not None and name == MOST_SECONDS and isinstance(reward_fn, partial):
        return partial(fn, **reward_fn.keywords)
    return fn


def _check_seconds(most: float, timeout: float) -> None:
    if most >= timeout:
        raise ValueError(
            f"its tests may take {most:g} s together (seconds each, and the start of their "
            f"processes), and rollout.reward_timeout={timeout:g} ends a reward before: raise "
            "rollout.reward_timeout, or lower the reward's option seconds"
        )


# rewards by rules: equality, patterns, length


def exact_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    answer: Any,
    ignore_case: bool = False,
    **row: Any,
) -> float:
    """Returns 1 if the completion is the answer, but for white space, else 0."""
    given, expected = (" ".join(str(text).split()) for text in (completion, answer))
    return float(given.casefold() == expected.casefold() if ignore_case else given == expected)


def _check_exact(*, answer: Any = None, **row: Any) -> None:
    if answer is None:
        raise ValueError("answer is null, which no completion is; leave the row out")


exact_reward.check_row = _check_exact  # type: ignore[attr-defined]


@bounded
def regex_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    pattern: str,
    answer: Any = None,
    **row: Any,
) -> float:
    """Returns 1 if the last match of `pattern` is the row's answer, but for white space around it,
    else 0. The pattern's first group is compared, or the whole match; in a row without an answer
    any match is right. Raises ValueError for a pattern that is none."""
    matches = list(_compiled(pattern).finditer(completion))
    match = matches[-1] if matches else None
    if match is None or answer is None:
        return float(match is not None)
    text = match[1] if match.re.groups else match[0]
    return float((text or "").strip() == str(answer).strip())


@bounded
def format_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    pattern: str = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*",
    **row: Any,
) -> float:
    """Returns 1 if the whole completion has the form of `pattern`, a dot being any character, else
    0. Raises ValueError for a pattern that is none."""
    return float(_compiled(pattern).fullmatch(completion) is not None)


def length_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    at_least: int = 0,
    at_most: int,
    **row: Any,
) -> float:
    """Returns 1 if the completion has from `at_least` to `at_most` tokens, else 0."""
    return float(at_least <= len(completion_ids) <= at_most)


def overlong_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    max_length: int,
    buffer: int,
    **row: Any,
) -> float:
    """Returns 0 for a completion of at most `max_length - buffer` tokens, -1 for one of
    `max_length`, and what lies between them for one in between (DAPO, arXiv 2503.14476). Raises
    ValueError for a buffer that does not fit."""
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer={buffer}: use from 1 to max_length={max_length} tokens")
    over = len(completion_ids) - (max_length - buffer)
    return -min(1.0, max(0.0, over / buffer))


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as e:
        raise ValueError(f"pattern {pattern!r}: {e}") from e


__all__ = [
    "RewardError",
    "RewardFn",
    "RewardPool",
    "RewardTimeout",
    "RewardUnavailable",
    "Scored",
    "check_rows",
    "get_reward_fn",
    "reward_arguments",
    "reward_of",
    "shared_pool",
]
