"""Byte ranges of files as matrices: what a safetensors file and a torch_dist checkpoint share.

Both store tensors as row-major bytes somewhere in a file, so that any rows of any tensor are read
straight into their place, with neither memory maps (whose pages count as ours) nor whole tensors.
A vector is a matrix of one column.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from megarl.ckpt.safetensors_files import DTYPES


@dataclass(frozen=True, slots=True)
class Block:
    """Rows [row, row + rows), columns [col, col + cols) of a matrix, from byte `offset` on."""

    file: Path
    offset: int
    dtype: torch.dtype
    row: int
    rows: int
    col: int
    cols: int


def read_rows(blocks: Iterable[Block], row: int, out: Tensor) -> None:
    """Rows [row, row + n) of the matrix that `blocks` make up into `out` [n, width], cast to its
    dtype. Memory beyond `out`: as much again, in the file's dtype, where the bytes cannot go
    straight to their place."""
    rows, width = out.shape
    found = 0
    for b in blocks:
        low, high = max(row, b.row), min(row + rows, b.row + b.rows)
        if low >= high:
            continue
        place = out[low - row : high - row, b.col : b.col + b.cols]
        at = b.offset + (low - b.row) * b.cols * b.dtype.itemsize
        if b.cols == width and b.dtype == out.dtype:
            _read(b.file, at, place)
        else:
            data = torch.empty(place.shape, dtype=b.dtype)
            _read(b.file, at, data)
            place.copy_(data)
        found += place.numel()
    assert found == out.numel(), f"rows {row}..{row + rows}: {found} of {out.numel()} elements"


def _read(file: Path, offset: int, out: Tensor) -> None:
    """Fills `out` (contiguous) from byte `offset` on. The file is opened anew: a checkpoint may
    have more of them than a process may keep open."""
    left = memoryview(as_bytes(out))
    with file.open("rb", buffering=0) as f:
        f.seek(offset)
        while left:
            n = f.readinto(left)
            if not n:
                raise ValueError(f"{file} ends at byte {f.tell()}: it is cut off; copy it again")
            left = left[n:]


def as_bytes(tensor: Tensor) -> Any:
    """The memory of a contiguous tensor as a numpy array of bytes; no copy."""
    assert tensor.is_contiguous()
    return tensor.view(-1).view(torch.uint8).numpy()


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of a tensor's shape."""
    width = 1
    for n in shape[1:]:
        width *= n
    return shape[0], width


def safetensors_blocks(file: Path) -> dict[str, Block]:
    """Every tensor of a safetensors file that `safe_open` has found whole."""
    with file.open("rb") as f:
        (length,) = struct.unpack("<Q", f.read(8))
        entries = json.loads(f.read(length))
    blocks = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ValueError(
                f"{file}: tensor {name} has dtype {entry['dtype']}; supported: {', '.join(DTYPES)}"
            )
        rows, cols = matrix(entry["shape"])
        start = 8 + length + entry["data_offsets"][0]
        blocks[name] = Block(file, start, DTYPES[entry["dtype"]], 0, rows, 0, cols)
    return blocks


class _Section:
    """Bytes [start, start + length) of a file, as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self.file, self.start, self.length, self.at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.length}[whence]
        self.at = max(0, base + offset)
        return self.at

    def read(self, n: int = -1) -> bytes:
        left = max(0, self.length - self.at)
        self.file.seek(self.start + self.at)
        data = self.file.read(left if n < 0 else min(n, left))
        self.at += len(data)
        return data


class _TensorPickle(pickle.Unpickler):
    """Reads what torch.save says of one tensor, and runs nothing: tensors become tuples."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, stride, *_: (storage, offset, size, stride)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module in ("torch", "torch.storage"):
            return name  # of a storage class
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def saved_tensor(file: IO[bytes], start: int, length: int, shape: Sequence[int]) -> int:
    """Where in `file` the numbers of a tensor lie that torch.save wrote at [start, start + length).

    ValueError unless they lie there as a whole, row-major tensor of `shape`.
    """
    try:
        with zipfile.ZipFile(_Section(file, start, length)) as archive:  # type: ignore[arg-type]
            records = {i.filename.partition("/")[2]: i for i in archive.infolist()}
        # not by the archive: the checksums may have been left out
        file.seek(_position(file, start, records["data.pkl"]))
        text = io.BytesIO(file.read(records["data.pkl"].file_size))
        storage, offset, size, stride = _TensorPickle(text).load()
        data = records[f"data/{storage[2]}"]
    except (zipfile.BadZipFile, pickle.UnpicklingError, ValueError, KeyError, EOFError) as e:
        raise ValueError(
            f"{file.name}: no tensor at byte {start} ({type(e).__name__}: {e}); the file is "
            "damaged, or not written by torch.distributed.checkpoint"
        ) from e
    if (
        offset != 0
        or tuple(size) != tuple(shape)
        or not torch.empty(0, device="meta").as_strided(size, stride).is_contiguous()
        or data.compress_type != zipfile.ZIP_STORED
    ):
        raise ValueError(f"{file.name}: the tensor at byte {start} is not stored plainly")
    return _position(file, start, data)


def _position(file: IO[bytes], start: int, record: zipfile.ZipInfo) -> int:
    """Where in `file` a record's data begins: behind its local header."""
    at = start + record.header_offset
    file.seek(at)
    name_length, extra_length = struct.unpack("<26x2H", file.read(30))
    return at + 30 + int(name_length) + int(extra_length)
