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
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

from megarl.observability.logging import get_logger
from megarl.rollout.rewards.results import (
    RewardError,
    RewardFn,
    RewardTimeout,
    RewardUnavailable,
    WeightedReward,
    WorkerLost,
    end_process_when_late,
    finite,
    is_asynchronous,
    late,
)
from megarl.utils.child import end_with_parent, signal_group
from megarl.utils.stacks import dump_on_signal
from megarl.utils.user_errors import RemoteTrace, text_of

if TYPE_CHECKING:
    from megarl.rollout.rewards.node import RewardNode

log = get_logger(__name__)

# a worker's interpreter start and the import of the reward's module are not the reward's time
START_TIMEOUT = 120.0
# a reward goes from a node that cannot be reached to others for so many seconds, after a pause each
LOST_PATIENCE, LOST_PAUSE = 60.0, 0.2
KILL_TIMEOUT = 10.0  # for the kernel to end a killed worker
MOST_KILLED = 3  # workers that one reward may cost: a kill says nothing of the reward, more do
_IMPORTABLE = "a reward must be a function at the top level of a module that workers can import"
_NEVER_BEGAN = (
    ": the worker process ended before it began (the import of its module may have ended it; and a "
    "script that makes a RewardPool needs `if __name__ == '__main__'`: workers import it)"
)


copies: ContextVar[int] = ContextVar("copies", default=1)  # of what is being pickled


