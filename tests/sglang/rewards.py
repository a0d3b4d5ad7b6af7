"""A reward that random answers get now and then."""

from __future__ import annotations

from typing import Any


def many_digits(prompt: str, completion: str, *args: Any, **kw: Any) -> float:
    """The part of the answer that is digits."""
    return sum(c.isdigit() for c in completion) / max(1, len(completion))
