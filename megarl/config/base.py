"""Defines `arg`, a dataclass field that carries its one-line meaning, its choices or its bounds,
and `SeamConfig`, a place where a user's own code can stand, with its options.

`--help`, the nearest-key hint and the checks of choices and numbers all read the fields' metadata,
so a key is described in exactly one place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any

from megarl.config.bounds import Bounds


def arg(
    default: Any = MISSING,
    *,
    help: str,
    choices: Sequence[Any] | None = None,
    or_path: bool = False,
    true: str | None = None,
    bounds: Bounds | None = None,
    factory: Callable[[], Any] | None = None,
) -> Any:
    """Returns a keyword-only dataclass field with help text.

    factory: makes the default where it is mutable or a section. or_path: allows an import path
    (package.module:name or file.py:name) beside the choices. true: the choice that the boolean
    stands for, of a key that was one before it had choices.
    """
    meta = {
        "help": help,
        "choices": tuple(choices) if choices else None,
        "or_path": or_path,
        "true": true,
        "bounds": bounds,
    }
    if factory is not None:
        return field(default_factory=factory, metadata=meta)
    return field(default=default, metadata=meta)


@dataclass(kw_only=True)
class SeamConfig:
    """Names a function or a class, and gives it options. In YAML and on the command line the plain
    text `key: pkg.module:name` is short for `key: {type: pkg.module:name}`.
    """

    type: str = arg("", help="pkg.module:name, file.py:name or a name of megarl's own")
    options: dict[str, Any] = arg(
        factory=dict, help="keyword arguments for it; checked against its signature at the start"
    )


def seam(type: str = "", *, help: str) -> Any:
    """Returns a dataclass field for a SeamConfig whose default type is `type`."""
    return arg(factory=lambda: SeamConfig(type=type), help=help)
