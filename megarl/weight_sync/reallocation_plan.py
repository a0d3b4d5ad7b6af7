"""Plans which rank sends which numbers to which when weights change their Megatron layout.

Pure: two piece tables of the same model give the transfers, and these their rounds. A transfer is
the overlap of what a rank of the target holds with one owner's piece of the source, in row-major
order of the HF tensor, so that each side finds its numbers by itself.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby

from megarl.models.ops import Shape
from megarl.models.piece_table import HfTensor, Piece, PieceTable, Place, View
from megarl.parallel.layout import Layout

Box = tuple[Shape, Shape]  # [start, stop)


@dataclass(frozen=True, slots=True)
class Side:
    """A rank, and where in its parameter the numbers are: views one after the other."""

    rank: int
    param: str
    views: tuple[View, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Moves `numel` numbers of an HF tensor from `source` to `target`, maybe of one rank."""

    tensor: str
    numel: int
    source: Side
    target: Side


def plan_transfers(
    source: PieceTable,
    target: PieceTable,
    source_ranks: Sequence[int] | None = None,
    target_ranks: Sequence[int] | None = None,
    *,
    node_size: int = 8,
) -> Iterator[Transfer]:
    """Yields transfers that fill every element a rank of `target` holds exactly once, padding
    aside, in HF order.

    source_ranks, target_ranks: the ranks of one world that the layouts' ranks 0, 1, ... are; by
    default 0, 1, ... themselves. A rank takes from itself what it has, else from a rank of its node
    of `node_size`, else from the replicas in turn. Raises AssertionError for tables of other
    models.

    One step per transfer and piece: the pieces that a box meets are found by bisection (see
    _Pieces).
    """
    assert [t.name for t in source.tensors] == [t.name for t in target.tensors], "other models"
    choose = _chooser(_holders(source.layout, source_ranks), node_size)
    receivers = _holders(target.layout, target_ranks)
    for theirs, ours in zip(source.tensors, target.tensors, strict=True):
        pieces = _Pieces(theirs)
        for piece in (*ours.pieces, *ours.replicas):
            overlaps = [
                (pieces.copies[i], overlap, _cut(piece, overlap))
                for i, overlap in pieces.meeting(piece)
            ]
            found = sum(_numel(overlap) for _, overlap, _ in overlaps)
            assert found == piece.numel, f"{ours.name}: {found} elements found of those of {piece}"
            for rank in receivers(piece.place):
                for copies, overlap, views in overlaps:
                    held, sender = choose(copies, rank)
                    yield Transfer(
                        ours.name,
                        _numel(overlap),
                        Side(sender, held.param, _cut(held, overlap)),
                        Side(rank, piece.param, views),
                    )


def plan_rounds(transfers: Sequence[Transfer], itemsizes: Sequence[int], limit: int) -> list[range]:
    """Returns rounds, each a range of `transfers` that go at once: no rank sends and receives more
    than `limit` bytes in all, unless one transfer alone is larger. itemsizes: bytes of a number of
    each."""
    rounds: list[range] = []
    load: dict[int, int] = {}
    start = 0
    for i, (t, itemsize) in enumerate(zip(transfers, itemsizes, strict=True)):
        nbytes, ends = t.numel * itemsize, {t.source.rank, t.target.rank}
        if i > start and any(load.get(rank, 0) + nbytes > limit for rank in ends):
            rounds.append(range(start, i))
            load, start = {}, i
        for rank in ends:
            load[rank] = load.get(rank, 0) + nbytes
    if start < len(transfers):
        rounds.append(range(start, len(transfers)))
    return rounds


class _Pieces:
    """Finds the owners of a tensor that a box overlaps, each with its copies elsewhere.

    Owners that span the same rows are a band, in the order of their columns. Layouts cut a tensor
    into bands or a band into columns, so one bisection over bands and one in each band that is met
    find all of them.
    """

    def __init__(self, tensor: HfTensor) -> None:
        self.owners = sorted(tensor.pieces, key=lambda p: (p.start[0], p.stop[0], p.start))
        self._columns = [_columns(p)[0] for p in self.owners]
        copies: dict[Box, list[Piece]] = {(p.start, p.stop): [p] for p in self.owners}
        for p in tensor.replicas:
            copies[p.start, p.stop].append(p)
        self.copies = list(copies.values())
        rows = groupby(range(len(self.owners)), key=lambda i: _rows(self.owners[i]))
        bands = [(start, stop, list(members)) for (start, stop), members in rows]
        self._bands = [(members[0], members[-1] + 1) for _, _, members in bands]
        self._first_rows = [start for start, _, _ in bands]
        self._reach = list(accumulate((stop for _, stop, _ in bands), max))

    def meeting(self, piece: Piece) -> Iterator[tuple[int, Box]]:
        """Yields numbers of the owners whose boxes overlap that of `piece`, and the overlaps."""
        (top, bottom), (left, right) = _rows(piece), _columns(piece)
        first = bisect_right(self._reach, top)
        for start, stop in self._bands[first : bisect_left(self._first_rows, bottom)]:
            i = max(start, bisect_right(self._columns, left, start, stop) - 1)
            while i < stop and self._columns[i] < right:
                if box := intersection(self.owners[i], piece):
                    yield i, box
                i += 1


