"""Says what a message of slices is made of, and puts it into parameters.

Where changes are sent, a head goes before every message, int64 [2]: its bytes and its chunks. No
bytes: nothing has changed. No chunks: the message is whole. Else it holds what changed, bit for bit
(-0.0 and NaN are exact), in chunks of at most CHUNK elements of one size: a table, int64
[chunks, 5], and a payload, the new values of all chunks, then where they go. A row of the table is
(kind, bytes of an element, elements, elements sent, bytes that say where). The kind says in the
shortest way which elements have changed:

    gaps    a byte per changed element: how many unchanged ones come before it. 255 stands for 255
            unchanged elements and no changed one, so any distance can be said.
    bitmap  a bit per element, lowest first.
    dense   nothing: all elements follow.

Trainers encode, server ranks apply. Values of larger elements come first, so everything is aligned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch

from .fingerprint import BITS
from .recording import Entry

KINDS = ("gaps", "bitmap", "dense")
ALIGN = 64  # bytes: in memory that is shared, messages begin at multiples
HEAD = 2  # numbers of a head
HEADS = 1 << 20  # tags of heads begin here: a plan has fewer rounds
ROW = 5 * 8  # bytes of a row of the table
CHUNK = 1 << 22  # elements; positions of all of them take 32 MiB while a chunk is worked on
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
    return _nonzero(((where[:, None] >> bit) & 1).flatten().view(torch.bool))


# ---- what changed


@dataclass(frozen=True)
class Delta:
    """Holds what changed. rows: the table's, one for each chunk. changed: the number of elements
    that differ; a dense chunk's payload has others, too."""

    rows: Sequence[tuple[int, int, int, int, int]]
    payload: torch.Tensor  # uint8
    changed: int

    @property
    def count(self) -> int:
        """Returns the elements of the message, changed or not."""
        return sum(count for _, _, count, _, _ in self.rows)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of `message`."""
        return ROW * len(self.rows) + self.payload.numel()

    def message(self) -> torch.Tensor:
        """Returns what is sent, uint8 [bytes]."""
        table = torch.tensor(self.rows, device=self.payload.device).view(torch.uint8)
        return torch.cat((table.flatten(), self.payload))


def encode(new: torch.Tensor, old: torch.Tensor, sizes: Sequence[tuple[int, int]]) -> Delta:
    """Returns how `new` differs from `old`, two whole messages, uint8; `old` may be in host memory.

    sizes: (bytes of an element, bytes) of what is in them, one after another, larger items first.
    """
    rows, changed = [], 0
    values: list[torch.Tensor] = []
    where: list[torch.Tensor] = []
    for part, size in _cut(sizes):
        bits = BITS[size]
        ours = new[part].view(bits)
        theirs = old[part].to(new.device, non_blocking=True).view(bits)
        kind, which, what, differing = _encode_chunk(ours, theirs)
        changed += differing
        rows.append((KINDS.index(kind), size, ours.numel(), what.numel(), which.numel()))
        values.append(what.view(torch.uint8))
        where.append(which)
    return Delta(rows, torch.cat([*values, *where]), changed)


def _cut(sizes: Sequence[tuple[int, int]]) -> Iterator[tuple[slice, int]]:
    """Yields (bytes of a chunk, bytes of its elements), in order."""
    start = 0
    for size, group in groupby(sizes, key=lambda s: s[0]):
        end = start + sum(nbytes for _, nbytes in group)
        step = CHUNK * size
        for first in range(start, end, step):
            yield slice(first, min(first + step, end)), size
        start = end


def _encode_chunk(
    new: torch.Tensor, old: torch.Tensor
) -> tuple[str, torch.Tensor, torch.Tensor, int]:
    """Returns (kind, where as uint8, values to send, number of elements that differ)."""
    differs = new != old
    positions = _nonzero(differs)
    gaps = positions.diff(prepend=positions.new_tensor([-1])) - 1
    skips = gaps // _SKIP
    nothing, changed = new.new_empty(0, dtype=torch.uint8), positions.numel()
    lengths = {
        "gaps": changed + int(skips.sum()),
        "bitmap": -(-new.numel() // 8),
        "dense": (new.numel() - changed) * new.element_size(),
    }
    kind = min(lengths, key=lengths.__getitem__)
    if kind == "dense":
        return kind, nothing, new, changed
    where = _pack_bits(differs) if kind == "bitmap" else _pack_gaps(gaps, skips, lengths[kind])
    return kind, where, new[positions], changed


def _pack_gaps(gaps: torch.Tensor, skips: torch.Tensor, length: int) -> torch.Tensor:
    out = torch.full((length,), _SKIP, dtype=torch.uint8, device=gaps.device)
    out[(skips + 1).cumsum(0) - 1] = (gaps % _SKIP).to(torch.uint8)
    return out


def _pack_bits(differs: torch.Tensor) -> torch.Tensor:
    """Packs eight bools, a little-endian word, into a byte: bit 56 + i of the product is the i-th
    bool, and the shift brings it to bit i."""
    words = torch.nn.functional.pad(differs, (0, -differs.numel() % 8)).view(torch.int64)
    return ((words * 0x0102040810204080) >> 56).to(torch.uint8)


def _nonzero(mask: torch.Tensor) -> torch.Tensor:
    """Returns where `mask` [N] is true. On hosts numpy finds sparse ones faster than torch."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().squeeze(1)
