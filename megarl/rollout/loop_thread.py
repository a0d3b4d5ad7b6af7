"""Runs an asyncio event loop in a thread of its own, where all rollouts of a process run.

A second thread watches it: one workflow that blocks in a coroutine holds up every episode, and the
warning shows the line it is at. Episodes are bounded by a clock that stands still while generation
is paused.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import inspect
import math
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from megarl.observability.logging import get_logger
from megarl.utils import stopping
from megarl.utils.http import in_thread

log = get_logger(__name__)
T = TypeVar("T")


BEAT = 1.0  # seconds between two signs of life
LOOK = 0.05  # seconds between two looks at how late the loop is
BLOCKED_AFTER = 10.0  # seconds without one before the loop counts as blocked
CLOSE_TIMEOUT = 30.0


class _Loop(asyncio.SelectorEventLoop):
    """Looks names up in threads of its own: those of asyncio.to_thread are the users'."""

    async def getaddrinfo(self, *args: Any, **kw: Any) -> Any:
        return await asyncio.wrap_future(in_thread(socket.getaddrinfo, *args, **kw))


class LoopThread:
    """Starts the loop at construction; `close` cancels what is left, ends the loop and joins the
    threads."""

    def __init__(self, name: str = "megarl-rollout") -> None:
        self._loop = _Loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._last_beat, self._closed = time.monotonic(), threading.Event()
        self._lag = 0.0  # the longest since somebody asked, in seconds
        self.call_soon(self._beat)
        self._watcher = threading.Thread(target=self._watch, name=f"{name}-watch", daemon=True)
        self._watcher.start()

    @property
    def alive(self) -> bool:
        """Returns whether the loop's thread runs."""
        return self._thread.is_alive()

    def inside(self) -> bool:
        """Returns True when called from a coroutine or callback of this loop."""
        return threading.current_thread() is self._thread

    def submit(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts `coro` in the loop and returns its future at once."""
        return asyncio.run_coroutine_threadsafe(coro, self._loop)

    def run(self, coro: Coroutine[Any, Any, T], *, timeout: float, stoppable: bool = False) -> T:
        """Runs `coro` in the loop and blocks the calling (other) thread for at most `timeout` s,
        then raises TimeoutError; with `stoppable`, a signal that asks the run to end cancels it
        (StopRequested)."""
        assert not self.inside(), "LoopThread.run would wait for itself"
        future = self.submit(coro)
        deadline = time.monotonic() + timeout
        while stoppable and time.monotonic() + BEAT < deadline:
            if concurrent.futures.wait([future], BEAT).done:
                break
            if stopping.wish():
                future.cancel()
                raise stopping.StopRequested
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            if future.done():  # its own, not ours
                raise
            future.cancel()
            what = getattr(coro, "__qualname__", "a coroutine")
            message = f"{what} took longer than {timeout:.0f} s"
            raise TimeoutError("; ".join(filter(None, [message, self.blocked()]))) from None

    async def here(self, coro: Coroutine[Any, Any, T]) -> T:
        """Awaits `coro`, run in this loop, from a coroutine of any loop."""
        if self.inside():
            return await coro
        return await asyncio.wrap_future(self.submit(coro))

    def call_soon(self, fn: Callable[..., object], *args: Any) -> None:
        """Has the loop call `fn(*args)`; may be called from any thread."""
        self._loop.call_soon_threadsafe(fn, *args)

    def blocked(self) -> str:
        """Says what holds the loop up if it has not turned for BLOCKED_AFTER s; else empty."""
        silent = time.monotonic() - self._last_beat
        frame = sys._current_frames().get(self._thread.ident or 0)
        if silent < BLOCKED_AFTER or frame is None:
            return ""
        return (
            f"the rollout loop has not turned for {silent:.0f} s, so every episode stands still: "
            "asynchronous code blocks it (time.sleep, requests, heavy computation in a workflow? "
            f"use asyncio.sleep, asyncio.to_thread) here:\n"
            + "".join(traceback.format_stack(frame)[-3:]).rstrip()
        )

    def close(self, *, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancels all tasks, awaits `last` and ends the loop. A blocked loop is left to end with
        the process. May be called twice. Raises TimeoutError where the loop does not end."""
        self._closed.set()
        self._watcher.join()
        if not self.alive:
            return
        if why := self.blocked():
            log.warning("the rollout thread cannot be ended: %s", why)
            return
        self.run(self._wind_up(last), timeout=2 * CLOSE_TIMEOUT)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT)
        if self.alive:
            raise TimeoutError(f"the rollout loop did not end within {CLOSE_TIMEOUT:.0f} s")
        self._loop.close()

    async def _wind_up(self, last: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        ended = asyncio.gather(*tasks, return_exceptions=True)
        _, stubborn = await asyncio.wait([ended], timeout=CLOSE_TIMEOUT)
        if stubborn:
            names = ", ".join(str(t.get_coro()) for t in tasks if not t.done())
            log.warning("these ignored their cancellation: %s", names)
        if last is not None:
            await last()

    def take_lag(self) -> float:
        """Returns how late the loop has been at most since the last call, in seconds: what comes
        in waits as long."""
        lag, self._lag = self._lag, 0.0
        return lag

    def _beat(self, due: float = math.inf) -> None:
        self._last_beat = now = time.monotonic()
        self._lag = max(self._lag, now - due)
        self._loop.call_later(LOOK, self._beat, now + LOOK)

    def _watch(self) -> None:
        warned = False
        while not self._closed.wait(BEAT):
            why = self.blocked()
            if why and not warned:
                log.warning("%s", why)
            warned = bool(why)


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


# -- calls of users' functions: agents, tools, environments. Each call of a plain function has a
# thread of its own, so that one that hangs holds up no other, and a time-out measures the call and
# no queue.

MOST_STUCK = 256  # threads that go on unseen before the run ends
RELEASE_TIMEOUT = 15.0  # seconds that an environment, an interaction or tools may take to close
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
    context = contextvars.copy_context()

    def run() -> tuple[Any, BaseException | None]:
        try:
            return context.run(fn), None
        except BaseException as e:  # a future would not raise all of them as they are
            return None, e

    run.__name__ = f"megarl {_name(fn)}"  # the thread's
    try:
        return in_thread(run)
    except RuntimeError as e:
        raise ThreadsExhausted(
            f"{_name(fn)}: {e}; {threading.active_count()} threads run: lower "
            "rollout.max_concurrent_rollouts, or make it an async function"
        ) from e


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
    time-out. A close that fails or takes longer than RELEASE_TIMEOUT is a warning: what the sample
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
        async with asyncio.timeout(RELEASE_TIMEOUT):
            await thing.aclose()
    except Exception as e:
        log.warning("%s did not close: %s: %s", type(thing).__name__, type(e).__name__, e)


async def all_of(coros: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Returns the results of all coroutines; the first error cancels the rest, and is raised once
    they have ended, so that what they use is closed."""
    tasks = [asyncio.ensure_future(c) for c in coros]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


# -- counts of what happens in the rollouts of this process, until somebody takes them

_lock = threading.Lock()
_counts: Counter[str] = Counter()


def add_counts(counts: Mapping[str, int]) -> None:
    """Adds to the counts, by name."""
    with _lock:
        _counts.update(counts)


def take_counts() -> dict[str, int]:
    """Returns the counts since the last call."""
    with _lock:
        taken = dict(_counts)
        _counts.clear()
    return taken
