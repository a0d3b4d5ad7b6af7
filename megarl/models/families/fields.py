"""Reads numbers out of a config.json, and names the value where one is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def positive(raw: Mapping[str, Any], name: str, source: str, default: int | None = None) -> int:
    """Returns raw[name], or `default` if absent or null. Raises ValueError unless an int above
    0."""
    return _integer(raw, name, source, default, least=1)


def count(raw: Mapping[str, Any], name: str, source: str) -> int:
    """Returns raw[name], or 0 if absent or null. Raises ValueError unless it is an integer >= 0."""
    return _integer(raw, name, source, 0, least=0)


def _integer(
    raw: Mapping[str, Any], name: str, source: str, default: int | None, *, least: int
) -> int:
    value = raw.get(name)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"{source}: {name} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        expected = "a positive integer" if least else "an integer, 0 or more"
        raise ValueError(f"{source}: {name}={value!r}; expected {expected}")
    return value


def number(raw: Mapping[str, Any], name: str, source: str, default: float | None = None) -> float:
    """Returns raw[name] as a float, or `default` if absent or null. Raises ValueError unless it is
    a finite number, 0 or more."""
    value = raw.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{source}: {name}={value!r}; expected a number, 0 or more")
    return float(value)


def refuse_others(
    raw: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]], source: str
) -> None:
    """Raises ValueError for a key of `allowed` that `raw` gives another value than those listed. A
    null is as good as a listed value that is false, because transformers tests for truth."""
    for name, values in allowed.items():
        value = raw.get(name)
        as_false = value is None and (not values or not all(values))
        if name in raw and value not in values and not as_false:
            fix = (
                f"supported: {' or '.join(map(repr, values))}"
                if values
                else _FIXES.get(name, "leave it out")
            )
            raise ValueError(f"{source}: {name}={value!r} is not supported; {fix}")


_FIXES = {"quantization_config": "dequantise the checkpoint first"}
