"""Makes the directories of checkpoints: by all ranks together, whole or not at all, with a marker.

The marker, megarl.json, says that a directory is a whole training checkpoint and that its files are
as written. It is written last, with the size and the checksum of every file and a checksum of
itself.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import uuid
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

from megarl.parallel.ranks import Ranks
from megarl.utils.files import Digest, broken_seal, file_digest, seal, stage

MARKER = "megarl.json"
FORMAT = 1
_READERS = 4


@contextmanager
def staged(
    target: Path, what: str, marker: str, group: dist.ProcessGroup | None = None
) -> Iterator[Path]:
    """Gives every rank the new directory beside `target` that rank 0 makes; a block that fails
    takes it along. Collective.

    Raises ValueError if `target` is something that a save must not replace: a file, or anything but
    a `what`, which has a file `marker`.
    """

    def make() -> Path:
        _check_target(target, what, marker)
        return stage(target)

    staging = Ranks.of(group).from_zero(make)
    with removed_on_failure(staging, group):
        yield staging


def _check_target(target: Path, what: str, marker: str) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"cannot save to {target}: a file is there; choose another directory")
    if any(target.iterdir()) and not (target / marker).is_file():
        raise ValueError(
            f"cannot save to {target}: it is not empty and holds no {what} (no {marker}), and "
            "saving would replace it; choose another directory"
        )


@contextmanager
def removed_on_failure(staging: Path, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Lets rank 0 delete what a failed block leaves behind."""
    try:
        yield
    except BaseException:
        if Ranks.of(group).is_zero:
            shutil.rmtree(staging, ignore_errors=True)
        raise


@contextmanager
def failures_named(what: str) -> Iterator[None]:
    """Turns torch's CheckpointException, which is no Exception and comes on every rank, into a
    RuntimeError that says whose failure it is."""
    try:
        yield
    except CheckpointException as e:
        rank, (cause, _) = min(e.failures.items())
        text = f"{what} failed on rank {rank}: {type(cause).__name__}: {cause}"
        raise RuntimeError(text) from cause


def write_marker(
    staging: Path, info: Mapping[str, Any], checksums: Mapping[str, str] | None = None
) -> None:
    """Writes the marker of `staging`. `checksums` has those that are known already, by the file's
    name within `staging`; the other files are read."""
    known = dict(checksums or {})
    files = {
        f.relative_to(staging).as_posix(): f.stat().st_size
        for f in sorted(staging.rglob("*"))
        if f.is_file() and f.name != MARKER
    }
    for name in files:
        if name not in known:
            known[name] = file_digest(staging / name)
    marker = {
        "format": FORMAT,
        "id": uuid.uuid4().hex,
        "info": dict(info),
        "files": files,
        "xxh3_128": {name: known[name] for name in files},
    }
    text = json.dumps(seal(marker), indent=2) + "\n"
    (staging / MARKER).write_text(text, encoding="utf-8")


def read_marker(path: Path) -> dict[str, Any]:
    """Returns the marker of `path`. Raises ValueError, saying why, where there is none or a damaged
    one."""
    try:
        marker: dict[str, Any] = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError) as e:
        raise ValueError(
            f"{path} holds no whole checkpoint ({MARKER}: {e}); give the directory of one saved "
            "with weight_format='dist', on storage that every rank sees"
        ) from e
    if why := broken_seal(marker):
        raise ValueError(f"{path / MARKER} is damaged ({why}); load another checkpoint")
    if marker.get("format") != FORMAT:
        raise ValueError(
            f"{path}: checkpoint format {marker.get('format')!r}, this version reads {FORMAT}; "
            "load it with the version that wrote it"
        )
    return marker


def read_info(path: str | Path) -> dict[str, Any]:
    """Returns the `info` of the checkpoint at `path`, whose files are all there, in full length.
    Raises ValueError if it is none. Not collective; `check_contents` reads the files, too."""
    marker = read_marker(Path(path))
    for name, size in marker["files"].items():
        file = Path(path) / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            raise ValueError(
                f"{file} has {found} bytes, {MARKER} says {size}: the checkpoint is damaged or "
                "was copied in part; load another one"
            )
    info: dict[str, Any] = marker["info"]
    return info


def check_contents(path: Path, rank: int = 0, ranks: int = 1) -> None:
    """Checks the share of `rank` of `ranks` in the files of the checkpoint at `path`; one rank
    checks each file. Raises ValueError for a file whose checksum is another than at the save."""
    marker = read_marker(path)
    sizes, checksums = marker["files"], marker["xxh3_128"]
    names = sorted(sizes, key=lambda name: (-sizes[name], name))[rank::ranks]
    with ThreadPoolExecutor(_READERS) as pool:
        for name, digest in zip(names, pool.map(lambda n: file_digest(path / n), names)):
            if digest != checksums[name]:
                raise ValueError(
                    f"{path / name} is damaged: its checksum is {digest}, {MARKER} says "
                    f"{checksums[name]}; load another checkpoint"
                )


class Writer(dcp.FileSystemWriter):
    """Writes one file per rank, synced to disk, and makes its checksum on the way.

    copy_ahead: bytes to copy from the device before they are written. An error of the disk is
    raised as it came: torch.save, which every tensor goes through, ends with an error of its own
    where a write came out short.
    """

    def __init__(self, path: Path, *, copy_ahead: int) -> None:
        super().__init__(path, thread_count=1, per_thread_copy_ahead=copy_ahead)
        self.fs = self._files = _Files()

    @property
    def checksums(self) -> dict[str, str]:
        """Returns the checksums of this rank's files, by name."""
        return {Path(f.name).name: f.digest.hexdigest() for f in self._files.written}

    def write_data(self, *args: Any, **kw: Any) -> Any:
        """Writes a rank's part of a plan, as torch calls it."""
        try:
            return super().write_data(*args, **kw)
        except Exception as e:
            for file in self._files.written:
                if file.error is not None:
                    raise file.error from e
            raise


class _Files(FileSystem):
    def __init__(self) -> None:
        self.written: list[_File] = []

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        if not str(path).endswith(".distcp"):
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _File(io.FileIO(path, mode)) as file:
            self.written.append(file)
            yield file


class _File(io.BufferedWriter):
    """Makes the checksum of a file that is written from its beginning to its end."""

    def __init__(self, raw: io.FileIO) -> None:
        super().__init__(raw)
        self.digest = Digest()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            n = super().write(data)
        except OSError as e:
            self.error = self.error or e
            raise
        assert n == memoryview(data).nbytes
        self.digest.update(data)
        return n

    def seek(self, *args: Any) -> int:
        raise io.UnsupportedOperation("seek in a file whose checksum is made as it is written")