def _rows(piece: Piece) -> tuple[int, int]:
    return piece.start[0], piece.stop[0]


def _columns(piece: Piece) -> tuple[int, int]:
    """Returns the columns of a box; a vector has one."""
    return (piece.start[1], piece.stop[1]) if len(piece.start) > 1 else (0, 1)


def intersection(a: Piece, b: Piece) -> Box | None:
    """Returns the box in which two pieces of one HF tensor overlap, None where they do not."""
    start = tuple(map(max, a.start, b.start))
    stop = tuple(map(min, a.stop, b.stop))
    return (start, stop) if all(x < y for x, y in zip(start, stop, strict=True)) else None


def _numel(box: Box) -> int:
    return math.prod(b - a for a, b in zip(*box, strict=True))


def _cut(piece: Piece, box: Box) -> tuple[View, ...]:
    """Returns the part of `piece` inside `box`, row by row: at most a part of the view's first
    group of rows, its whole groups, and a part of its last."""
    first, last = box[0][0] - piece.start[0], box[1][0] - piece.start[0]
    view = piece.view
    vector = len(box[0]) == 1
    shape, strides = view.shape, view.strides
    if vector:  # a matrix of one column
        shape, strides = (*shape, 1), (*strides, 1)
    if len(shape) == 2:  # one group
        shape, strides = (1, *shape), (0, *strides)
    _, rows, cols = shape
    left, width = (0, cols) if vector else (box[0][1] - piece.start[1], box[1][1] - box[0][1])

    def part(group: int, groups: int, row: int, n: int) -> View:
        offset = view.offset + group * strides[0] + row * strides[1] + left * strides[2]
        return View(offset, (groups, n, width), strides)

    return tuple(part(*p) for p in _groups(first, last, rows))


def _groups(first: int, last: int, rows: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields [first, last) by groups of `rows`: (first group, groups, first row, rows of each)."""
    while first < last:
        group, row = divmod(first, rows)
        if row or last - first < rows:
            n = min(rows - row, last - first)
            yield group, 1, row, n
        else:
            groups = (last - first) // rows
            yield group, groups, 0, rows
            n = groups * rows
        first += n


Holders = Callable[[Place], tuple[int, ...]]


def _holders(layout: Layout, ranks: Sequence[int] | None) -> Holders:
    """Returns a function from a place to the ranks that hold what is there, in order of the
    data-parallel replicas."""
    names = range(layout.world_size) if ranks is None else ranks

    @cache
    def at(place: Place) -> tuple[int, ...]:
        if place.tp is not None:
            first, step = layout.dense_rank(pp=place.pp, tp=place.tp), layout.tp
        else:
            first, step = place.rank(layout), layout.etp * layout.ep
        stage = layout.world_size // layout.pp
        return tuple(names[r] for r in range(first, (place.pp + 1) * stage, step))

    return at


def _chooser(
    holders: Holders, node_size: int
) -> Callable[[Sequence[Piece], int], tuple[Piece, int]]:
    """Returns a function that chooses, from pieces that are copies of each other, the copy and the
    rank that a receiver takes it from."""

    @cache
    def nearest(places: tuple[Place, ...], rank: int) -> tuple[int, int]:
        found = [(i, r) for i, place in enumerate(places) for r in holders(place)]
        if own := [x for x in found if x[1] == rank]:
            return own[0]
        near = [x for x in found if x[1] // node_size == rank // node_size]
        found = near or found
        return found[rank % len(found)]

    def choose(copies: Sequence[Piece], rank: int) -> tuple[Piece, int]:
        i, sender = nearest(tuple(p.place for p in copies), rank)
        return copies[i], sender

    return choose
