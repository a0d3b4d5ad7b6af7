"""A disk without room, as the system and torch's writers say it, is one readable line."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from megarl.ckpt.files import Writer
from megarl.utils.files import DiskFull, check_room, file_digest, full_disk_named
from tests.full_disk import files_below

LINE = r"saving x: .*: 5\.0 MiB are needed, /.* has .* free .*; make room there, or set another fil"


def test_what_torch_makes_of_a_short_write_is_named(tmp_path: Path) -> None:
    big = torch.zeros(1 << 20)
    place = tmp_path / "not yet there"
    with (
        pytest.raises(DiskFull, match=LINE) as e,
        files_below(1 << 20),
        full_disk_named("saving x", place, 5 << 20),
    ):
        torch.save(big, tmp_path / "x.pt")
    assert "\n" not in str(e.value)


def test_the_writer_of_checkpoints_raises_the_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(writer: Writer, name: str, *things: object) -> None:
        with writer.fs.create_stream(tmp_path / name, "wb") as f:
            for thing in things:
                torch.save(thing, f)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", write)
    writer = Writer(tmp_path, copy_ahead=0)
    with pytest.raises(OSError) as e, files_below(1 << 20):
        writer.write_data("a.distcp", torch.zeros(1 << 20))
    assert e.value.errno == errno.EFBIG
    writer = Writer(tmp_path, copy_ahead=0)
    writer.write_data("b.distcp", torch.arange(9.0), {"more": 1})
    assert writer.checksums == {"b.distcp": file_digest(tmp_path / "b.distcp")}


def test_a_disk_that_is_too_full_is_seen_before_anything_is_written(tmp_path: Path) -> None:
    check_room("saving x", tmp_path, 1)
    with pytest.raises(
        DiskFull, match=r"saving x: the disk is too full: 1048576\.0 TiB are needed"
    ):
        check_room("saving x", tmp_path, 1 << 60)


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), full_disk_named("saving x", tmp_path):
        raise PermissionError(errno.EACCES, "no")
    named = pytest.raises(DiskFull, match=r"saving x failed on rank 1: .*No space left")
    with named, full_disk_named("saving x", tmp_path):
        raise RuntimeError("saving x failed on rank 1: OSError: No space left on device")


def test_a_full_disk_is_seen_through_an_error_of_the_clean_up(tmp_path: Path) -> None:
    named = pytest.raises(DiskFull, match="No space left")
    with named, full_disk_named("saving x", tmp_path):
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        finally:
            raise ValueError("nothing to close")
