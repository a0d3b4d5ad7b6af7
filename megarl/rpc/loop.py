"""Runs an event loop in a thread of its own: a server's, or that of all clients of a process."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

JOIN_TIMEOUT = 10.0


class Loop:
    """Starts the loop and its thread, which ends with the process if not before."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coro: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts `coro` in the loop, behind all that was submitted before."""
        return asyncio.run_coroutine_threadsafe(coro, self._loop)

    def close(self) -> None:
        """Ends the loop and joins its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_TIMEOUT)
        if not self._thread.is_alive():
            self._loop.close()


def client_loop() -> Loop:
    """Returns the loop that the clients of this process share, whichever thread asks first."""
    with _asking:
        return _shared()


@functools.cache
def _shared() -> Loop:
    return Loop("megarl-rpc-clients")


_asking = threading.Lock()
