"""Says what a message of slices is made of, and puts it into parameters.

Where changes are sent, a head goes before every message, int64 [2]: its bytes and its chunks. No
bytes: nothing has changed. No chunks: the message is whole. Else it is a table, int64 [chunks, 5],
and a payload, as `megarl.wire.delta` makes them: the new values of all chunks, then where they go.
A row is (kind, bytes of an element, elements, elements sent, bytes that say where).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .fingerprint import BITS
from .recording import Entry

KINDS = ("gaps", "bitmap", "dense")
HEAD = 2  # numbers of a head
HEADS = 1 << 20  # tags of heads begin here: a plan has fewer rounds
ROW = 5 * 8  # bytes of a row of the table
_SKIP = 255

# first byte in the message, last, dtype, parameter, offset, shape, strides
View = tuple[int, int, torch.dtype, str, int, Sequence[int], Sequence[int]]
# first byte in the message, bytes of an element, positions from there, bits of the new values
Patch = tuple[int, int, torch.Tensor, torch.Tensor]


def laid_out(
    slices: Sequence[Any], entries: Sequence[Entry], dtypes: Mapping[str, torch.dtype]
) -> tuple[int, list[View]]:
    """Returns a whole message's bytes, and where each view of its slices is in it. dtypes: of HF
    tensors. Slices of larger items come first, so that all are aligned."""
    found: list[View] = []
    named, end = [], 0
    for part in slices:
        e = entries[part if isinstance(part, int) else part[0]]
        whole: Any = [[e.offset, e.shape, e.strides]]
        named.append((e.param, dtypes[e.tensor], whole if isinstance(part, int) else part[1]))
    for param, dtype, views in sorted(named, key=lambda n: -n[1].itemsize):
        for offset, shape, strides in views:
            start, end = end, end + math.prod(shape) * dtype.itemsize
            found.append((start, end, dtype, param, offset, shape, strides))
    return end, found


def land(
    params: Mapping[str, torch.Tensor], views: Sequence[View], message: torch.Tensor, chunks: int
) -> None:
    """Copies a message, uint8 [bytes], into the views of parameters it is for. as_strided checks
    the bounds of their storages. Raises ValueError for changes of another message."""
    if chunks:
        _apply(params, views, message, chunks)
    elif message.numel():
        for start, end, dtype, name, offset, shape, strides in views:
            target = params[name].as_strided(shape, strides, offset)
            target.copy_(message[start:end].view(dtype).view(shape))


def _apply(
    params: Mapping[str, torch.Tensor], views: Sequence[View], message: torch.Tensor, chunks: int
) -> None:
    """Puts changed numbers where those of the whole message would go."""
    for start, size, positions, values in _patches(message, chunks, views[-1][1]):
        stop = start + int(positions[-1] + 1) * size
        touched = [v for v in views if v[1] > start and v[0] < stop]
        ends = [(v[1] - start) // size for v in touched]
        bounds = torch.searchsorted(positions, torch.tensor(ends, device=positions.device))
        first = 0
        for view, last in zip(touched, bounds.tolist(), strict=True):
            if last > first:
                within = positions[first:last] + (start - view[0]) // size
                _put(params, view, within, values[first:last])
            first = last


def _put(
    params: Mapping[str, torch.Tensor], view: View, within: torch.Tensor, bits: torch.Tensor
) -> None:
    """Writes numbers `within` a view, by their row-major order."""
    _, _, dtype, name, offset, shape, strides = view
    if dtype.itemsize != bits.element_size():
        raise ValueError(f"{name}: changes of {bits.element_size()} bytes each for {dtype}")
    home = params[name]
    where = torch.full_like(within, offset)
    for n, step in zip(reversed(shape), reversed(strides), strict=True):
        where += within % n * step
        within = within // n
    size = home.untyped_storage().nbytes() // home.itemsize
    home.as_strided((size,), (1,), 0)[where] = bits.view(dtype).to(home.dtype)


def _patches(message: torch.Tensor, chunks: int, nbytes: int) -> Iterator[Patch]:
    """Yields what changed in a message that would be `nbytes` whole, chunk by chunk."""
    rows = message[: chunks * ROW].view(torch.int64).view(chunks, -1).tolist()
    payload = message[chunks * ROW :]
    said = sum(size * count for _, size, count, _, _ in rows)
    length = sum(size * sent + there for _, size, _, sent, there in rows)
    if (said, length) != (nbytes, payload.numel()):
        raise ValueError(
            f"changes of {said} bytes in {length} for a message of {nbytes} in {payload.numel()}"
        )
    start, value, place = 0, 0, sum(size * sent for _, size, _, sent, _ in rows)
    for kind, size, count, sent, there in rows:
        if sent:
            values = payload[value : value + sent * size].view(BITS[size])
            positions = _positions(KINDS[kind], payload[place : place + there], count)
            if positions.numel() != sent or int(positions[-1]) >= count:
                raise ValueError("the positions of changes do not fit their chunk")
            yield start, size, positions, values
        start, value, place = start + size * count, value + sent * size, place + there


def _positions(kind: str, where: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the numbers of a chunk's changed elements, in order, int64."""
    if kind == "dense":
        return torch.arange(count, device=where.device)
    if kind == "gaps":
        lands = where != _SKIP
        return (where.long() + lands).cumsum(0)[lands] - 1
    bit = torch.arange(8, dtype=torch.uint8, device=where.device)
    return ((where[:, None] >> bit) & 1).flatten().nonzero().squeeze(1)
