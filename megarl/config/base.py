"""`arg`: a dataclass field that carries its one-line meaning and, where they are few, its choices.

`--help`, the nearest-key hint and the choice check all read this metadata, so a key is described in
exactly one place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, field
from typing import Any

MAX_TIMEOUT = 30 * 24 * 3600  # seconds of any wait; clocks and sockets take no infinite ones


def arg(
    default: Any = MISSING,
    *,
    help: str,
    choices: Sequence[Any] | None = None,
    factory: Callable[[], Any] | None = None,
) -> Any:
    """A keyword-only dataclass field with help text; `factory` for mutable or nested defaults."""
    meta = {"help": help, "choices": tuple(choices) if choices else None}
    if factory is not None:
        return field(default_factory=factory, metadata=meta)
    return field(default=default, metadata=meta)
