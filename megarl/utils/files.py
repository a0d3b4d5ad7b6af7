"""Makes directories and files that are there whole or not at all, whatever moment a kill comes at;
names a full disk; and makes digests, of files and of what a run computed.

A directory is written as `.NAME.tmp-TAG` beside its target and renamed once it is synced to disk.
One rename cannot replace a directory, so an older one steps aside as `.NAME.old-TAG` first.
`clean_up` ends what a killed process began: `tmp` is garbage, `old` goes back where its place is
empty.

XXH3 with 128 bits finds every kind of damage, at the speed of memory. It is no protection against
somebody who changes a file on purpose.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

_CHUNK = 1 << 20  # bytes, read into one buffer: converters count their memory
_SEAL = "checksum"

Digest = xxhash.xxh3_128
RowDigest = xxhash.xxh3_64  # of one of many rows, to compare with the same row elsewhere
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old)-[0-9a-f]{8}")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# torch's writer of archives drops the error of the write that came out short; safetensors, and a
# rank that tells of another's error, have its text only
_SHORT_WRITE = re.compile(r"unexpected pos \d+ vs \d+|PytorchStreamWriter failed writing")
_TEXT = re.compile(r"No space left on device|Disk quota exceeded|File too large")


def stage(target: Path) -> Path:
    """Returns a new, empty directory beside `target`. Raises ValueError if `target` is a link: what
    is put in its place would take the link's, or what it points to, away."""
    target = target.absolute()
    if target.is_symlink():
        fix = "remove the link, or choose another directory"
        raise ValueError(f"cannot save to {target}: it is a link to {os.readlink(target)}; {fix}")
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = _beside(target, "tmp")
    staging.mkdir()
    return staging


def put_in_place(staging: Path, target: Path) -> None:
    """Syncs `staging` to disk and renames it to `target`; what `target` was is gone."""
    target = target.absolute()
    old = _beside(target, "old")
    for path in (*staging.rglob("*"), staging):
        sync(path)
    if target.exists():
        target.rename(old)
    try:
        staging.rename(target)
    except BaseException:
        if old.exists():
            old.rename(target)
        raise
    sync(target.parent)
    if old.exists():
        shutil.rmtree(old)


def remove(directory: Path) -> None:
    """Deletes it so that no half of it is ever seen under its name."""
    doomed = _beside(directory.absolute(), "tmp")
    directory.rename(doomed)
    shutil.rmtree(doomed)


def clean_up(parent: Path, name: str | None = None) -> list[Path]:
    """Ends what killed processes left in `parent`, of what was to be `name` (None: of all), and
    returns the leftovers. Only the process that writes there may call it."""
    leftovers = []
    for path in sorted(parent.iterdir()) if parent.is_dir() else []:
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or match["name"] != (name or match["name"]):
            continue
        leftovers.append(path)
        target = parent / match["name"]
        if match["kind"] == "old" and not target.exists():
            path.rename(target)
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return leftovers


def write_whole(path: Path, content: str | bytes) -> None:
    """Replaces the file at once: a reader, or a next start, sees the old content or the new one."""
    staging = _beside(path, "tmp")
    try:
        staging.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(staging)
        staging.replace(path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Waits until a file, or a directory's list of names, is on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{kind}-{uuid.uuid4().hex[:8]}")


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
    fix = "make room there, or set another fileroot. Earlier checkpoints are as they were"
    return DiskFull(f"{begin}: {amount}{directory} has {free} free (a quota may leave less); {fix}")


def human(nbytes: float) -> str:
    """Writes bytes for people, as 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


# digests


class Fingerprint(NamedTuple):
    """Says what a tensor was, so that two runs can be compared. `bits` hashes its numbers in order;
    `rows`, where there is one, the same rows in any order; `shape` is for people."""

    bits: str
    norm: float | None = None
    sum: float | None = None
    shape: str = ""
    rows: str = ""

    @staticmethod
    def of_number(value: float) -> Fingerprint:
        """Returns the fingerprint of one number."""
        return Fingerprint(float(value).hex(), float(value), float(value))


def file_digest(path: Path) -> str:
    """Returns the checksum of a file's bytes. Raises OSError if it cannot be read."""
    digest, chunk = Digest(), memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as f:
        while n := f.readinto(chunk):
            digest.update(chunk[:n])
    return digest.hexdigest()


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `content`, for a JSON file, with a checksum of its own as another entry."""
    as_read = json.loads(json.dumps(content))  # keys are text there
    return {**as_read, _SEAL: _of_json(as_read)}


def broken_seal(content: Any) -> str | None:
    """Returns what is wrong with the content of a `seal`ed file, None if nothing is."""
    if not isinstance(content, dict):
        return "it is no json object"
    digest = _of_json({k: v for k, v in content.items() if k != _SEAL})
    return None if digest == content.get(_SEAL) else "its content does not fit its checksum"


def _of_json(content: Mapping[str, Any]) -> str:
    return Digest(json.dumps(content, sort_keys=True).encode()).hexdigest()
