"""An asyncio event loop in a thread of its own: where all rollouts of a process run."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Starts at construction; `close` cancels what is left, ends the loop and joins the thread."""

    def __init__(self, name: str = "megarl-rollout") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def inside(self) -> bool:
        """True when called from a coroutine or callback of this loop."""
        return threading.current_thread() is self._thread

    def submit(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(coro, self._loop)

    def run(self, coro: Coroutine[Any, Any, T], *, timeout: float) -> T:
        """Runs `coro` in the loop and blocks the calling (other) thread for at most `timeout` s."""
        assert not self.inside(), "LoopThread.run would wait for itself"
        future = self.submit(coro)
        try:
            return future.result(timeout)
        except TimeoutError:
            if future.done():  # its own, not ours
                raise
            future.cancel()
            what = getattr(coro, "__qualname__", "a coroutine")
            raise TimeoutError(f"{what} took longer than {timeout:.0f} s") from None

    async def here(self, coro: Coroutine[Any, Any, T]) -> T:
        """Awaits `coro`, run in this loop, from a coroutine of any loop."""
        if self.inside():
            return await coro
        return await asyncio.wrap_future(self.submit(coro))

    def call_soon(self, fn: Callable[..., object], *args: Any) -> None:
        self._loop.call_soon_threadsafe(fn, *args)

    def close(self, *, timeout: float = 30.0) -> None:
        if not self._thread.is_alive():
            return
        self.run(self._cancel_all(), timeout=timeout)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the rollout loop did not end within {timeout:.0f} s")
        self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
