"""Reads rows of tensors out of safetensors files and torch_dist checkpoints, in bounded memory.

Both store a tensor as row-major bytes somewhere in a file. Any rows are read straight into their
place, with neither memory maps (whose pages count as this process's) nor whole tensors. A tensor
counts as a matrix: all its dimensions but the first are columns.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.utils import _create_file_view

from megarl.models.ops import View
from megarl.utils.files import human
from megarl.wire.buckets import Member

MAX_MEMORY = 4 << 30
_MIN_CHUNK, _MAX_CHUNK = 1 << 20, 64 << 20
# a worker's buffer once, and twice for what it reads in a wider dtype to cast
_COPIES = 3


@dataclass(frozen=True, slots=True)
class Block:
    """Says that rows [row, row + rows), columns [col, col + cols) of a matrix lie in `file` from
    byte `offset` on. Without a file they are zero."""

    file: Path | None
    offset: int
    dtype: torch.dtype
    row: int
    rows: int
    col: int
    cols: int


@dataclass(frozen=True, slots=True)
class Permutation:
    """Says that rows [row, row + rows) of a matrix are `view` of the numbers of rows [source_row,
    source_row + source_rows) of the matrix that `blocks` make up. These are read together."""

    blocks: tuple[Rows, ...]
    source_row: int
    source_rows: int
    view: View
    row: int
    rows: int

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype in the files."""
        return self.blocks[0].dtype

    def read(self, columns: int) -> Tensor:
        """Returns the rows, [rows, columns], in the files' dtype."""
        width = self.rows * columns // self.source_rows
        numbers = torch.empty(self.source_rows, width, dtype=self.dtype)
        read_rows(self.blocks, self.source_row, numbers)
        return numbers.as_strided(self.view.shape, self.view.strides).reshape(self.rows, columns)


Rows = Block | Permutation


class Run(NamedTuple):
    """Says that rows [row, row + rows) of matrix `source` are rows [target_row, ...) of `target`.
    With a view they are `target_rows` rows, and their numbers are the view of the source's."""

    source: str
    row: int
    target: str
    target_row: int
    rows: int
    view: View | None = None
    target_rows: int = 0

    def reversed(self) -> Run:
        """Returns the run from the target to the source."""
        there, here = (self.target, self.target_row), (self.source, self.row)
        if self.view is None:
            return Run(*there, *here, self.rows)
        return Run(*there, *here, self.target_rows, self.view.backwards(), self.rows)


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Returns (rows, columns) of a tensor's shape."""
    return shape[0], math.prod(shape[1:])


def moved(blocks: Mapping[str, Sequence[Rows]], runs: Iterable[Run]) -> dict[str, list[Rows]]:
    """Returns where the rows of each target lie, given `blocks` of each source."""
    targets: dict[str, list[Rows]] = {}
    for run in runs:
        if run.view is not None:
            rows = (run.row, run.rows, run.view, run.target_row, run.target_rows)
            block = Permutation(tuple(blocks[run.source]), *rows)
            targets.setdefault(run.target, []).append(block)
            continue
        for b in blocks[run.source]:
            assert isinstance(b, Block)
            low, high = max(run.row, b.row), min(run.row + run.rows, b.row + b.rows)
            if low < high:
                offset = b.offset + (low - b.row) * b.cols * b.dtype.itemsize
                row = run.target_row + low - run.row
                part = replace(b, offset=offset, row=row, rows=high - low)
                targets.setdefault(run.target, []).append(part)
    return targets


def read_rows(blocks: Iterable[Rows], row: int, out: Tensor) -> None:
    """Reads rows [row, row + n) of the matrix that `blocks` make up into `out` [n, width].

    They are cast to `out`'s dtype. Memory beyond `out`: as much again, in the file's dtype, where
    the bytes cannot go straight to their place. Raises ValueError for a file that is cut off.
    """
    rows, width = out.shape
    filled = 0
    for b in blocks:
        low, high = max(row, b.row), min(row + rows, b.row + b.rows)
        if low >= high:
            continue
        if isinstance(b, Permutation):
            out[low - row : high - row] = b.read(width)[low - b.row : high - b.row]
            filled += (high - low) * width
            continue
        place = out[low - row : high - row, b.col : b.col + b.cols]
        offset = b.offset + (low - b.row) * b.cols * b.dtype.itemsize
        if b.file is None:
            place.zero_()
        elif b.cols == width and b.dtype == out.dtype:
            _read(b.file, offset, place)
        else:
            data = torch.empty(place.shape, dtype=b.dtype)
            _read(b.file, offset, data)
            place.copy_(data)
        filled += place.numel()
    assert filled == out.numel(), f"rows {row}..{row + rows}: {filled} of {out.numel()} elements"


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


def torch_block(file: Path, place: _StorageInfo, dtype: torch.dtype, shape: Sequence[int]) -> Block:
    """Finds where the numbers of one tensor lie in a file that torch.distributed.checkpoint wrote.

    place: its note of the bytes that torch.save wrote there. Raises ValueError unless they are a
    whole, row-major tensor of `dtype` and `shape`.
    """
    with file.open("rb") as f:
        view: Any = _create_file_view(f, place.offset, place.length)
        try:
            tensor = torch.load(view, map_location="meta", weights_only=True)
            view.seek(0)
            archive: Any = torch._C.PyTorchFileReader(view)
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


class Buffer:
    """Lends a worker's memory of `nbytes` to one tensor at a time.

    A tensor is a storage of its own, so that torch.save writes it and no more.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.data = nbytes, np.empty(nbytes, dtype=np.uint8)

    def tensor(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Returns an unfilled tensor over this memory; the one before it is overwritten."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > len(self.data):  # a row wider than a chunk
            self.data = np.empty(nbytes, dtype=np.uint8)
        return torch.frombuffer(self.data[:nbytes], dtype=dtype).view(shape)


def chunks(
    blocks: Iterable[Rows], member: Member, buffer: Buffer, itemsize: int | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yields (row, rows [n, columns]) of a tensor, in its dtype; each is overwritten by the next.
    They are as many at a time as fit into `buffer`, if a number takes `itemsize` bytes there."""
    blocks = tuple(blocks)
    rows, width = matrix(member.shape)
    step = max(1, buffer.nbytes // (width * (itemsize or member.dtype.itemsize)))
    for row in range(0, rows, step):
        out = buffer.tensor((min(step, rows - row), width), member.dtype)
        read_rows(blocks, row, out)
        yield row, out


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
