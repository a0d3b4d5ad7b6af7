"""Holds how long a process waits for the others in one collective operation: it is known before
torch is imported, and needed wherever a process group is made."""

from __future__ import annotations

_seconds = 1800.0


def collective_timeout() -> float:
    """Returns the seconds that a collective may wait for its peers."""
    return _seconds


def set_collective_timeout(seconds: float) -> None:
    """Bounds the collectives of groups that are made from now on, those of torch.distributed's
    world with them."""
    global _seconds
    _seconds = seconds
