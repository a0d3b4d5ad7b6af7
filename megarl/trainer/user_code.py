"""Checks that the code a configuration names can be had and takes what it will be given.

Importing it may import torch, or do anything: run.py does so where it is about to import torch
itself, the launcher in a process of its own.
"""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.rollout.rewards import get_reward_fn
from megarl.utils.importing import load_object

REWARD_ARGUMENTS = ("prompt", "completion", "prompt_ids", "completion_ids")
REWARD = f"reward({', '.join(REWARD_ARGUMENTS)}, **row)"
WORKFLOW = "Workflow(reward_fn, gconfig, tokenizer, *, reward_pool)"
EPISODE = "async def arun_episode(self, engine, data)"


@dataclass(frozen=True, kw_only=True)
class Named:
    """Code that a key names. `row`: what a reward gets by keyword, None where a workflow of the
    user's decides that.
    """

    key: str
    target: str
    kind: str  # "reward" or "workflow"
    row: tuple[str, ...] | None = None


def code_problems(named: Sequence[Named], path: Sequence[str] = ()) -> list[str]:
    """One line for each that cannot be used; `path` goes in front of the import path."""
    sys.path[:0] = path
    found = (_problem(code) for code in named)
    return [problem for problem in found if problem is not None]


def _problem(code: Named) -> str | None:
    try:
        if code.kind == "reward":
            problem = _of_reward(get_reward_fn(code.target), code.row)
        else:
            problem = _of_workflow(load_object(code.target, what="workflow"))
    except ValueError as e:
        return f"{code.key}: {e}"
    return problem and f"{code.key}={code.target}: {problem}"


def _of_reward(fn: Any, row: Sequence[str] | None) -> str | None:
    if not callable(fn) or inspect.isclass(fn):
        return f"a {type(fn).__name__}, not a function; expected {REWARD}"
    if row is None:
        return None
    if inspect.iscoroutinefunction(fn):
        return f"an async function, and rewards are called in worker processes; expected {REWARD}"
    try:
        pickle.dumps(fn)
    except (pickle.PicklingError, AttributeError, TypeError):
        return "cannot be sent to a worker process; write a function at the top level of a module"
    given = f"({', '.join((*REWARD_ARGUMENTS, *(f'{k}=' for k in row)))})"
    return _mismatch(fn, REWARD_ARGUMENTS, row, f"it is called as {given}; expected {REWARD}")


def _of_workflow(make: Any) -> str | None:
    if not callable(make):
        return f"a {type(make).__name__}, not a class; expected {WORKFLOW}"
    arguments = ("reward_fn", "gconfig", "tokenizer")
    if (problem := _mismatch(make, arguments, ["reward_pool"], f"expected {WORKFLOW}")) is not None:
        return problem
    if not inspect.isclass(make):
        return None  # a function that makes one: only calling it would tell
    episode = getattr(make, "arun_episode", None)
    if episode is None or getattr(episode, "__isabstractmethod__", False):
        return f"has no method arun_episode; expected {EPISODE}"
    if not inspect.iscoroutinefunction(episode):
        return f"its method arun_episode is not async; expected {EPISODE}"
    return _mismatch(episode, ("self", "engine", "data"), [], f"expected {EPISODE}")


def _mismatch(
    fn: Callable[..., Any], positional: Sequence[str], by_name: Sequence[str], expected: str
) -> str | None:
    """Why `fn` cannot be called so, None where it can."""
    try:
        signature = inspect.signature(fn)
    except (ValueError, TypeError):  # one that is not written in Python
        return None
    try:
        signature.bind(*positional, **dict.fromkeys(by_name))
    except TypeError as e:
        name = getattr(fn, "__name__", type(fn).__name__)
        return f"{name}{signature}: {e}; {expected}"
    return None
