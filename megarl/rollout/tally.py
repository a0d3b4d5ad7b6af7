"""Counts what happens in the rollouts of this process, until somebody takes the counts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

_lock = threading.Lock()
_counts: Counter[str] = Counter()


def add(counts: Mapping[str, int]) -> None:
    """Adds to the counts, by name."""
    with _lock:
        _counts.update(counts)


def take() -> dict[str, int]:
    """Returns the counts since the last call."""
    with _lock:
        taken = dict(_counts)
        _counts.clear()
    return taken
