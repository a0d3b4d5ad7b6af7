"""Extends torch's writer of distributed checkpoints by the checksum of each file it writes."""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

from megarl.utils.files import Digest


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
