"""Makes a directory file by file: in parallel, in bounded memory, resumed after a kill.

While it is made, a directory NAME is `.NAME.converting/`: the files are in `files/`, and `notes/`
has a note for every file that is on disk whole. The next run on the same input keeps the noted
files and makes the others; `files/` becomes NAME by one rename when all are there.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TaskProgressColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar
from torch import Tensor

from megarl.utils.files import clean_up, human, put_in_place, sync, write_whole

log = logging.getLogger(__name__)

MAX_MEMORY = 4 << 30
_MIN_CHUNK, _MAX_CHUNK = 1 << 20, 64 << 20
# a worker's buffer once, and twice for what it reads in a wider dtype to cast
_COPIES = 3


class Progress:
    """Shows how many bytes are done: a bar on a terminal, elsewhere a line every ten seconds.

    A context manager that workers share. `total` and `done`, which an earlier run did, are bytes.
    """

    def __init__(self, total: int, *, done: int = 0, quiet: bool = False) -> None:
        console = Console(stderr=True)
        self.stopped = threading.Event()
        self._lines = not quiet and not console.is_terminal
        self._shown = time.monotonic()
        self._bar = Bar(
            BarColumn(),
            TaskProgressColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=quiet or self._lines,
        )
        self._task = self._bar.add_task("", total=total, completed=done)

    def add(self, n: int) -> None:
        """Counts `n` bytes more; every worker calls it after every chunk. Raises InterruptedError
        where another worker has failed, which ends this one."""
        if self.stopped.is_set():
            raise InterruptedError("another worker failed")
        self._bar.advance(self._task, n)
        if self._lines and time.monotonic() - self._shown >= 10:
            self._shown = time.monotonic()
            self._bar.console.print(self._bar.get_renderable())

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if self._lines:
            self._bar.console.print(self._bar.get_renderable())


class Buffer:
    """Lends a worker's memory of `nbytes` to one tensor at a time.

    A tensor is a storage of its own, so that torch.save writes it and no more.
    """

    def __init__(self, nbytes: int) -> None:
        self.data = np.empty(nbytes, dtype=np.uint8)

    def rows(self, row_bytes: int) -> int:
        """Returns how many rows of `row_bytes` fit; at least one, whatever its size."""
        return max(1, len(self.data) // row_bytes)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns an unfilled tensor over this memory; the one before it is overwritten."""
        numel = int(np.prod(shape))
        nbytes = numel * dtype.itemsize
        if nbytes > len(self.data):  # a row wider than a chunk
            self.data = np.empty(nbytes, dtype=np.uint8)
        return torch.frombuffer(self.data[:nbytes], dtype=dtype).view(shape)


def chunk_bytes(max_memory: int, workers: int) -> int:
    """Returns the bytes of a worker's buffer with which this process stays below `max_memory`
    bytes in all. Raises ValueError, naming the least that does, if that is too little."""
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
    """Returns the memory that this process holds now, or 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class Job:
    """Makes one file of `nbytes` by `write(path, buffer, add)`, which calls `add(n)` after every n
    bytes and returns JSON for the function that finishes the directory."""

    nbytes: int
    write: Callable[[Path, Buffer, Callable[[int], None]], Any]


class Limits(TypedDict, total=False):
    """Names what `make_directory` may use: threads, bytes of this process; quiet: no progress."""

    workers: int
    max_memory: int
    quiet: bool


def make_directory(
    target: Path,
    jobs: Mapping[str, Job],
    finish: Callable[[Path, dict[str, Any]], None],
    *,
    input_: Mapping[str, Any],
    workers: int = 2,
    max_memory: int = MAX_MEMORY,
    quiet: bool = False,
) -> None:
    """Makes the files of `jobs` (by name), calls `finish(directory, results)`, then renames.

    input_: JSON of everything that determines the files; work from another input starts anew.
    max_memory: bytes of this process, libraries included.
    A failed or killed run leaves its work for the next; `target` is there whole or not at all.
    Raises ValueError if `target` is there already, if another process works on it, or if
    `max_memory` is too little.
    """
    target = target.absolute()
    check_new(target)
    size = chunk_bytes(max_memory, workers)
    work = target.with_name(f".{target.name}.converting")
    with _owned(work):
        files, notes = _take_up(work, json.dumps(input_, sort_keys=True))
        results = _finished(jobs, files, notes)
        if results:
            log.info("%s: %d of %d files were there already", target, len(results), len(jobs))
        left = {n: j for n, j in jobs.items() if n not in results}
        done = sum(jobs[n].nbytes for n in results)
        with Progress(sum(j.nbytes for j in jobs.values()), done=done, quiet=quiet) as progress:
            results |= _run(left, files, notes, progress, workers, size)
        finish(files, results)
        put_in_place(files, target)
        shutil.rmtree(work)


def check_new(target: Path) -> None:
    """Raises ValueError if `target` is anything but an empty directory."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is there already: remove it, or choose another --out")


@contextmanager
def _owned(work: Path) -> Iterator[None]:
    """Locks `work` for this process. Raises ValueError if another one works there."""
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise ValueError(f"{work}: another process is writing there; let it end") from e
        yield


def _take_up(work: Path, input_: str) -> tuple[Path, Path]:
    """Returns the folders of files and of notes, emptied if they are of another input."""
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
    """Returns the results of the files that are whole, by name."""
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
    """Makes the files in `workers` threads and returns their results by name."""
    own = threading.local()

    def work(name: str) -> Any:
        if not hasattr(own, "buffer"):
            own.buffer = Buffer(size)
        file = files / name
        result = jobs[name].write(file, own.buffer, progress.add)
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
