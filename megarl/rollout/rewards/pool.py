"""RewardPool runs rewards in worker processes, each with a bound on its time; asynchronous ones it
awaits where it is called.

A reward is other people's code: it may be slow, hang in C, start processes, or kill its own. Every
worker is driven by one thread, which kills and replaces it, and all it started, when its reward
overruns; when the trainer ends, however it ends, so do they.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import pickle
import queue
import signal
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from megarl.observability.logging import get_logger
from megarl.rollout.pickling import share
from megarl.rollout.rewards.bounded import end_process_when_late, late
from megarl.rollout.rewards.errors import (
    RewardError,
    RewardTimeout,
    RewardUnavailable,
    WorkerLost,
    titled,
)
from megarl.rollout.rewards.parts import MixedReward, finite, is_asynchronous
from megarl.rollout.rewards.remote import RemoteWorker
from megarl.utils.child import end_with_parent, signal_group
from megarl.utils.stacks import dump_on_signal

log = get_logger(__name__)

# a worker's interpreter start and the import of the reward's module are not the reward's time
START_TIMEOUT = 120.0
# a reward goes from a worker that cannot be reached to others for so many seconds, and to three at
# least, with a pause before each
LOST_PATIENCE, LOST_TRIES, LOST_PAUSE = 60.0, 3, 0.2
KILL_TIMEOUT = 10.0  # for the kernel to end a killed worker
MOST_KILLED = 3  # workers that one reward may cost: a kill says nothing of the reward, more do
_IMPORTABLE = "a reward must be a function at the top level of a module that workers can import"
# how a worker ended, by what it had said last
_END = {
    "begun": " ended its worker process",
    "": ": the worker process ended before it began (the import of its module may have ended it; "
    "and a script that makes a RewardPool needs `if __name__ == '__main__'`: workers import it)",
}


def _serve(pipe: Connection) -> None:
    """Runs a worker: answers ("begun", None) once the job is unpickled, then ("ok" | "error" |
    "unavailable", value)."""
    end_with_parent()
    dump_on_signal()
    end_process_when_late()
    while True:
        try:
            payload = pipe.recv_bytes()
        except EOFError:  # the trainer is gone
            return
        try:
            fn, args, kw = pickle.loads(payload)
            pipe.send(("begun", None))
            answer: tuple[str, Any] = ("ok", finite(fn(*args, **kw)))
        except Exception as e:
            answer = ("unavailable" if isinstance(e, RewardUnavailable) else "error", _described(e))
        pipe.send(answer)


def _described(error: Exception) -> str:
    """Returns an error with its stack, while it is handled."""
    return f"{type(error).__name__}: {error}\n{traceback.format_exc()}"


def _late(what: str, timeout: float) -> str:
    return f"{what} took longer than rollout.reward_timeout={timeout:g} s"


class _Worker:
    """Drives one process by its pipe, started on first use. `end` may come from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = False
        self._process: Any = None
        self._pipe: Connection | None = None

    def start(self) -> Connection:
        with self._lock:
            if self._ended:
                raise RewardError("the reward pool is closed")
            if self._pipe is None:
                context = mp.get_context("spawn")  # fork would copy threads and CUDA state
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve, args=(theirs,), name="megarl-reward", daemon=True
                )
                process.start()
                theirs.close()
                self._pipe, self._process = ours, process
            return self._pipe

    def run(self, reward: bytes, what: str, timeout: float, killed: int = 0) -> float:
        """Returns the value of a pickled reward, called in the process. Raises RewardError naming
        the row, RewardTimeout where the call took longer than `timeout` s. killed: processes that
        it has cost so far."""
        kind, value, waited = "", None, self._pipe is not None
        try:
            pipe = self.start()
            pipe.send_bytes(reward)
            if not pipe.poll(START_TIMEOUT):
                raise RewardTimeout(
                    f"{what}: its worker did not import it within {START_TIMEOUT:g} s"
                )
            kind, value = pipe.recv()
            if kind == "begun":
                if not pipe.poll(timeout):
                    raise RewardTimeout(_late(what, timeout))
                kind, value = pipe.recv()
        except RewardTimeout:
            self.discard()
            raise
        except (EOFError, OSError) as e:
            end = self._exit_code()
            self.discard()
            if kind == "begun" and end == -signal.SIGXCPU:  # as bounded.py has it
                return late()
            killed += end == -signal.SIGKILL
            if (waited and not kind) or 0 < killed < MOST_KILLED:  # for want of memory, perhaps
                if not self._ended:
                    log.warning("a reward worker was killed: %s goes to a new one", what)
                return self.run(reward, what, timeout, killed)
            raise (RewardUnavailable if killed else RewardError)(what + _END[kind]) from e
        if kind in ("error", "unavailable"):
            raise (RewardError if kind == "error" else RewardUnavailable)(f"{what} raised {value}")
        return value

    def _exit_code(self) -> int | None:
        """Returns the exit code of the process, which has closed its pipe; None where the pool
        itself has ended it."""
        with self._lock:
            if self._process is None or self._ended:
                return None
            self._process.join(KILL_TIMEOUT)
            return self._process.exitcode

    def discard(self) -> None:
        """Kills the process and forgets it; the next job starts another."""
        with self._lock:
            if self._process is not None:
                self._kill()
                self._process.join(KILL_TIMEOUT)
            if self._pipe is not None:
                self._pipe.close()
            self._process = self._pipe = None

    def end(self) -> None:
        """Kills the process for good: a driver waiting on the pipe sees its end."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._kill()

    def _kill(self) -> None:
        signal_group(self._process.pid, signal.SIGKILL)
        self._process.kill()  # it may not lead its group yet


class RewardPool:
    """Runs rewards in `workers` processes, each reward for at most `timeout` seconds. An
    asynchronous reward is awaited in the caller's event loop for as long at most; one with an
    attribute `bounds_itself` for as long as it takes. Close the pool, or use it in `with`. Raises
    ValueError for no worker or no time.

    addresses: host:port of reward workers on other machines (megarl.launcher.rewards); then each
    computes `workers` rewards at once, and no process is started here.
    on_error: rollout.on_reward_error, which workflows go by.
    """

    def __init__(
        self,
        workers: int,
        *,
        timeout: float,
        addresses: Sequence[str] = (),
        on_error: str = "raise",
    ) -> None:
        if workers < 1:
            raise ValueError(f"rollout.reward_workers={workers}: use at least 1")
        if timeout <= 0:
            raise ValueError(f"rollout.reward_timeout={timeout}: use a positive number of seconds")
        self.workers, self.timeout, self.on_error = workers, timeout, on_error
        self._addresses = tuple(addresses)
        self._name = uuid.uuid4().hex  # the same in all copies
        self._workers: list[_Worker | RemoteWorker] = [
            RemoteWorker(address) for _ in range(workers) for address in addresses
        ] or [_Worker() for _ in range(workers)]
        self._idle: queue.SimpleQueue[_Worker | RemoteWorker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(len(self._workers), thread_name_prefix="megarl-reward")

    def __reduce__(self) -> tuple[Any, ...]:
        """Has every process that loads copies of the pool make one, with its share of workers."""
        made_of = share(self.workers), self.timeout, self._addresses, self.on_error
        return _copy, (self._name, *made_of)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def score(
        self,
        fn: Callable[..., float],
        args: tuple[Any, ...],
        kw: dict[str, Any],
        *,
        row_id: object = "?",
    ) -> float:
        """Returns fn(*args, **kw), called in a worker, or awaited here. Raises RewardError naming
        `row_id`, RewardTimeout where the call took too long."""
        if isinstance(fn, MixedReward):
            return await fn.score(partial(self.score, row_id=row_id), args, kw)
        if is_asynchronous(fn):
            return await self._awaited(fn, args, kw, row_id)
        what = titled(fn, row_id)
        return await asyncio.wrap_future(self._threads.submit(self._score, fn, args, kw, what))

    def submit(self, reward: bytes, what: str) -> Future[float]:
        """Returns the Future of a pickled (fn, args, kw), which a worker calls. what: its name in
        messages."""
        return self._threads.submit(self._run, reward, what)

    async def _awaited(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kw: dict[str, Any],
        row_id: object,
    ) -> float:
        what = titled(fn, row_id)
        limit = None if getattr(fn, "bounds_itself", False) else self.timeout
        clock = asyncio.timeout(limit)
        try:
            async with clock:
                return finite(await fn(*args, **kw))
        except RewardError as e:
            raise type(e)(f"{what}: {e}") from e
        except Exception as e:
            if clock.expired() and isinstance(e, TimeoutError):
                raise RewardTimeout(_late(what, self.timeout)) from e
            raise RewardError(f"{what} raised {_described(e)}") from e

    def close(self) -> None:
        """Kills the workers, also busy ones, and joins the threads. May be called twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.end()
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.discard()

    def _score(
        self, fn: Callable[..., float], args: tuple[Any, ...], kw: dict[str, Any], what: str
    ) -> float:
        try:
            reward = pickle.dumps((fn, args, kw))
        except (pickle.PicklingError, AttributeError, TypeError) as e:
            raise RewardError(
                f"{what} cannot be sent to a worker process ({e}); {_IMPORTABLE}"
            ) from e
        if self._addresses and getattr(getattr(fn, "func", fn), "__module__", "") == "__main__":
            raise RewardError(f"{what} is of the script itself, for a reward worker; {_IMPORTABLE}")
        return self._run(reward, what)

    def _run(self, reward: bytes, what: str) -> float:
        until, tries = time.monotonic() + LOST_PATIENCE, 0
        while True:
            worker, tries = self._idle.get(), tries + 1
            try:
                return worker.run(reward, what, self.timeout)
            except WorkerLost as e:  # a launcher starts it again; others are there meanwhile
                if tries >= LOST_TRIES and time.monotonic() > until:
                    raise
                if tries == 1:
                    log.warning("%s; another worker is asked", e)
            finally:
                self._idle.put(worker)
            time.sleep(LOST_PAUSE)


_copies: dict[str, RewardPool] = {}  # those that were loaded in this process, by name


def _copy(
    name: str, workers: int, timeout: float, addresses: tuple[str, ...], on_error: str
) -> RewardPool:
    if name not in _copies:
        _copies[name] = RewardPool(workers, timeout=timeout, addresses=addresses, on_error=on_error)
        _copies[name]._name = name
    return _copies[name]


def close_copies() -> None:
    """Closes the pools that were loaded in this process."""
    while _copies:
        _copies.popitem()[1].close()
