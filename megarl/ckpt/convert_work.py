"""Work that makes a directory file by file: in parallel, in bounded memory, resumed after a kill.

While it is made, a directory NAME is `.NAME.converting/`, with the files under `files/` and beside
them a note for every file that is on disk whole. A next run on the same input takes these up and
makes the others; `files/` becomes NAME by one rename when all are there.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.utils.disk import human
from megarl.utils.staging import clean_up, put_in_place, sync, write_whole

log = logging.getLogger(__name__)

_MIN_CHUNK, _MAX_CHUNK = 1 << 20, 64 << 20
# a worker's buffer, and what it reads in another dtype (at most twice as wide) to be cast
_COPIES = 3


class Progress:
    """Bytes done, and how fast, on a terminal or every ten seconds in a log."""

    def __init__(self, total: int, quiet: bool = False) -> None:
        self.total, self.done, self.skipped = total, 0, 0
        self.stopped = threading.Event()
        self._quiet, self._tty = quiet, sys.stderr.isatty()
        self._start = self._shown = time.monotonic()
        self._lock = threading.Lock()

    def add(self, n: int) -> None:
        """Called by every worker after every chunk; ends it where another has failed."""
        if self.stopped.is_set():
            raise InterruptedError("another worker failed")
        with self._lock:
            self.done += n
            now = time.monotonic()
            if now - self._shown >= (0.2 if self._tty else 10.0):
                self._shown = now
                self._show("\r" if self._tty else "", "" if self._tty else "\n")

    def finish(self) -> None:
        self._show("\r" if self._tty else "", "\n")

    def _show(self, start: str, end: str) -> None:
        if self._quiet:
            return
        seconds = max(time.monotonic() - self._start, 1e-9)
        rate = (self.done - self.skipped) / seconds
        share = self.done / self.total if self.total else 1.0
        bar = ("#" * int(24 * share)).ljust(24, ".")
        text = f"{bar} {share:4.0%}  {human(self.done)} of {human(self.total)}  {human(rate)}/s"
        print(f"{start}{text} ", end=end, file=sys.stderr, flush=True)


class Buffer:
    """A worker's memory: tensors over the same `nbytes`, one at a time. Each is its own storage,
    so that torch.save writes it and no more."""

    def __init__(self, nbytes: int) -> None:
        self.data = np.empty(nbytes, dtype=np.uint8)

    def rows(self, row_bytes: int) -> int:
        """How many rows fit; at least one, whatever its size."""
        return max(1, len(self.data) // row_bytes)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        numel = int(np.prod(shape))
        nbytes = numel * dtype.itemsize
        if nbytes > len(self.data):  # a row wider than a chunk
            self.data = np.empty(nbytes, dtype=np.uint8)
        return torch.frombuffer(self.data[:nbytes], dtype=dtype).view(shape)


def chunk_bytes(max_memory: int, workers: int) -> int:
    """The size of a worker's buffer, so that this process stays below `max_memory` bytes in all.

    ValueError, naming the least that does, if that is too little.
    """
    if workers < 1:
        raise ValueError(f"--workers {workers}: give at least 1")
    used = resident_bytes()
    chunk = (max_memory - used) // (workers * _COPIES)
    if chunk < _MIN_CHUNK:
        least = used + workers * _COPIES * _MIN_CHUNK
        raise ValueError(
            f"--max-memory {human(max_memory)} is too little for {workers} workers beside the "
            f"{human(used)} of libraries; give at least {human(least)}, or fewer workers"
        )
    return int(min(chunk, _MAX_CHUNK))


def resident_bytes() -> int:
    """Of this process, now; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class Job:
    """Makes one file: `write(path, buffer, add)`, `add(n)` after every n bytes; what it returns
    (JSON) is for the one who finishes the directory."""

    nbytes: int
    write: Callable[[Path, Buffer, Callable[[int], None]], Any]


def make_directory(
    target: Path,
    jobs: Mapping[str, Job],
    finish: Callable[[Path, dict[str, Any]], None],
    *,
    input_: Mapping[str, Any],
    workers: int,
    max_memory: int,
    quiet: bool = False,
) -> None:
    """Makes the files of `jobs` (by name), then `finish(directory, results)`, then renames.

    `input_` (JSON) is all that the files follow from: work done from another input starts anew.
    A failed or killed run leaves its work for the next; `target` is there whole or not at all.
    """
    target = target.absolute()
    check_new(target)
    size = chunk_bytes(max_memory, workers)
    work = target.with_name(f".{target.name}.converting")
    with _owned(work):
        files, notes = _take_up(work, json.dumps(input_, sort_keys=True))
        progress = Progress(sum(j.nbytes for j in jobs.values()), quiet)
        results = _finished(jobs, files, notes)
        progress.done = progress.skipped = sum(jobs[n].nbytes for n in results)
        if results:
            log.info("%s: %d of %d files were there already", target, len(results), len(jobs))
        left = {n: j for n, j in jobs.items() if n not in results}
        results |= _run(left, files, notes, progress, workers, size)
        progress.finish()
        finish(files, results)
        put_in_place(files, target)
        shutil.rmtree(work)


def check_new(target: Path) -> None:
    """ValueError if something is there already."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is there already: remove it, or choose another --out")


@contextmanager
def _owned(work: Path) -> Iterator[None]:
    """ValueError if another process works there."""
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise ValueError(f"{work}: another process is writing there; let it end") from e
        yield


def _take_up(work: Path, input_: str) -> tuple[Path, Path]:
    """The folders of files and notes, emptied if they are of another input."""
    files, notes, origin = work / "files", work / "notes", work / "input.json"
    if not origin.is_file() or origin.read_text(encoding="utf-8") != input_:
        for old in (files, notes):
            shutil.rmtree(old, ignore_errors=True)
        clean_up(work)
        write_whole(origin, input_)
    for folder in (files, notes):
        folder.mkdir(exist_ok=True)
    clean_up(notes)
    return files, notes


def _finished(jobs: Mapping[str, Job], files: Path, notes: Path) -> dict[str, Any]:
    """File -> result, of files that are whole."""
    found = {}
    for name in jobs:
        note, file = notes / f"{name}.json", files / name
        if note.is_file() and file.is_file():
            content = json.loads(note.read_text(encoding="utf-8"))
            if content["size"] == file.stat().st_size:
                found[name] = content["result"]
    return found


def _run(
    jobs: Mapping[str, Job], files: Path, notes: Path, progress: Progress, workers: int, size: int
) -> dict[str, Any]:
    mine = threading.local()

    def work(name: str) -> Any:
        if not hasattr(mine, "buffer"):
            mine.buffer = Buffer(size)
        file = files / name
        result = jobs[name].write(file, mine.buffer, progress.add)
        sync(file)
        note = {"size": file.stat().st_size, "result": result}
        write_whole(notes / f"{name}.json", json.dumps(note))
        return json.loads(json.dumps(result))

    with ThreadPoolExecutor(workers) as pool:
        futures = {name: pool.submit(work, name) for name in jobs}
        try:
            wait(futures.values(), return_when=FIRST_EXCEPTION)
        finally:  # after a failure or an interrupt the others end at their next chunk
            if any(not f.done() or f.exception() for f in futures.values()):
                progress.stopped.set()
                pool.shutdown(cancel_futures=True)
        errors = [f.exception() for f in futures.values() if not f.cancelled()]
        for error in sorted(filter(None, errors), key=lambda e: isinstance(e, InterruptedError)):
            raise error
        return {name: f.result() for name, f in futures.items()}
