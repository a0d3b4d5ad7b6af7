"""Turns plain data with tensors into bytes and back; a tensor's own bytes are copied as they are.

A frame is what `pickle` makes of the data without its tensors, behind it the tensors' bytes. On the
reading side tensors are views of the frame, which lives as long as one of them.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

_SIZE, _ALIGN = 8, 64  # bytes: of a number, and what every tensor begins at a multiple of


class _Pickler(pickle.Pickler):
    """Leaves the bytes of tensors out, and collects them in `parts`, each at its place."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.parts: list[tuple[int, Tensor]] = []
        self.size = 0

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not Tensor:
            return None
        raw = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        at = self.size
        self.parts.append((at, raw))
        self.size = _aligned(at + len(raw))
        return at, obj.dtype, tuple(obj.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, raw: memoryview) -> None:
        super().__init__(file)
        self._raw = raw

    def persistent_load(self, pid: Any) -> Tensor:
        at, dtype, shape = pid
        count = 1
        for n in shape:
            count *= n
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._raw, dtype=dtype, count=count, offset=at).view(shape)


def packed(value: Any) -> bytearray:
    """Returns a frame of plain data, with tensors of any dtype and shape inside."""
    head = io.BytesIO()
    pickler = _Pickler(head)
    pickler.dump(value)
    text = head.getvalue()
    start = _aligned(_SIZE + len(text))
    frame = bytearray(start + pickler.size)
    frame[:_SIZE] = len(text).to_bytes(_SIZE, "little")
    frame[_SIZE : _SIZE + len(text)] = text
    for at, raw in pickler.parts:
        frame[start + at : start + at + len(raw)] = raw.numpy().data
    return frame


def unpacked(frame: bytearray) -> Any:
    """Returns what was packed."""
    size = int.from_bytes(frame[:_SIZE], "little")
    text = io.BytesIO(memoryview(frame)[_SIZE : _SIZE + size])
    return _Unpickler(text, memoryview(frame)[_aligned(_SIZE + size) :]).load()


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
