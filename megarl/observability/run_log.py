"""Keeps the files that a run appends to while it trains.

A RunLog has a JSON object on each line, of one step of the run. A start that goes on from a step
moves lines of later steps aside, so that what stands in the file counts, for everybody who reads
it. A DiskThread writes beside training, which never waits for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import compress
from pathlib import Path
from typing import Any, BinaryIO

from megarl.config.errors import ConfigError
from megarl.observability.logging import get_logger
from megarl.utils.files import write_whole

log = get_logger(__name__)

Line = dict[str, Any]
# the run logs of a run directory
LOGS = (
    "stats.jsonl",
    "samples.jsonl",
    "eval_rewards.jsonl",
    "record/fingerprints.jsonl",
    "episodes/index.jsonl",
)
PATIENCE = 30.0  # seconds that the end of a run waits for the disk
_BEGINNINGS = ("", "{", '{"')  # of lines that may be ours, but cut short


class RunLog:
    """Reads and appends to the lines at `path`. One process writes; a killed one leaves behind at
    worst one line that is cut short."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, after: int) -> None:
        """Goes on from step `after`, from nothing where it is negative: moves lines of later steps,
        and lines that are cut short, to the end of NAME.superseded.jsonl beside it. Raises
        ConfigError as check_age does."""
        check_age([self.path])
        lines = _text(self.path).splitlines()
        stay = [self._stays(line, after) for line in lines]
        if not all(stay):
            moved = (f"{line}\n" for line, stays in zip(lines, stay, strict=True) if not stays)
            with self.path.with_suffix(".superseded.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(moved)
            write_whole(self.path, "".join(f"{line}\n" for line in compress(lines, stay)))

    def _stays(self, text: str, after: int) -> bool:
        try:
            line = json.loads(text)
        except ValueError:
            return False
        return isinstance(line, dict) and bool(line.get("step", 0) <= after)

    def append(self, step: int, line: Mapping[str, Any]) -> None:
        """Appends a line of a step. Raises OSError where there is no room, and leaves no half."""
        append_line(self.path, {"step": step} | dict(line) | {"step": step})

    def read(self) -> list[Line]:
        """Returns all whole lines, see `read_lines`. Raises ConfigError as check_age does."""
        check_age([self.path])
        return list(read_lines(self.path))


def check_age(paths: Iterable[Path]) -> None:
    """Raises ConfigError for files of an older megarl, which say otherwise what counts; one line
    names them all."""
    if older := [str(path) for path in paths if _is_older(path)]:
        raise ConfigError(
            [
                f"{' and '.join(older)}: written by an older megarl; move what is named away, and "
                "the run goes on from its checkpoint with new ones"
            ]
        )


def check_logs(directory: Path) -> None:
    """Raises ConfigError as `check_age` does for LOGS in a run directory."""
    check_age(directory / name for name in LOGS)


def _is_older(path: Path) -> bool:
    for text in _text(path).splitlines():
        try:
            line = json.loads(text) if '"after"' in text else None
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and "after" in line and "step" not in line:
            return True
    return False


def read_lines(path: Path) -> Iterator[Line]:
    """Yields the JSON objects on the lines of a file, none where there is no file. A line that a
    kill cut short is left out. Raises ValueError for another that is no object."""
    for number, text in enumerate(_text(path).split("\n"), 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as e:
            if text[:2] not in _BEGINNINGS:  # somebody else's file
                raise ValueError(f"{path}:{number}: not a JSON object: {e}") from e
            continue
        if not isinstance(line, dict):
            raise ValueError(f"{path}:{number}: not a JSON object")
        yield line


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def append_line(path: Path, line: Mapping[str, Any]) -> int:
    """Appends a line and returns how long the file is then. It does not join one that lacks its
    end, as a kill leaves it. Raises OSError where there is no room, and leaves no half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = f"{json.dumps(line, separators=(',', ':'))}\n".encode()
    with path.open("a+b", buffering=0) as file:
        if end := file.seek(0, os.SEEK_END):
            file.seek(end - 1)
            data = data if file.read(1) == b"\n" else b"\n" + data
        return append(file, data) + len(data)


def append(file: BinaryIO, data: bytes) -> int:
    """Writes `data` at the end of an unbuffered file and returns where. Raises OSError where there
    is no room, and takes back what was written."""
    at = file.seek(0, os.SEEK_END)
    left = memoryview(data)
    try:
        while left:  # a disk takes what it has room for, and says so at the next write
            left = left[file.write(left) :]
    except OSError:
        file.truncate(at)
        raise
    return at


class DiskThread:
    """Does pieces of work one after the other. Nothing here ends a run: where the disk is full or
    does not follow, an error in the log says what is not recorded, and training goes on."""

    def __init__(self, name: str, *, waiting: int) -> None:
        """waiting: pieces of work that the disk may be behind; more are left out."""
        self._name = name
        self._work: queue.Queue[tuple[str, Callable[[], None]] | None] = queue.Queue(waiting)
        self._thread: threading.Thread | None = None
        self._over = False

    def do(self, what: str, work: Callable[[], None]) -> None:
        """Has the thread call `work`, which records `what`; not after `close`."""
        if self._over:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        try:
            self._work.put_nowait((what, work))
        except queue.Full:
            log.error("not recorded: %s: the disk is behind", what)

    def _run(self) -> None:
        while (job := self._work.get()) is not None:
            what, work = job
            try:
                work()
            except Exception as e:  # of a disk that is full, mostly
                log.error("not recorded: %s: %s: %s", what, type(e).__name__, e)

    def close(self) -> bool:
        """Waits until all is written, PATIENCE seconds at most, and returns whether it is. May be
        called twice."""
        self._over, thread = True, self._thread
        if thread is None:
            return True
        with contextlib.suppress(queue.Full):
            self._work.put(None, timeout=PATIENCE)
        thread.join(PATIENCE)
        if thread.is_alive():
            log.error("%s: the last is not recorded: the disk did not answer", self._name)
            return False
        self._thread = None
        return True
