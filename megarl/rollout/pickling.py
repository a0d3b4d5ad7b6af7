"""Pickles workflows for the processes of `rollout.workers`, and shares out what they use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
