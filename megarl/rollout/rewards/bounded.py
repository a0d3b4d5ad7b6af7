"""Bounds the work that a reward does for what a policy wrote: a policy may write an expression that
nobody can compute, and that is a wrong answer, on every machine and under any load.

The bound is CPU time. A signal ends what is written in Python; what C computes without a look at
signals ends the worker process, by the kernel, and the pool takes that for the same.
"""

from __future__ import annotations

import contextlib
import functools
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from megarl.rollout.rewards.parts import LATE, Scored

CPU_SECONDS = 4.0  # for one reward; a usual one takes hundredths
_MORE = 3  # seconds of CPU time after which the kernel ends the process, where no signal did


class TooMuchWork(BaseException):
    """Says that an answer takes more work than a right one would. It is no Exception: libraries
    catch those and go on."""


def late() -> Scored:
    """Returns the reward of such an answer: 0, counted as reward/late."""
    return Scored(0.0, {LATE: 1.0})


def bounded(reward: Callable[..., float]) -> Callable[..., float]:
    """Decorates a reward that reads what a policy wrote: it gives `late()` for what takes more than
    CPU_SECONDS of CPU time. Outside of a process's main thread there is no bound."""

    @functools.wraps(reward)
    def within(*args: Any, **kw: Any) -> float:
        try:
            with _limit():
                return reward(*args, **kw)
        except TooMuchWork:
            return late()

    return within


def end_process_when_late() -> None:
    """Has the kernel end this process, by SIGXCPU, where a reward goes on after its signal. For
    processes that can be replaced."""
    _Worker.replaceable = True


class _Worker:
    replaceable = False


@contextlib.contextmanager
def _limit() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPROF, _stop)
    limits = resource.getrlimit(resource.RLIMIT_CPU)
    if _Worker.replaceable:
        used = resource.getrusage(resource.RUSAGE_SELF)
        most = int(used.ru_utime + used.ru_stime + CPU_SECONDS) + _MORE
        if limits[1] == resource.RLIM_INFINITY or most < limits[1]:
            resource.setrlimit(resource.RLIMIT_CPU, (most, limits[1]))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_CPU, limits)


def _stop(*_: Any) -> None:
    raise TooMuchWork
