"""Pickles workflows for the processes of `rollout.workers`, and shares out what they use."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import cloudpickle

if TYPE_CHECKING:  # reward workers, which need no torch, import this module, too
    from megarl.api.inference import RolloutWorkflow

_processes: ContextVar[int] = ContextVar("processes", default=1)
_DEPTH = 4  # of attributes inside attributes that an error looks into


def share(count: int) -> int:
    """Returns how many of `count`, a bound such as on processes or requests, the copy that is being
    pickled may use, so that all copies together keep it as far as each has one."""
    return -(-count // _processes.get())


def pickled_workflow(workflow: RolloutWorkflow, processes: int) -> bytes:
    """Returns a workflow as bytes, of which `processes` processes load a copy. Raises TypeError
    naming what of it cannot be pickled."""
    token = _processes.set(processes)
    try:
        return _dumps(workflow)
    except Exception as e:
        name = type(workflow).__name__
        raise TypeError(
            f"rollout.workers={processes}: {name} cannot be sent to other processes, for "
            f"{_culprit(workflow, name)} cannot be pickled ({type(e).__name__}: {e}); make it when "
            "an episode first needs it, or use rollout.workers=0"
        ) from e
    finally:
        _processes.reset(token)


def _dumps(value: Any) -> bytes:
    pickled: bytes = cloudpickle.dumps(value, protocol=5)
    return pickled


def _culprit(value: Any, name: str, depth: int = _DEPTH) -> str:
    """Returns the innermost part of a value that cannot be pickled, by its path and type."""
    for part_name, part in _parts(value) if depth else ():
        try:
            _dumps(part)
        except Exception:
            return _culprit(part, name + part_name, depth - 1)
    return f"{name}, a {type(value).__name__},"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    else:
        yield from ((f".{key}", part) for key, part in getattr(value, "__dict__", {}).items())


class Workflows:
    """Numbers the workflows of episodes, and keeps what they are pickled as while they live.

    processes: that get a copy of each. gone: called in the event loop with the number of a workflow
    that nobody has any more.
    """

    def __init__(self, processes: int, gone: Callable[[int], None]) -> None:
        self._processes, self._tell = processes, gone
        self._numbers: dict[int, int] = {}  # by id
        self._next = 0
        self.pickled: dict[int, bytes] = {}

    def number(self, workflow: RolloutWorkflow) -> int:
        """Returns the number of a workflow. Raises TypeError for one that cannot be pickled."""
        key = id(workflow)
        if (known := self._numbers.get(key)) is not None:
            return known
        self._next += 1
        number = self._next
        self.pickled[number] = pickled_workflow(workflow, self._processes)
        self._numbers[key] = number
        loop = asyncio.get_running_loop()
        weakref.finalize(workflow, self._gone, loop, key, number).atexit = False
        return number

    def _gone(self, loop: asyncio.AbstractEventLoop, key: int, number: int) -> None:
        self._numbers.pop(key, None)
        self.pickled.pop(number, None)
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._tell, number)
