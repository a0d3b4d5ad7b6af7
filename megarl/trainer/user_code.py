"""Checks that the code a configuration names can be loaded and takes what it will be given.

Importing it may import torch, or do anything: run.py does so where it is about to import torch
itself, the launcher in a process of its own.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.config.check_parts import transport_problems
from megarl.config.rollout import SyncOptions, built_in_transport, transport_class
from megarl.rollout.rewards import get_reward_fn, load_reward, reward_problems
from megarl.rollout.rewards.results import (
    OWN_ARGUMENTS,
    WeightedReward,
    is_asynchronous,
    reward_arguments,
)
from megarl.utils.importing import call_problem, in_one_line, load_object, option_problems

REWARD = f"reward({', '.join(OWN_ARGUMENTS)}, **row)"
EPISODE = "async def arun_episode(self, engine, data)"


@dataclass(frozen=True)
class Call:
    """Describes how megarl calls a kind of code: its arguments by position and by name."""

    positional: tuple[str, ...]
    by_name: tuple[str, ...]
    shown: str


CALLS = {
    "workflow": Call(
        ("reward_fn", "gconfig", "tokenizer"),
        ("reward_pool",),
        "Workflow(reward_fn, gconfig, tokenizer, *, reward_pool)",
    ),
    "trainer": Call(("cfg", "ctx"), (), "Trainer(cfg, ctx)"),
    "loss": Call(("config",), (), "loss(config) -> LossSpec"),
    "surrogate": Call(("config",), (), "surrogate(config) -> function"),
    "advantages": Call(("config",), (), "advantages(config) -> AdvantageSpec"),
    "collate": Call(("rows",), (), "collate(rows)"),
    "sampler": Call(("dataset",), ("seed",), "sampler(dataset, *, seed)"),
    "backend": Call(
        ("rollout",), ("weight_sync", "seed"), "Backend(rollout, *, weight_sync, seed)"
    ),
}


ALGORITHMS = ("loss", "surrogate", "advantages")  # kinds that megarl/algos/specs.py makes


@dataclass(frozen=True, kw_only=True)
class Named:
    """Names the code of one configuration key, with its options.

    kind: "reward", "transport", "options" of a free section, or a key of CALLS. row: what a reward
    gets by keyword, None where a workflow of the user's decides that. config: the section that a
    loss or an advantage is made of; all of the configuration for a transport."""

    key: str
    target: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    row: tuple[str, ...] | None = None
    config: Any = None


def code_problems(named: Sequence[Named]) -> list[str]:
    """Returns a line for each problem."""
    return [problem for code in named for problem in _problems(code)]


def _problems(code: Named) -> Iterator[str]:
    try:
        if code.kind == "reward":
            yield from _of_reward(code)
        elif code.kind == "transport":
            yield from _of_transport(code)
        elif code.kind in ALGORITHMS:
            yield from _of_algorithm(code)
        elif code.kind == "options":
            yield from _of_options(code)
        else:
            yield from _of_call(code, load_object(code.target, what=code.kind))
    except ValueError as e:
        yield str(e) if str(e).startswith(code.key) else f"{code.key}: {e}"
    except Exception as e:  # the user's code may raise anything
        yield f"{code.key}={code.target}: failed: {in_one_line(e)}"


def _of_reward(code: Named) -> Iterator[str]:
    fn, said = load_reward(code.target), f"{code.key}={code.target}: "
    if not callable(fn):
        yield f"{said}a {type(fn).__name__}, not a function; expected {REWARD}"
        return
    if inspect.isclass(fn) and not (is_asynchronous(fn) or issubclass(fn, WeightedReward)):
        yield f"{said}a class without async __call__, not a function; expected {REWARD}"
        return
    if code.row is None:
        return
    wrong = reward_problems(fn, code.options, key=f"{code.key}.options", row=code.row)
    yield from wrong
    if wrong:
        return
    made = get_reward_fn(code.target, code.options)
    if not (is_asynchronous(made) or _can_travel(fn)):
        yield (
            f"{said}cannot be sent to a worker process; write a function at the top level of a "
            "module"
        )
        return
    called, options = (made, ()) if inspect.isclass(fn) else (fn, code.options)
    given = (*reward_arguments(called, OWN_ARGUMENTS, dict.fromkeys(code.row)), *options)
    if problem := call_problem(called, (), given):
        shown = ", ".join(f"{name}=" for name in given)
        yield f"{said}{problem}; it is called as ({shown}); expected {REWARD}"


def _can_travel(fn: Any) -> bool:
    try:
        pickle.dumps(fn)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def _of_algorithm(code: Named) -> Iterator[str]:
    """Yields the problems of a loss or an advantage, and makes it, which raises ValueError for
    settings that it cannot do."""
    from megarl.algos import specs

    wrong = list(_of_call(code, specs.maker(code.kind, code.target)))
    yield from wrong
    if not wrong:
        getattr(specs, f"{code.kind}_of")(code.config)


def _of_options(code: Named) -> Iterator[str]:
    """Yields what a free section's target does not take of it, and makes the target of the rest,
    which raises ValueError for what does not go together."""
    target = load_object(code.target, what=code.key)
    wrong = list(option_problems(target, code.options, key=code.key))
    yield from wrong
    if not wrong:
        target(**code.options)


def _of_transport(code: Named) -> Iterator[str]:
    """Asks the class what is wrong with the job, too; `code.config` is all of it."""
    from megarl.weight_sync.transports import Transport

    found, key = transport_class(code.target), f"{code.key}={code.target}"
    if not issubclass(found, Transport):
        yield f"{key}: no subclass of megarl.weight_sync.transports.Transport; make it one"
        return
    takes, placed = (SyncOptions, 0) if built_in_transport(code.target) else (found, 1)
    yield from option_problems(takes, code.options, key="weight_sync.options", positional=placed)
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        yield f"{key}: has no method {', '.join(missing)}; write a subclass of Transport"
        return
    yield from transport_problems(code.config, found.requirements)
    yield from (f"{key}: {problem}" for problem in found.validate(code.config))


def _of_call(code: Named, fn: Any) -> Iterator[str]:
    call, said, key = CALLS[code.kind], f"{code.key}={code.target}: ", f"{code.key}.options"
    if not callable(fn):
        yield f"{said}a {type(fn).__name__}, neither a class nor a function; expected {call.shown}"
        return
    problems = list(
        option_problems(
            fn,
            code.options,
            key=key,
            positional=len(call.positional),
            by_name=call.by_name,
        )
    )
    yield from (f"{problem}; {code.target} is called as {call.shown}" for problem in problems)
    if not problems and (
        problem := call_problem(fn, call.positional, (*call.by_name, *code.options))
    ):
        yield f"{said}{problem}; expected {call.shown}"
        return
    if code.kind == "workflow" and inspect.isclass(fn):  # of another, only calling it would tell
        yield from (f"{said}{problem}" for problem in _of_episode(fn))
        if not problems and hasattr(fn, "check_options"):
            yield from (f"{key}: {problem}" for problem in fn.check_options(**code.options))
    if code.kind == "backend" and inspect.isclass(fn):
        from megarl.rollout.client import RemoteSGLangEngine

        if not issubclass(fn, RemoteSGLangEngine):
            yield f"{said}no subclass of megarl.RemoteSGLangEngine; make it one"
    if code.kind == "trainer" and not hasattr(fn, "fit"):
        yield f"{said}has no method fit; write a subclass of RLTrainer, PPOTrainer or SFTTrainer"


def _of_episode(workflow: type) -> Iterator[str]:
    episode = getattr(workflow, "arun_episode", None)
    if episode is None or getattr(episode, "__isabstractmethod__", False):
        yield f"has no method arun_episode; expected {EPISODE}"
    elif not inspect.iscoroutinefunction(episode):
        yield f"its method arun_episode is not async; expected {EPISODE}"
    elif problem := call_problem(episode, ("self", "engine", "data"), []):
        yield f"{problem}; expected {EPISODE}"
