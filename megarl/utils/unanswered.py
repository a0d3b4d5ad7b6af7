"""Marks methods that a controller need not wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def unanswered(method: F) -> F:
    """Marks a method that returns nothing, takes no batch, and does only what later calls to the
    same workers can notice. A controller sends it with the next of them, whose caller gets its
    error."""
    vars(method)["unanswered"] = True
    return method


def is_unanswered(method: Any) -> bool:
    """Returns whether a method bears the mark."""
    return getattr(method, "unanswered", False) is True