def share(count: int) -> int:
    """Returns how many of `count`, a bound such as on processes or requests, the copy that is being
    pickled may use, so that all copies together keep it as far as each has one."""
    return -(-count // copies.get())


def _serve(pipe: Connection) -> None:
    """Runs a process: answers ("begun", None) once the reward is unpickled, then ("ok" | "error" |
    "unavailable", value)."""
    end_with_parent()
    dump_on_signal()
    end_process_when_late()
    while True:
        try:
            reward = pipe.recv_bytes()
        except EOFError:  # the trainer is gone
            return
        try:
            fn, args, kw = pickle.loads(reward)
            pipe.send(("begun", None))
            answer: tuple[str, Any] = ("ok", finite(fn(*args, **kw)))
        except Exception as e:
            kind = "unavailable" if isinstance(e, RewardUnavailable) else "error"
            answer = (kind, (f"{type(e).__name__}: {text_of(e)}", RemoteTrace.of(e)))
        pipe.send(answer)


def _bound(timeout: float) -> str:
    return f"rollout.reward_timeout={timeout:g} s"


class RewardProcess:
    """Computes one reward at a time in a process, which the first one starts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = False
        self._process: Any = None
        self._pipe: Connection | None = None
        self._kill: Callable[[], Any] = lambda: None

    def run(self, reward: bytes, what: str, timeout: float) -> float:
        """Returns the value of a pickled reward. Raises RewardError naming the row, RewardTimeout
        where the call took longer than `timeout` s. what: its name in messages."""
        for _ in range(MOST_KILLED):
            kind, ended = "", what + _NEVER_BEGAN
            try:
                pipe = self._started(what)
                pipe.send_bytes(reward)
                late_start = f"{what}: its worker did not import it within {START_TIMEOUT:g} s"
                kind, value = self._receive(pipe, START_TIMEOUT, late_start)
                if kind == "begun":
                    ended = f"{what} ended its worker process"
                    late_end = f"{what} took longer than {_bound(timeout)}"
                    kind, value = self._receive(pipe, timeout, late_end)
            except (EOFError, OSError) as e:
                status = self.free()
                if status == -signal.SIGXCPU:  # as `bounded` has it
                    return late()
                if status != -signal.SIGKILL:
                    raise RewardError(ended) from e
                if not self._ended:
                    log.warning("a reward worker was killed: %s goes to a new one", what)
                continue
            if kind == "ok":
                return value
            error = RewardError if kind == "error" else RewardUnavailable
            raise error(f"{what} raised {value[0]}") from value[1]
        raise RewardUnavailable(ended)

    def _started(self, what: str) -> Connection:
        if self._process is not None and not self._process.is_alive():  # killed while it waited
            self.free()
        with self._lock:
            if self._ended:
                raise RewardError(f"{what}: the reward pool is closed")
            if self._pipe is None:
                context = mp.get_context("spawn")  # fork would copy threads and CUDA state
                self._pipe, theirs = context.Pipe()
                self._process = context.Process(
                    target=_serve, args=(theirs,), name="megarl-reward", daemon=True
                )
                self._process.start()
                theirs.close()
                # an interpreter that ends would kill the process alone, not what it started
                self._kill = Finalize(self, _kill, (self._process,), exitpriority=0)
            return self._pipe

    def _receive(self, pipe: Connection, timeout: float, late: str) -> Any:
        if not pipe.poll(timeout):
            self.free()
            raise RewardTimeout(late)
        return pipe.recv()

    def end(self) -> None:
        """Kills the process for good, and all it started, from another thread: the reward that it
        computes fails."""
        with self._lock:
            self._ended = True
            self._kill()

    def free(self) -> int | None:
        """Kills the process, and all it started, and forgets it; the next reward starts another.
        Returns its exit status."""
        with self._lock:
            process, pipe = self._process, self._pipe
            if process is None or pipe is None:
                return None
            self._kill()
            process.join(KILL_TIMEOUT)
            pipe.close()
            self._process = self._pipe = None
            status: int | None = process.exitcode
            return status


def _kill(process: Any) -> None:
    signal_group(process.pid, signal.SIGKILL)
    process.kill()  # it may not lead its group yet


class RewardPool:
    """Runs rewards in `workers` processes, each reward for at most `timeout` seconds. An
    asynchronous reward is awaited in the caller's event loop for as long at most; one with an
    attribute `bounds_itself` for as long as it takes. Close the pool, or use it in `with`. Raises
    ValueError for no worker or no time.

    addresses: host:port of reward nodes (megarl.rollout.rewards.node); then each computes `workers`
    rewards at once, and no process is started here.
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
        self._workers: list[RewardProcess | RewardNode]
        if addresses:
            from megarl.rollout.rewards.node import RewardNode

            self._workers = [RewardNode(address) for _ in range(workers) for address in addresses]
        else:
            self._workers = [RewardProcess() for _ in range(workers)]
        self._idle: queue.SimpleQueue[RewardProcess | RewardNode] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(len(self._workers), thread_name_prefix="megarl-reward")

    def __reduce__(self) -> tuple[Any, ...]:
        """Has every process that loads copies of the pool make one, with its share of workers."""
        copy = share(self.workers), self.timeout, self._addresses, self.on_error
        return _copy, (self._name, *copy)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def score(
        self, fn: RewardFn, args: tuple[Any, ...], kw: dict[str, Any], *, row_id: object = "?"
    ) -> float:
        """Returns fn(*args, **kw), called in a worker, or awaited here; the parts of a weighted sum
        are computed at once. Raises RewardError naming `row_id`, RewardTimeout where the call took
        too long."""
        if isinstance(fn, WeightedReward):
            return await fn.score(partial(self.score, row_id=row_id), *args, **kw)
        what = f"reward {getattr(fn, '__name__', repr(fn))} on row {row_id}"
        if is_asynchronous(fn):
            return await self._awaited(fn, args, kw, what)
        return await asyncio.wrap_future(self._threads.submit(self._score, fn, args, kw, what))

    def submit(self, reward: bytes, what: str) -> Future[float]:
        """Returns the Future of a pickled (fn, args, kw), which a worker calls. what: its name in
        messages."""
        return self._threads.submit(self._run, reward, what)

    async def _awaited(
        self, fn: Any, args: tuple[Any, ...], kw: dict[str, Any], what: str
    ) -> float:
        clock = asyncio.timeout(None if getattr(fn, "bounds_itself", False) else self.timeout)
        try:
            async with clock:
                return finite(await fn(*args, **kw))
        except RewardError as e:
            raise type(e)(f"{what}: {e}") from e
        except Exception as e:
            if clock.expired() and isinstance(e, TimeoutError):
                raise RewardTimeout(f"{what} took longer than {_bound(self.timeout)}") from e
            raise RewardError(f"{what} raised {type(e).__name__}: {e}") from e

    def close(self) -> None:
        """Kills the workers, also busy ones, and joins the threads. May be called twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.end()
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.free()

    def _score(self, fn: RewardFn, args: tuple[Any, ...], kw: dict[str, Any], what: str) -> float:
        try:
            reward = pickle.dumps((fn, args, kw))
        except (pickle.PicklingError, AttributeError, TypeError) as e:
            raise RewardError(
                f"{what} cannot be sent to a worker process ({e}); {_IMPORTABLE}"
            ) from e
        if self._addresses and getattr(getattr(fn, "func", fn), "__module__", "") == "__main__":
            raise RewardError(f"{what} is of the script itself, for a reward node; {_IMPORTABLE}")
        return self._run(reward, what)

    def _run(self, reward: bytes, what: str) -> float:
        until = None
        while True:
            worker = self._idle.get()
            try:
                return worker.run(reward, what, self.timeout)
            except WorkerLost as e:  # a launcher starts it again; others are there meanwhile
                if until is None:
                    until = time.monotonic() + LOST_PATIENCE
                    log.warning("%s; another worker is asked", e)
                if time.monotonic() >= until:
                    raise
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
