"""Tells in one line that a disk has no room."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# torch's writer of archives drops the error of the write that came out short; safetensors, and a
# rank that tells of another's error, have its text only
_SHORT_WRITE = re.compile(r"unexpected pos \d+ vs \d+|PytorchStreamWriter failed writing")
_TEXT = re.compile(r"No space left on device|Disk quota exceeded|File too large")


class DiskFull(RuntimeError):
    """Says that there is no room for a file: where, how much was asked for and is free, and what to
    do."""


def check_room(what: str, directory: Path, needed: int) -> None:
    """Raises DiskFull unless `directory` has `needed` bytes left."""
    if needed > shutil.disk_usage(directory).free:
        raise _disk_full(f"{what}: the disk is too full", directory, needed)


@contextmanager
def full_disk_named(what: str, directory: Path, needed: int | None = None) -> Iterator[None]:
    """Raises DiskFull in the place of an error whose cause is a full disk. The block writes
    `needed` bytes to `directory`, or an unknown number."""
    try:
        yield
    except Exception as e:
        if isinstance(e, DiskFull) or not (why := _want_of_room(e)):
            raise
        begin = str(e) if str(e).startswith(what) else f"{what}: {why}"  # the former names a rank
        raise _disk_full(begin, directory, needed) from e


def _want_of_room(error: BaseException | None) -> str | None:
    """Returns what the system said, if a full disk caused `error`; else None."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return error.strerror
        if isinstance(error, RuntimeError) and _SHORT_WRITE.search(str(error)):
            return "a write came out short"
        if found := _TEXT.search(str(error)):
            return found[0]
        error = error.__cause__ or error.__context__
    return None


def _disk_full(begin: str, directory: Path, needed: int | None) -> DiskFull:
    while not directory.exists():
        directory = directory.parent
    amount = "" if needed is None else f"{human(needed)} are needed, "
    free = human(shutil.disk_usage(directory).free)
    return DiskFull(
        f"{begin}: {amount}{directory} has {free} free (a quota may leave less); make room "
        "there, or set another fileroot. Earlier checkpoints are as they were"
    )


def human(nbytes: float) -> str:
    """Writes bytes for people, as 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
