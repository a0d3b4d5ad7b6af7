"""Calls code that may do anything (hang, exit, crash) in a process of its own."""

from __future__ import annotations

import logging
import multiprocessing as mp
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from megarl.utils.child import end_with_parent, signal_group

logger = logging.getLogger(__name__)
T = TypeVar("T")


def call_isolated(fn: Callable[..., T], *args: Any, timeout: float) -> T:
    """Returns fn(*args), called in a fresh interpreter with this one's import path. Raises
    TimeoutError after `timeout` seconds, and ChildProcessError where the process ends without an
    answer. One that was killed says nothing about `fn`: then another one is asked, once."""
    try:
        return _call(fn, args, timeout)
    except _Killed as e:
        logger.warning("%s: asking once more", e)
        return _call(fn, args, timeout)


class _Killed(ChildProcessError):
    """The process was ended by SIGKILL, which comes from outside: from a user, or for memory."""


def _call(fn: Callable[..., T], args: tuple[Any, ...], timeout: float) -> T:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, fn, args), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout):
            raise TimeoutError(f"no answer within {timeout:g} s")
        return ours.recv()
    except EOFError as e:
        process.join(timeout)
        if process.exitcode == -signal.SIGKILL:
            raise _Killed("the process was killed (SIGKILL), as for want of memory") from e
        raise ChildProcessError(f"the process ended with status {process.exitcode}") from e
    finally:
        assert process.pid is not None
        signal_group(process.pid, signal.SIGKILL)
        process.kill()  # it may not lead its group yet
        process.join()
        ours.close()


def _answer(pipe: Connection, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to answer, who then ends us
    end_with_parent()
    pipe.send(fn(*args))
