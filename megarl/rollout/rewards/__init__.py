"""Defines rewards: `reward_fn(prompt, completion, prompt_ids, completion_ids, **row) -> float`.

`prompt` and `completion` are text, the ids are tokens, `row` is the rest of the data row (`answer`,
`task`, ...). A reward runs in a worker process (RewardPool): it must be a module-level function. An
asynchronous one is awaited instead: an `async def` function, or a class whose objects have an async
`__call__`, made once with the options.

To add one: write the function in a module of its own and name it in `_REWARDS`; or pass
"package.module:function" to `get_reward_fn`, with options. The module's imports happen before the
clock starts, so heavy ones belong at its top. A function `check_row(**row)` beside the reward, in
the same module, is called with every row before the run begins: it raises ValueError for a row
whose gold answer the reward cannot compare with. Objects may have it as a method.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial, update_wrapper
from typing import Any, cast

from megarl.config.dataset import SourceConfig
from megarl.config.rollout import RolloutConfig
from megarl.rollout.rewards.errors import RewardError, RewardTimeout
from megarl.rollout.rewards.parts import MixedReward, weighted_reward
from megarl.rollout.rewards.pool import RewardPool
from megarl.utils.importing import is_import_path, load_object, option_problems

# a module with rewards may have a function of this name, called with every row at the start
CHECK = "check_row"
# and one of this name, called with the reward's options where it has any
CHECK_OPTIONS = "check_options"
# and one of this name, called with the options and every row: the most seconds that it may take
MOST_SECONDS = "most_seconds"

RewardFn = Callable[..., float]
OWN_ARGUMENTS = ("prompt", "completion", "prompt_ids", "completion_ids")  # in their order

_REWARDS = {
    "none": "megarl.rollout.rewards:no_reward",
    "arithmetic": "megarl.rollout.rewards.arithmetic:arithmetic_reward",
    "gsm8k": "megarl.rollout.rewards.gsm8k:gsm8k_reward",
    "code": "megarl.rollout.rewards.code:code_reward",
    "exact": "megarl.rollout.rewards.text:exact_reward",
    "regex": "megarl.rollout.rewards.text:regex_reward",
    "format": "megarl.rollout.rewards.text:format_reward",
    "length": "megarl.rollout.rewards.text:length_reward",
    "overlong": "megarl.rollout.rewards.text:overlong_reward",
    "judge": "megarl.rollout.rewards.judge:JudgeReward",
    "weighted": "megarl.rollout.rewards.parts:weighted_reward",
    "reasoning_gym": "megarl.rollout.rewards.reasoning_gym:reasoning_gym_reward",
}


def no_reward(*args: Any, **row: Any) -> float:
    """Returns 0, for runs whose rewards come from a reward model or from the workflow."""
    return 0.0


def reward_arguments(
    reward_fn: RewardFn, own: tuple[Any, ...], row: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments that a reward is called with, by position and by name.

    own: prompt, completion, prompt_ids, completion_ids; row: the rest of the data row. A reward
    that takes four arguments by position gets them so, and the row by name. Another gets what its
    parameters name of prompt(s), completion(s), prompt_ids, completion_ids and the row, as
    `gsm8k_reward_fn(completions, answer)` does.
    """
    parameters = _named_parameters(reward_fn)
    if parameters is None:
        return own, row
    names = {p.name for p in parameters}
    prompt, completion, prompt_ids, completion_ids = own
    known = row | {
        "prompt": prompt,
        "prompts": prompt,
        "completion": completion,
        "completions": completion,
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
    }
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return (), known
    return (), {name: value for name, value in known.items() if name in names}


def _named_parameters(reward_fn: RewardFn) -> list[inspect.Parameter] | None:
    """Returns the parameters of a reward that gets its arguments by name; None for one that gets
    its first four by position."""
    try:
        parameters = list(inspect.signature(reward_fn).parameters.values())
    except (TypeError, ValueError):  # not written in Python
        return None
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    plural = {p.name for p in parameters} & {"completions", "prompts"}
    return None if len(by_position) >= len(OWN_ARGUMENTS) and not plural else parameters


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
    return load_object(target, what="reward")


