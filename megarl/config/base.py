"""Defines what a key's annotation may say of its values: the range of a number, the choices; and
`SeamConfig`, a place where a user's own code can stand, with its options.

lr: Annotated[float, Bounds(gt=0, le=1)] = 1e-5
dtype: Annotated[str, Choices("auto", "bfloat16")] = "auto"
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from megarl.config.aliases import foreign_keys, is_key
from megarl.utils.importing import is_import_path

T = TypeVar("T")
LARGEST_FLOAT = 1e12  # no float key has a use for more
LARGEST_INT = (1 << 63) - 1  # torch and the servers count in 64 bits
DAY = 24 * 3600


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Gives the range of a number. Floats must be finite besides. `note` ends the message of a
    problem."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    note: str = ""

    def allow(self, value: float) -> bool:
        """Returns whether `value` is finite and lies within all limits that are set."""
        return (
            is_finite(value)
            and (self.gt is None or value > self.gt)
            and (self.ge is None or value >= self.ge)
            and (self.lt is None or value < self.lt)
            and (self.le is None or value <= self.le)
        )

    def __str__(self) -> str:
        """Returns the range in words: "> 0", "from 0 to 1", "> 0 and <= 1"."""
        if self.ge is not None and self.le is not None:
            return f"from {self.ge:.10g} to {self.le:.10g}"
        limits = ((">", self.gt), (">=", self.ge), ("<", self.lt), ("<=", self.le))
        return " and ".join(f"{sign} {x:.10g}" for sign, x in limits if x is not None)


class Choices:
    """Lists the values of a key. or_path: an import path (package.module:name or file.py:name) is
    a value, too. true: the choice that the boolean stands for, of a key that was one before it had
    choices."""

    def __init__(self, *values: Any, or_path: bool = False, true: str | None = None) -> None:
        self.values, self.or_path, self.true = values, or_path, true

    def allow(self, value: Any) -> bool:
        """Returns whether `value` is one of the choices, or an import path where those are."""
        is_path = self.or_path and isinstance(value, str) and is_import_path(value)
        return is_path or value in self.values

    def meant(self, truth: Any) -> Any:
        """Returns the choice that a boolean stands for, None where there is none: YAML 1.1 reads
        off, on, no, yes as booleans."""
        words = ("on", "yes", "true", self.true) if truth else ("off", "no", "false")
        alike = [word for word in words if word is not None and self.allow(word)]
        return alike[0] if alike and isinstance(truth, bool) else None


Options = dict[str, Any]  # of a free section


def free() -> Any:
    """Returns the default of a free section: a dict that is empty."""
    return field(default_factory=dict)


def section(cls: type[T], **keys: Any) -> T:
    """Returns the default of a section: a new `cls` with these keys for each configuration."""
    return field(default_factory=partial(cls, **keys))


@dataclass(frozen=True)
class OptionsOf:
    """Says what takes the entries of a free section as its keyword arguments: `target`, the
    pkg.module:name of a class or a function, by whose signature they are checked at the start."""

    target: str


class NoSuchKey(AttributeError):
    """A section without a key. The hint is only looked up if the error is shown: code asks for keys
    that a section may lack."""

    def __str__(self) -> str:
        section, name = self.args
        ours = foreign_keys().get(name, "")
        key = ours.removeprefix("*.").partition("=")[0]
        hint = f"; the key is {key}" if key and is_key(ours) else ""
        return f"{section} has no key {name!r}{hint}"


class AnswersForeignKeys:
    """Names our key in the AttributeError of a key that other systems' configurations have."""

    if not TYPE_CHECKING:  # a type checker would take every attribute for one that exists

        def __getattr__(self, name: str) -> Any:
            raise NoSuchKey(type(self).__name__, name)


POSITIVE = Bounds(gt=0)
NOT_NEGATIVE = Bounds(ge=0)
OFF_AT_ZERO = Bounds(ge=0, note="0 turns it off")
FRACTION = Bounds(ge=0, le=1)
FRACTION_ABOVE_ZERO = Bounds(gt=0, le=1)
TIMEOUT = Bounds(gt=0, le=30 * DAY, note="seconds, at most 30 days")
SEED = Bounds(ge=0, le=(1 << 32) - 1)
ANY_FLOAT = Bounds(ge=-LARGEST_FLOAT, le=LARGEST_FLOAT)
ANY_INT = Bounds(ge=-LARGEST_INT - 1, le=LARGEST_INT)


def is_finite(value: float) -> bool:
    """Returns whether `value` is a number; an int of any size is one."""
    return isinstance(value, int) or math.isfinite(value)  # which cannot take every int


@dataclass(kw_only=True)
class SeamConfig:
    """Names a function or a class, and gives it options. In YAML and on the command line the plain
    text `key: pkg.module:name` is short for `key: {type: pkg.module:name}`.
    """

    type: str = ""
    """pkg.module:name, file.py:name or a name of megarl's own"""
    options: Options = free()
    """keyword arguments for it; checked against its signature at the start"""
