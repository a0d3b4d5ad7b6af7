"""Bounds numbers: each bound is declared with its key, and one function checks all keys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megarl.config.schema import absent, all_keys, show

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
            _is_finite(value)
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


POSITIVE = Bounds(gt=0)
NOT_NEGATIVE = Bounds(ge=0)
OFF_AT_ZERO = Bounds(ge=0, note="0 turns it off")
FRACTION = Bounds(ge=0, le=1)
FRACTION_ABOVE_ZERO = Bounds(gt=0, le=1)
TIMEOUT = Bounds(gt=0, le=30 * DAY, note="seconds, at most 30 days")
SEED = Bounds(ge=0, le=(1 << 32) - 1)
_ANY_FLOAT = Bounds(ge=-LARGEST_FLOAT, le=LARGEST_FLOAT)
_ANY_INT = Bounds(ge=-LARGEST_INT - 1, le=LARGEST_INT)


def number_problems(cfg: Any, prefix: str = "") -> Iterator[str]:
    """Yields a line for each number of the dataclass `cfg` that is not finite, or outside the
    bounds of its key; `prefix` is the section that `cfg` is, with its dot."""
    for key in all_keys(type(cfg), parent=cfg):
        value = key.default  # the instance's own value
        if isinstance(value, bool) or not isinstance(value, int | float) or absent(cfg, key.name):
            continue
        largest = _ANY_INT if isinstance(value, int) else _ANY_FLOAT
        for bounds in (key.bounds, largest):
            if bounds is not None and not bounds.allow(value):
                yield _out_of(bounds, prefix + key.name, value, nullable=key.nullable)
                break


def _is_finite(value: float) -> bool:
    return isinstance(value, int) or math.isfinite(value)  # which cannot take every int


def _out_of(bounds: Bounds, name: str, value: float, *, nullable: bool) -> str:
    finite = "" if _is_finite(value) else "a finite number "
    null = ", or null" if nullable else ""
    note = f" ({bounds.note})" if bounds.note else ""
    return f"{name}={show(value)}: must be {finite}{bounds}{null}{note}"
