"""`arg`: a dataclass field that carries its one-line meaning, its choices or its bounds.

`--help`, the nearest-key hint and the checks of choices and numbers all read this metadata, so a
key is described in exactly one place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, field
from typing import Any

from megarl.config.bounds import Bounds


def arg(
    default: Any = MISSING,
    *,
    help: str,
    choices: Sequence[Any] | None = None,
    bounds: Bounds | None = None,
    factory: Callable[[], Any] | None = None,
) -> Any:
    """A keyword-only dataclass field with help text; `factory` for mutable or nested defaults."""
    meta = {"help": help, "choices": tuple(choices) if choices else None, "bounds": bounds}
    if factory is not None:
        return field(default_factory=factory, metadata=meta)
    return field(default=default, metadata=meta)
