"""Calls functions of users from the rollout loop: agents, tools, environments; and closes what a
sample used.

Each call of a plain function has a thread of its own, so that one that hangs holds up no other, and
a time-out measures the call and no queue.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, Protocol

from megarl.observability.logging import get_logger

log = get_logger(__name__)

MOST_STUCK = 256  # threads that go on unseen before the run ends
CLOSE_TIMEOUT = 15.0  # seconds that an environment, an interaction or tools may take to close
PATIENCE = 60.0  # seconds after which one whose call was given up counts among them

Outcome = Future[tuple[Any, BaseException | None]]  # what a call returned, and what it raised

_given_up: dict[Outcome, float] = {}  # when, of those that go on


class CallTimeout(TimeoutError):
    """Says that a call took longer than it may."""


class ThreadsExhausted(RuntimeError):
    """Says that plain functions get no more threads. It ends the run: it tells nothing about an
    answer of the policy, nor about one row."""


async def call(fn: Callable[[], Any], *, timeout: float | None = None) -> Any:
    """Returns what `fn()` returns, awaited where that can be; a plain function runs in a thread.
    Nothing can end a thread: one whose call is cancelled or overruns `timeout` seconds goes on
    unseen. Raises CallTimeout, ThreadsExhausted and what `fn` raises; what is no Exception (an
    exit, a cancellation that the caller did not ask for, a test library's failure) as RuntimeError.
    """
    end = None if timeout is None else time.monotonic() + timeout
    try:
        result = fn() if inspect.iscoroutinefunction(fn) else await _in_thread(fn, timeout)
        return await _bounded(fn, result, timeout, end) if inspect.isawaitable(result) else result
    except (Exception, GeneratorExit):  # the latter ends this coroutine
        raise
    except BaseException as e:
        task = asyncio.current_task()
        if isinstance(e, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise RuntimeError(f"{_name(fn)} ended with {e!r}") from e


def stuck_threads() -> int:
    """Returns how many threads go on though nobody waits for them any more."""
    return len(_given_up)


def _start(fn: Callable[[], Any]) -> Outcome:
    """Starts a thread that calls `fn`."""
    outcome, context = Outcome(), contextvars.copy_context()
    outcome.set_running_or_notify_cancel()  # nothing can cancel it

    def run() -> None:
        try:
            outcome.set_result((context.run(fn), None))
        except BaseException as e:  # a future would not raise all of them as they are
            outcome.set_result((None, e))

    try:
        threading.Thread(target=run, daemon=True, name=f"megarl {_name(fn)}").start()
    except RuntimeError as e:
        raise ThreadsExhausted(
            f"{_name(fn)}: {e}; {threading.active_count()} threads run: lower "
            "rollout.max_concurrent_rollouts, or make it an async function"
        ) from e
    return outcome


async def _in_thread(fn: Callable[[], Any], timeout: float | None) -> Any:
    _check_stuck(fn)
    outcome = _start(fn)
    ended = asyncio.wrap_future(outcome)
    try:
        # one that ends in time has ended here, too, if this loop was late
        await asyncio.wait({ended}, timeout=timeout)
    finally:
        if not ended.done():
            _given_up[outcome] = time.monotonic()
            outcome.add_done_callback(lambda ended: _given_up.pop(ended, None))
            ended.cancel()
    if ended.cancelled():
        raise CallTimeout(f"{_name(fn)} took longer than {timeout:g} s")
    value, error = ended.result()
    if isinstance(error, GeneratorExit):
        raise RuntimeError(f"{_name(fn)} ended with {error!r}") from error
    if error is not None:
        raise error
    return value


async def _bounded(
    fn: Callable[[], Any], result: Any, timeout: float | None, end: float | None
) -> Any:
    """Awaits what `fn` gave until `end` (time.monotonic), of a call that may take `timeout`."""
    clock = asyncio.timeout(None if end is None else max(0.0, end - time.monotonic()))
    try:
        async with clock:
            return await result
    except TimeoutError as e:
        if clock.expired():
            raise CallTimeout(f"{_name(fn)} took longer than {timeout:g} s") from e
        raise


def _check_stuck(fn: Callable[[], Any]) -> None:
    late = sum(time.monotonic() - since > PATIENCE for since in list(_given_up.values()))
    if late >= MOST_STUCK:
        raise ThreadsExhausted(
            f"{late} threads of plain agents, tools or environments hang, each for more than "
            f"{PATIENCE:g} s after its call was given up; the next call is of {_name(fn)}: bound "
            "every wait in it, or make it an async function"
        )


def _name(fn: Callable[[], Any]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__qualname__", type(fn).__name__)


class Closable(Protocol):
    """Stands for what has to be closed."""

    async def aclose(self) -> None:
        """Releases everything."""


@asynccontextmanager
async def closing(things: Sequence[Closable]) -> AsyncIterator[None]:
    """Closes all `things` at the end, at the same time: on success, failure, cancellation and
    time-out. A close that fails or takes longer than CLOSE_TIMEOUT is a warning: what the sample
    did is not lost by it."""
    try:
        yield
    finally:
        # tasks of their own: a cancellation of this one must not cut the closing short
        tasks = [asyncio.ensure_future(_close(thing)) for thing in things]
        if tasks:
            done = asyncio.gather(*tasks)
            try:
                await asyncio.shield(done)
            except asyncio.CancelledError:
                await asyncio.wait(tasks)
                raise


async def _close(thing: Closable) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT):
            await thing.aclose()
    except Exception as e:
        log.warning("%s did not close: %s: %s", type(thing).__name__, type(e).__name__, e)
