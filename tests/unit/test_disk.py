"""A disk without room, as the system and torch's writers say it, is one readable line."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from megarl.ckpt.writer import _Files
from megarl.utils.digests import file_digest
from megarl.utils.disk import DiskFull, check_room, full_disk_named
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


def test_the_writer_of_checkpoints_keeps_the_first_error(tmp_path: Path) -> None:
    files = _Files()
    with (
        pytest.raises(RuntimeError),
        files_below(1 << 20),
        files.create_stream(tmp_path / "a.distcp", "wb") as f,
    ):
        torch.save(torch.zeros(1 << 20), f)
    error = files.written[0].error
    assert error is not None and error.errno == errno.EFBIG
    with files.create_stream(tmp_path / "b.distcp", "wb") as f:
        torch.save(torch.arange(9.0), f)
        torch.save({"more": 1}, f)
    assert files.written[1].digest.hexdigest() == file_digest(tmp_path / "b.distcp")


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