def reward_problems(
    fn: Any, options: Mapping[str, Any], *, key: str, row: Sequence[str] = ()
) -> list[str]:
    """Returns a line for each option that `fn` (see load_reward) does not take. key: as in
    option_problems. row: the names of the row's columns, where they are known."""
    if inspect.isclass(fn):
        return list(option_problems(fn, options, key=key))
    if (parameters := _named_parameters(fn)) is None:
        found = option_problems(fn, options, key=key, positional=len(OWN_ARGUMENTS), by_name=row)
    else:
        given = {p.name for p in parameters} & {*OWN_ARGUMENTS, "prompts", "completions", *row}
        found = option_problems(fn, options, key=key, by_name=sorted(given))
    return [problem for problem in found if "needs it" not in problem]  # a row may have it


def get_reward_fn(name: str, options: Mapping[str, Any] | None = None) -> RewardFn:
    """Returns a reward by its registered name or by "package.module:function", with `options` as
    further keyword arguments. Raises ValueError for one that there is not, or that does not take
    them."""
    fn, options = load_reward(name), options or {}
    if not (options or inspect.isclass(fn)):
        return fn
    if found := "; ".join(reward_problems(fn, options, key="options")):
        raise ValueError(f"reward {name}: {found}")
    if inspect.isclass(fn):
        return cast(RewardFn, fn(**options))
    if check := getattr(inspect.getmodule(fn), CHECK_OPTIONS, None):
        check(**options)
    if fn is weighted_reward and (mixed := MixedReward(**options)).awaits:
        return cast(RewardFn, mixed)
    return update_wrapper(partial(fn, **options), fn, ("__module__", "__name__"), ())


def reward_of(cfg: SourceConfig) -> RewardFn:
    """Returns the reward of a data set: the one it names, else that of its type."""
    return get_reward_fn(cfg.reward.type or cfg.type, cfg.reward.options)


def check_rows(
    reward_fn: RewardFn, rows: Iterable[dict[str, Any]], *, timeout: float | None = None
) -> None:
    """Has the `check_row` of the reward, or of its module, if there is one, look at every row, and
    compares the seconds that its `most_seconds` names with `timeout`, rollout.reward_timeout.
    Raises ValueError naming the first row that is refused."""
    check, most = _own(reward_fn, CHECK), _own(reward_fn, MOST_SECONDS)
    if check is None and (most is None or timeout is None):
        return
    for row in rows:
        try:
            if check is not None:
                check(**row)
            if most is not None and timeout is not None:
                _check_seconds(most(**row), timeout)
        except (TypeError, ValueError) as e:
            raise ValueError(f"row {row.get('row_id', '?')}: {e}") from e


def _own(reward_fn: Any, name: str) -> Callable[..., Any] | None:
    """Returns a function of the reward's, or of its module, CHECK or MOST_SECONDS, which has the
    reward's options; of a weighted sum, one that calls those of its parts."""
    if isinstance(reward_fn, partial) and reward_fn.func is weighted_reward:
        reward_fn = MixedReward(**reward_fn.keywords)
    if isinstance(reward_fn, MixedReward):
        functions = [own for fn in reward_fn.functions if (own := _own(fn, name)) is not None]
        return lambda **row: sum(own(**row) or 0.0 for own in functions)
    found = getattr(reward_fn, name, None) or getattr(inspect.getmodule(reward_fn), name, None)
    if found is not None and name == MOST_SECONDS and isinstance(reward_fn, partial):
        return partial(found, **reward_fn.keywords)
    return found


def _check_seconds(most: float, timeout: float) -> None:
    if most >= timeout:
        raise ValueError(
            f"its tests may take {most:g} s together (seconds each, and the start of their "
            f"processes), and rollout.reward_timeout={timeout:g} ends a reward before: raise "
            "rollout.reward_timeout, or lower the reward's option seconds"
        )


__all__ = [
    "RewardError",
    "RewardFn",
    "RewardPool",
    "RewardTimeout",
    "check_rows",
    "get_reward_fn",
    "reward_arguments",
    "reward_of",
    "shared_pool",
]
