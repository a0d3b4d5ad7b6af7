"""Puts a rank's pieces of a bucket into one contiguous message, or several bounded ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megarl.models.piece_table import Piece, View

ALIGNMENT = 64  # bytes, that of torch's host allocator


@dataclass(frozen=True, slots=True)
class Part:
    """Says where a piece goes: to member `name` of the bucket, at byte `offset` of the message."""

    name: str
    piece: Piece
    dtype: torch.dtype
    offset: int
    nbytes: int


Message = Sequence[Part]


def length(message: Message) -> int:
    """Returns the bytes of a message."""
    return message[-1].offset + message[-1].nbytes


def make_messages(pieces: Sequence[Part], limit: int | None = None) -> list[Message]:
    """Puts the parts of one source, whatever their offsets, into messages of at most `limit` bytes.

    Parts are aligned in a message. A row of a matrix is the least that is sent, even above the
    limit.
    """
    messages: list[list[Part]] = []
    end = 0
    for part in _cut(pieces, limit):
        start = -(-end // part.dtype.itemsize) * part.dtype.itemsize
        if not messages or (limit is not None and start + part.nbytes > limit):
            messages.append([])
            start = 0
        messages[-1].append(replace(part, offset=start))
        end = start + part.nbytes
    return list(messages)


def slots(messages: Mapping[int, Sequence[Message]]) -> tuple[dict[int, slice], int]:
    """Makes room for one message of each source at a time. Returns the bytes of each source, and
    how many there are in all."""
    out, end = {}, 0
    for src, own in messages.items():
        size = max(map(length, own))
        out[src] = slice(end, end + size)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return out, end


def _cut(parts: Sequence[Part], limit: int | None) -> Iterator[Part]:
    """Yields the parts; one larger than `limit` bytes comes in several."""
    for part in parts:
        if limit is None or part.nbytes <= limit:
            yield part
            continue
        for piece in split(part.piece, limit // part.dtype.itemsize):
            yield replace(part, piece=piece, nbytes=piece.numel * part.dtype.itemsize)


def split(piece: Piece, numel: int) -> Iterator[Piece]:
    """Yields `piece` as consecutive pieces of at most `numel` numbers, but of a row at least."""
    shape, strides = piece.view.shape, piece.view.strides
    inner = math.prod(shape[1:])
    step = max(1, numel // inner)
    box_rows = (piece.stop[0] - piece.start[0]) // shape[0]  # to one of the view's first dimension
    for i in range(0, shape[0], step):
        n = min(step, shape[0] - i)
        part = replace(
            piece,
            view=View(piece.view.offset + i * strides[0], (n, *shape[1:]), strides),
            start=(piece.start[0] + i * box_rows, *piece.start[1:]),
            stop=(piece.start[0] + (i + n) * box_rows, *piece.stop[1:]),
        )
        if box_rows > 1 and inner > numel:  # a group of rows: row by row
            yield from split(
                replace(part, view=View(part.view.offset, shape[1:], strides[1:])), numel
            )
        else:
            yield part
