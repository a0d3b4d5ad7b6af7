"""Tells a request that a client sends again from one that asks for another sample."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

KEPT = 64  # answered requests that a session can answer again


@dataclass(kw_only=True, eq=False)
class Attempt(Generic[T]):
    """Holds a request on its way, and its answers afterwards.

    asked: a digest of what it asks for. key: the client's name for it, "" for none. waiting: how
    many of the client's connections wait for it. taken: one of them got the answers.
    """

    answers: asyncio.Task[list[T]]
    asked: bytes
    key: str
    waiting: int = 0
    taken: bool = False

    @property
    def failed(self) -> bool:
        """Returns whether it ended without answers."""
        task = self.answers
        return task.done() and (task.cancelled() or task.exception() is not None)

    @contextmanager
    def awaited(self) -> Iterator[asyncio.Future[list[T]]]:
        """Yields what to await for the answers, and counts who waits."""
        self.waiting += 1
        try:
            yield asyncio.shield(self.answers)
        finally:
            self.waiting -= 1


class Attempts(Generic[T]):
    """Holds a session's requests: those on their way, and the latest that were answered. lost:
    answers that no client took."""

    def __init__(self) -> None:
        self._all: list[Attempt[T]] = []
        self.lost = 0

    def get(
        self, asked: bytes, key: str, *, again: bool, start: Callable[[], asyncio.Task[list[T]]]
    ) -> Attempt[T]:
        """Returns the attempt that a request repeats, else a new one, which `start` starts.

        A request repeats one with the same key. One without key repeats an equal one that nobody
        waits for any more and whose answers nobody took; and where the client says that it asks
        `again`, an equal one whose answers came, the latest, unless an equal one has failed: then
        it is that one's client who asks, and a new one takes its place."""
        equal = [a for a in self._all if (a.asked, a.key) == (asked, key)]
        failed = [a for a in equal if a.failed]
        same = [a for a in equal if not a.failed]
        if not key:
            left = [a for a in same if not a.waiting and not a.taken]
            same = left[:1] or [a for a in same if again and a.taken and not failed]
        if same:
            return same[-1]
        if failed and (key or again):
            self._all.remove(failed[0])
        attempt = Attempt(answers=start(), asked=asked, key=key)
        self._all.append(attempt)
        self._forget()
        return attempt

    def close(self) -> None:
        """Ends what is on its way, and counts what nobody took."""
        for attempt in self._all:
            self._count(attempt)
            attempt.answers.cancel()
        self._all.clear()

    def _forget(self) -> None:
        ended = [a for a in self._all if a.answers.done() and not a.waiting]
        for attempt in ended[: max(0, len(ended) - KEPT)]:
            self._count(attempt)
            self._all.remove(attempt)

    def _count(self, attempt: Attempt[T]) -> None:
        if not attempt.answers.done():
            self.lost += 1
        elif not attempt.taken and not attempt.failed:
            self.lost += len(attempt.answers.result())
