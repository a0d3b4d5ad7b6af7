"""Has calls of a worker run on its main thread, as CUDA, torch.distributed and signals want it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

from megarl.rpc.errors import RpcError

Job = tuple[Future[Any], Callable[[], Any]]


class MainThread:
    """Queues calls from the server's loop for the thread that is in `run`."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self.ending = self._over = False

    async def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Returns fn(*args), called behind all that was asked for before. Raises what it raises,
        RpcError where the worker ends first."""
        future: Future[Any] = Future()
        self._queue.put((future, lambda: fn(*args)))
        if self._over:
            self._drain()
        return await asyncio.wrap_future(future)

    def run(self) -> None:
        """Makes the calls, one after another, until `end`."""
        while not self.ending:
            self._make(self._queue.get())
        self._over = True
        self._drain()

    def end(self) -> None:
        """Has `run` return when the call that runs is done. A signal handler may call it."""
        self.ending = True
        self._queue.put(None)

    @staticmethod
    def _make(job: Job | None) -> None:
        if job is None or not job[0].set_running_or_notify_cancel():
            return
        future, call = job
        try:
            future.set_result(call())
        except StopIteration as e:  # asyncio gives it to nobody who waits
            told = RuntimeError("the call raised StopIteration")
            told.__cause__ = e
            future.set_exception(told)
        except BaseException as e:  # a SystemExit of a call is its caller's to see
            future.set_exception(e)

    def _drain(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                job = self._queue.get_nowait()
                if job is not None and job[0].set_running_or_notify_cancel():
                    job[0].set_exception(RpcError("the worker is ending"))


MAIN_THREAD = MainThread()
