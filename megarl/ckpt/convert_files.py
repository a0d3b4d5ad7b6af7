"""Reads rows of tensors out of safetensors files and torch_dist checkpoints.

Both store a tensor as row-major bytes somewhere in a file. The libraries say where; any rows are
then read straight into their place, with neither memory maps (whose pages count as this process's)
nor whole tensors. A vector is a matrix of one column.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megarl.ckpt.safetensors import DTYPES


@dataclass(frozen=True, slots=True)
class Block:
    """Says that rows [row, row + rows), columns [col, col + cols) of a matrix lie in `file` from
    byte `offset` on."""

    file: Path
    offset: int
    dtype: torch.dtype
    row: int
    rows: int
    col: int
    cols: int


def read_rows(blocks: Iterable[Block], row: int, out: Tensor) -> None:
    """Reads rows [row, row + n) of the matrix that `blocks` make up into `out` [n, width].

    They are cast to `out`'s dtype. Memory beyond `out`: as much again, in the file's dtype, where
    the bytes cannot go straight to their place. Raises ValueError for a file that is cut off.
    """
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
    """Fills `out` (contiguous) from byte `offset` on. It opens the file anew, as a checkpoint may
    have more files than a process may keep open."""
    left = memoryview(as_bytes(out))
    with file.open("rb", buffering=0) as f:
        f.seek(offset)
        while left:
            n = f.readinto(left)
            if not n:
                raise ValueError(f"{file} ends at byte {f.tell()}: it is cut off; copy it again")
            left = left[n:]


def as_bytes(tensor: Tensor) -> Any:
    """Returns the memory of a contiguous tensor as a numpy array of bytes, without a copy."""
    assert tensor.is_contiguous()
    return tensor.view(-1).view(torch.uint8).numpy()


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Returns (rows, columns) of a tensor's shape: all dimensions but the first are columns."""
    width = 1
    for n in shape[1:]:
        width *= n
    return shape[0], width


def safetensors_blocks(file: Path) -> dict[str, Block]:
    """Returns every tensor of a safetensors file that `safe_open` has found whole, by name. Raises
    ValueError for a dtype that is not supported."""
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


def stored_block(
    reader: FileSystemReader, place: _StorageInfo, dtype: torch.dtype, shape: Sequence[int]
) -> Block:
    """Finds where the numbers of one tensor of a dist checkpoint lie, without reading them.

    place: torch's note of the file, and of the bytes in it that torch.save wrote. The block begins
    at row 0, column 0; a shape of more than two dimensions counts as [rows, rest].
    Raises ValueError unless a whole, row-major tensor of `dtype` and `shape` lies there.
    """
    file = Path(reader.path) / place.relative_path
    with file.open("rb") as f:
        try:
            with torch.serialization.skip_data():  # memory that is never touched takes no room
                tensor = torch.load(reader._slice_file(f, place), weights_only=True)
            archive: Any = torch._C.PyTorchFileReader(reader._slice_file(f, place))
            start = place.offset + archive.get_record_offset("data/0")
        except (RuntimeError, pickle.UnpicklingError, ValueError, LookupError, EOFError) as e:
            raise ValueError(
                f"{file}: no tensor at byte {place.offset} ({type(e).__name__}: {e}); the file is "
                "damaged, or not written by torch.distributed.checkpoint"
            ) from e
    whole = isinstance(tensor, Tensor) and tensor.is_contiguous() and tensor.storage_offset() == 0
    if not whole or (tensor.dtype, tuple(tensor.shape)) != (dtype, tuple(shape)):
        raise ValueError(f"{file}: the tensor at byte {place.offset} is not stored plainly")
    rows, cols = matrix(shape)
    return Block(file, start, dtype, 0, rows, 0, cols)
