"""Tells pipeline stages the shapes of what they receive, which all of them can work out.

Packed micro-batches differ in length, so megatron-core sends a shape before every tensor, and stops
the device to read it. But all ranks of a pipeline cut the same rows into the same micro-batches, in
one order: the k-th tensor from a neighbour is that of a known micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

Shape = list[int]
_NONE: Shape = [0, 0, 0]


@dataclass
class _Coming:
    """Yields the shapes of tensors to come from the stage before, and from the stage after."""

    forward: Iterator[Shape]
    backward: Iterator[Shape]


_coming: list[_Coming] = []  # of the pass under way


def telling(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns megatron-core's `P2PCommunicator._communicate_shapes` (the original), which sends
    nothing where a pass has said what comes."""

    def shapes(self: Any, send_next: Any, send_prev: Any, recv_prev: bool, recv_next: bool) -> Any:
        if not _coming:
            return original(self, send_next, send_prev, recv_prev, recv_next)
        coming = _coming[-1]
        return (
            next(coming.forward) if recv_prev else _NONE,
            next(coming.backward) if recv_next else _NONE,
        )

    return shapes


@contextmanager
def known_shapes(forward: Iterable[Shape], backward: Iterable[Shape]) -> Iterator[None]:
    """Has a pass of megatron-core's schedules send no shapes inside. forward: those that come from
    the stage before, in order; backward: those from the stage after."""
    _coming.append(_Coming(iter(forward), iter(backward)))
    try:
        yield
    finally:
        _coming.pop()
