"""Writes log lines with time, rank and module: INFO on rank 0, WARNING elsewhere."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import traceback
from collections import Counter
from weakref import WeakKeyDictionary

from megarl.utils.user_errors import in_one_line, user_lines

ROOT = "megarl"
# how often the event loop of a run has met a problem
_met: WeakKeyDictionary[asyncio.AbstractEventLoop, Counter[object]] = WeakKeyDictionary()


def env_rank() -> int:
    """Returns this process's rank as torchrun gives it, 0 without it."""
    return int(os.environ.get("RANK", "0"))


def get_logger(name: str = ROOT) -> logging.Logger:
    """Returns a logger below "megarl". MEGARL_LOG_LEVEL (DEBUG, INFO, ...) sets the level on every
    rank; raises ValueError where it is no level."""
    _configure()
    if name != ROOT and not name.startswith(ROOT + "."):
        name = f"{ROOT}.{name}"
    return logging.getLogger(name)


def warn_on_rank_zero(log: logging.Logger, message: str, *args: object) -> None:
    """Logs a warning on rank 0 alone: all ranks have the same reason for it."""
    if env_rank() == 0:
        log.warning(message, *args)


def warn_recurring(log: logging.Logger, what: str, problem: BaseException | str) -> None:
    """Logs a problem the first, the tenth, the hundredth ... time that the running event loop meets
    it. Errors are one problem if their types and the user's last lines in their traces are equal.

    what: what met the problem, such as a row."""
    key: object = problem
    if isinstance(problem, BaseException):
        frames = user_lines(problem) or traceback.extract_tb(problem.__traceback__)
        key = type(problem), *((frame.filename, frame.lineno) for frame in frames[-1:])
        problem = in_one_line(problem)
    met = _met.setdefault(asyncio.get_running_loop(), Counter())
    met[log.name, key] = times = met[log.name, key] + 1
    if str(times).strip("0") == "1":
        log.warning("%s: %s%s", what, problem, f" ({times} times)" if times > 1 else "")


class _Stderr(logging.StreamHandler):
    """Writes to whatever sys.stderr is at the time, so that redirecting it keeps working."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):  # type: ignore[no-untyped-def,override]
        return sys.stderr


class _Format(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        record.short = record.name.removeprefix(ROOT + ".")
        record.rank = env_rank()
        return super().format(record)


def _configure() -> None:
    root = logging.getLogger(ROOT)
    if any(isinstance(h, _Stderr) for h in root.handlers):
        return
    handler = _Stderr()
    handler.setFormatter(
        _Format("%(asctime)s r%(rank)d %(levelname)-7s %(short)s: %(message)s", datefmt="%H:%M:%S")
    )
    root.addHandler(handler)
    root.propagate = False
    root.setLevel(_level())


def _level() -> int:
    text = os.environ.get("MEGARL_LOG_LEVEL")
    if not text:
        return logging.INFO if env_rank() == 0 else logging.WARNING
    levels = logging.getLevelNamesMapping()
    if text.upper() not in levels:
        raise ValueError(f"MEGARL_LOG_LEVEL={text!r}: use one of {', '.join(sorted(levels))}")
    return levels[text.upper()]
