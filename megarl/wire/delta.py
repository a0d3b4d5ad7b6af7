"""Encodes what changed between two versions of a bucket, bit for bit, and nothing else.

Elements are compared by their bits, so -0.0 and NaN are exact. A bucket is cut into chunks of at
most CHUNK elements of one size; each says where its changed elements are in the shortest of

    gaps    a byte per changed element: how many unchanged ones come before it. 255 stands for 255
            unchanged elements and no changed one, so any distance can be said.
    bitmap  a bit per element, lowest first.
    dense   nothing: all elements follow.

A payload is the new values of all chunks, then where they go. Values of larger elements come first,
as they do in a bucket, so everything is aligned. Pure: nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch

CHUNK = 1 << 22  # elements; positions of all of them take 32 MiB while a chunk is worked on
_SKIP = 255
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Chunk:
    """Says that `sent` of `count` elements of `itemsize` bytes follow; `where` bytes say which.
    Raises ValueError for numbers that describe no chunk."""

    kind: str
    itemsize: int
    count: int
    sent: int
    where: int

    def __post_init__(self) -> None:
        sizes = (self.itemsize, self.count, self.sent, self.where)
        if (
            self.kind not in _UNPACK
            or not all(isinstance(n, int) and n >= 0 for n in sizes)
            or self.itemsize not in _BITS
            or self.sent > self.count
        ):
            raise ValueError(f"chunk {astuple(self)!r}: not a part of a delta")


@dataclass(frozen=True)
class Delta:
    """Holds chunks and their payload. changed: the number of elements that differ; a dense chunk's
    payload has others, too."""

    chunks: tuple[Chunk, ...]
    payload: torch.Tensor  # uint8
    changed: int

    @property
    def count(self) -> int:
        """Returns the elements of the bucket, changed or not."""
        return sum(c.count for c in self.chunks)

    def body(self) -> list[list[Any]]:
        """Returns the chunks as lists for JSON."""
        return [list(astuple(c)) for c in self.chunks]


def parse(body: Any, nbytes: int) -> tuple[Chunk, ...]:
    """Returns the chunks of a `Delta.body` for a bucket of `nbytes` bytes. Raises ValueError where
    it is none."""
    if not isinstance(body, list) or not all(isinstance(c, list) and len(c) == 5 for c in body):
        raise ValueError("chunks must be a list of [kind, itemsize, count, sent, where]")
    chunks = tuple(Chunk(*c) for c in body)
    if (said := sum(c.count * c.itemsize for c in chunks)) != nbytes:
        raise ValueError(f"chunks of {said} bytes for tensors of {nbytes} bytes")
    return chunks


def payload_bytes(chunks: Sequence[Chunk]) -> int:
    """Returns the bytes of the payload, at least 1: some backends cannot broadcast nothing."""
    return max(1, sum(c.sent * c.itemsize + c.where for c in chunks))


def encode(new: torch.Tensor, old: torch.Tensor, sizes: Sequence[tuple[int, int]]) -> Delta:
    """Returns how `new` differs from `old`, two flat uint8 buckets; `old` may be in host memory.

    sizes: (itemsize, bytes) of the tensors in them, one after another, larger items first.
    """
    chunks: list[Chunk] = []
    values: list[torch.Tensor] = []
    where: list[torch.Tensor] = []
    changed = 0
    for part, itemsize in _cut(sizes):
        bits = _BITS[itemsize]
        ours = new[part].view(bits)
        theirs = old[part].to(new.device, non_blocking=True).view(bits)
        kind, which, what, differing = _encode_chunk(ours, theirs)
        changed += differing
        chunks.append(Chunk(kind, itemsize, ours.numel(), what.numel(), which.numel()))
        values.append(what.view(torch.uint8))
        where.append(which)
    parts = [*values, *where]
    if not any(p.numel() for p in parts):
        parts = [new.new_zeros(1)]
    return Delta(tuple(chunks), torch.cat(parts), changed)


def patches(
    chunks: Sequence[Chunk], payload: torch.Tensor, sizes: Sequence[int]
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yields (number of a tensor, positions in it [N] int64, the bits of their new values [N]).

    sizes: bytes of the tensors. Raises ValueError where positions do not fit their chunk.
    """
    ends = list(accumulate(sizes))
    for start, chunk, positions, values in _decode(chunks, payload):
        size, stop = chunk.itemsize, start + chunk.count * chunk.itemsize
        touched = [i for i, end in enumerate(ends) if end > start and end - sizes[i] < stop]
        bounds = torch.tensor([(ends[i] - start) // size for i in touched], device=payload.device)
        first = 0
        for i, last in zip(touched, torch.searchsorted(positions, bounds).tolist(), strict=True):
            if last > first:
                before = (start - (ends[i] - sizes[i])) // size
                yield i, positions[first:last] + before, values[first:last]
            first = last


def _cut(sizes: Sequence[tuple[int, int]]) -> Iterator[tuple[slice, int]]:
    """Yields (bytes of a chunk, its itemsize), in order."""
    start = 0
    for itemsize, group in groupby(sizes, key=lambda s: s[0]):
        end = start + sum(nbytes for _, nbytes in group)
        step = CHUNK * itemsize
        for first in range(start, end, step):
            yield slice(first, min(first + step, end)), itemsize
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
        "dense": (new.numel() - changed) * new.itemsize,
    }
    kind = min(lengths, key=lengths.__getitem__)
    if kind == "dense":
        return kind, nothing, new, changed
    where = _pack_bits(differs) if kind == "bitmap" else _pack_gaps(gaps, skips, lengths[kind])
    return kind, where, new[positions], changed


def _decode(
    chunks: Sequence[Chunk], payload: torch.Tensor
) -> Iterator[tuple[int, Chunk, torch.Tensor, torch.Tensor]]:
    """Yields (first byte in the bucket, chunk, positions in it, new values) of changed elements."""
    start, value = 0, 0
    where = sum(c.sent * c.itemsize for c in chunks)
    for c in chunks:
        values = payload[value : value + c.sent * c.itemsize].view(_BITS[c.itemsize])
        if c.sent:
            positions = _UNPACK[c.kind](payload[where : where + c.where], c.count)
            if positions.numel() != c.sent or int(positions[-1]) >= c.count:
                raise ValueError(f"chunk {astuple(c)}: its positions do not fit")
            yield start, c, positions, values
        start, value = start + c.count * c.itemsize, value + values.nbytes
        where += c.where


def _pack_gaps(gaps: torch.Tensor, skips: torch.Tensor, length: int) -> torch.Tensor:
    out = torch.full((length,), _SKIP, dtype=torch.uint8, device=gaps.device)
    out[(skips + 1).cumsum(0) - 1] = (gaps % _SKIP).to(torch.uint8)
    return out


def _unpack_gaps(where: torch.Tensor, count: int) -> torch.Tensor:
    lands = where != _SKIP
    return (where.long() + lands).cumsum(0)[lands] - 1


def _pack_bits(differs: torch.Tensor) -> torch.Tensor:
    """Packs eight bools, a little-endian word, into a byte: bit 56 + i of the product is the i-th
    bool, and the shift brings it to bit i."""
    words = torch.nn.functional.pad(differs, (0, -differs.numel() % 8)).view(torch.int64)
    return ((words * 0x0102040810204080) >> 56).to(torch.uint8)


def _unpack_bits(where: torch.Tensor, count: int) -> torch.Tensor:
    bit = torch.arange(8, dtype=torch.uint8, device=where.device)
    return _nonzero(((where[:, None] >> bit) & 1).flatten().view(torch.bool))


def _unpack_all(where: torch.Tensor, count: int) -> torch.Tensor:
    return torch.arange(count, device=where.device)


def _nonzero(mask: torch.Tensor) -> torch.Tensor:
    """Returns where `mask` [N] is true. On hosts numpy finds sparse ones faster than torch."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().squeeze(1)


_UNPACK: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "gaps": _unpack_gaps,
    "bitmap": _unpack_bits,
    "dense": _unpack_all,
}
