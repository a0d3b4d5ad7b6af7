"""Bounds episodes by a clock that stands still while generation is paused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PauseClock:
    """Stands still from `hold` to `release`. All its methods run in one event loop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Timeout] = set()
        self._left: dict[asyncio.Timeout, float] = {}  # seconds, of those that stand still
        self._held = False

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[asyncio.Timeout]:
        """Is asyncio.timeout, but for pauses: raises TimeoutError where what is inside takes longer
        than `seconds` without them."""
        async with asyncio.timeout(seconds) as bound:
            self._running.add(bound)
            if self._held:
                self._stop(bound)
            try:
                yield bound
            finally:
                self._running.discard(bound)
                self._left.pop(bound, None)

    def hold(self) -> None:
        """Has the clock stand still."""
        if not self._held:
            self._held = True
            for bound in self._running:
                self._stop(bound)

    def release(self) -> None:
        """Has the clock go on."""
        self._held, now = False, asyncio.get_running_loop().time()
        for bound, left in self._left.items():
            bound.reschedule(now + left)
        self._left.clear()

    def _stop(self, bound: asyncio.Timeout) -> None:
        due, now = bound.when(), asyncio.get_running_loop().time()
        if due is not None and due > now:  # else it has run out
            self._left[bound] = due - now
            bound.reschedule(None)
