"""Cuts what a receiver keeps into slices that one rank of the source holds each: two tables meet.

A piece table says what the ranks of a source have, a target table what one receiver keeps. Every
overlap of an entry with an owner's piece is a slice, cut further where it exceeds a round. The
ranks that hold the same numbers are its source; which of them sends is decided elsewhere, so
receivers with equal tables share all of this.

Example: two ranks have rows 0-1 and 2-3 of w [4, 2], a receiver keeps rows 1-2 as its parameter p:

    entry                  slice    source    where it is there    where it goes
    w, rows 1-2, p         row 1    0         w at element 2       p at element 0
                           row 2    1         w at element 0       p at element 2
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.models.ops import Shape
from megarl.models.piece_table import HfTensor, Piece, PieceTable, Place, View
from megarl.parallel.layout import Layout
from megarl.transfer.boxes import Box, BoxIndex, cut, extents, numel

Ints = NDArray[np.int64]
Ranks = tuple[int, ...]


class Slice(NamedTuple):
    """Says that box [start, stop) of an HF tensor, in row-major order, is views of a parameter of
    one end, one after the other. An entry of a table is a slice of one view."""

    tensor: str
    start: Shape
    stop: Shape
    param: str
    views: tuple[View, ...]

    @property
    def box(self) -> Box:
        """Returns (start, stop)."""
        return self.start, self.stop

    @property
    def numel(self) -> int:
        """Returns how many numbers the slice has."""
        return numel(self.box)


@dataclass(frozen=True)
class TargetTable:
    """Holds the entries of one receiver, whose views count from the beginning of a parameter's
    storage. `digest` names them: tables of one digest are planned once, so it covers the entries,
    and not the parameters' shapes alone."""

    entries: Sequence[Slice]
    digest: str


def read_entries(rows: Iterable[Sequence[Any]]) -> list[Slice]:
    """Makes entries of JSON's rows: HF tensor, start, stop, parameter, and of its view offset,
    shape and strides, in elements."""
    return [
        Slice(t, tuple(a), tuple(b), param, (View(offset, tuple(shape), tuple(strides)),))
        for t, a, b, param, offset, shape, strides in rows
    ]


def layout_targets(table: PieceTable) -> list[TargetTable]:
    """Returns what each rank of a layout keeps; ranks that keep the same share a table."""
    kept_at: dict[Place, list[Slice]] = defaultdict(list)
    for t in table.tensors:
        for p in (*t.pieces, *t.replicas):
            kept_at[p.place].append(Slice(t.name, p.start, p.stop, p.param, (p.view,)))

    @cache
    def kept(places: tuple[Place, ...]) -> TargetTable:
        return TargetTable([e for place in places for e in kept_at[place]], repr(places))

    return [kept(tuple(p for p in kept_at if p.holds(c))) for c in table.layout.all_coords]


def copies(tensor: HfTensor) -> dict[Box, list[Piece]]:
    """Returns the owners' boxes of a tensor, and the pieces that hold what is there: the owner,
    then its replicas."""
    alike: dict[Box, list[Piece]] = {(p.start, p.stop): [p] for p in tensor.pieces}
    for p in tensor.replicas:
        alike[p.start, p.stop].append(p)
    return alike


def holders(layout: Layout) -> Callable[[Place], Ranks]:
    """Returns a function from a place to the ranks that hold what is there."""

    @cache
    def at(place: Place) -> Ranks:
        return tuple(r for r, c in enumerate(layout.all_coords) if place.holds(c))

    return at


class Sources:
    """Finds the pieces of the source's tensors that an entry overlaps, and who holds them.

    Sources are numbered: source i is `ranks[i]`, all ranks that hold the same pieces, in order.
    """

    def __init__(self, table: PieceTable) -> None:
        self.table = table
        self.order = {t.name: i for i, t in enumerate(table.tensors)}
        self._numbers: dict[Ranks, int] = {}
        self._holders = holders(table.layout)
        self._index = cache(BoxIndex)  # one for all tensors cut alike
        self._of_tensor: dict[str, tuple[BoxIndex, list[int]]] = {}
        self._parts: dict[Any, tuple[tuple[int, Box, int], ...]] = {}

    @property
    def ranks(self) -> Sequence[Ranks]:
        """Returns the ranks of each source."""
        return tuple(self._numbers)

    def parts(self, e: Slice, most: int) -> Iterator[tuple[int, Box, int]]:
        """Yields parts of the entry of at most `most` numbers each, within one piece: (its source,
        its box, how many numbers). Raises ValueError where pieces do not cover the entry exactly,
        its view is of another size, or the model does not have its tensor."""
        index, sources = self._of_tensor.get(e.tensor) or self._read(e)
        (view,) = e.views
        key = index, most, e.start, e.stop, view.shape
        if (parts := self._parts.get(key)) is None:  # layers and experts are alike
            parts = tuple(
                (i, part, numel(part))
                for i, overlap in index.meeting(e.box)
                for part in split(overlap, most)
            )
            covered = sum(n for _, _, n in parts)
            if not covered == e.numel == math.prod(view.shape):
                raise ValueError(
                    f"{e.tensor}: trainers hold {covered} of the {e.numel} elements of the box "
                    f"{list(e.start)} to {list(e.stop)}, and {e.param} has a view of "
                    f"{list(view.shape)} for it; serve the model that is trained, and record the "
                    "server's table again"
                )
            self._parts[key] = parts
        return ((sources[i], box, n) for i, box, n in parts)

    def _read(self, e: Slice) -> tuple[BoxIndex, list[int]]:
        if e.tensor not in self.order:
            raise ValueError(
                f"{e.tensor}: {e.param} of a server is made of it, and the trained model has none "
                "of this name; serve the model that is trained"
            )
        alike = copies(self.table.by_name[e.tensor])
        places = ({r for p in pieces for r in self._holders(p.place)} for pieces in alike.values())
        sources = [
            self._numbers.setdefault(tuple(sorted(ranks)), len(self._numbers)) for ranks in places
        ]
        self._of_tensor[e.tensor] = self._index(tuple(alike)), sources
        return self._of_tensor[e.tensor]


@dataclass(frozen=True)
class Geometry:
    """Holds the slices of one table in HF order, and the rounds they come in.

    entry, source, nbytes, round: of each slice, [slices]. boxes: of each, in its HF tensor.
    """

    entries: Sequence[Slice]
    boxes: Sequence[Box]
    entry: Ints
    source: Ints
    nbytes: Ints
    round: Ints

    @cached_property
    def rounds(self) -> int:
        """Returns the number of rounds."""
        return int(self.round.max(initial=-1)) + 1

    @cached_property
    def parts(self) -> Mapping[int, list[tuple[int, list[int]]]]:
        """Returns, for each source, (round, numbers of its slices in HF order) of the rounds in
        which it has any."""
        order = np.lexsort((self.round, self.source))
        keys = np.stack((self.source, self.round), 1)[order]
        starts = np.flatnonzero((keys[1:] != keys[:-1]).any(1)) + 1
        parts: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
        for group in np.split(order, starts) if len(order) else ():
            source, number = int(self.source[group[0]]), int(self.round[group[0]])
            parts[source].append((number, group.tolist()))
        return parts

    @cached_property
    def rows(self) -> Sequence[Any]:
        """Returns each slice as JSON-able data: the number of its entry where it is all of it, else
        [number, [[offset, shape, strides] of each view of the entry's parameter]]."""
        rows: list[Any] = []
        for number, box in zip(self.entry.tolist(), self.boxes, strict=True):
            views = [] if box == self.entries[number].box else self.kept(len(rows)).views
            parts = [[v.offset, list(v.shape), list(v.strides)] for v in views]
            rows.append([number, parts] if parts else number)
        return rows

    def part(self, i: int) -> tuple[str, Box]:
        """Returns which box of which HF tensor slice i is."""
        return self.entries[self.entry[i]].tensor, self.boxes[i]

    def kept(self, i: int) -> Slice:
        """Returns where slice i goes."""
        e, box = self.entries[self.entry[i]], self.boxes[i]
        return Slice(e.tensor, *box, e.param, cut(e.views[0], e.box, box))


def cut_table(
    table: TargetTable, sources: Sources, dtypes: Mapping[str, torch.dtype], round_bytes: int
) -> Geometry:
    """Cuts a table into slices and rounds: no slice or round exceeds `round_bytes`, unless one
    number does. dtypes: that each HF tensor is sent in. Raises ValueError naming the tensor as
    `Sources.parts` does."""
    order, last = sources.order, len(sources.order)
    entries = table.entries
    boxes: list[Box] = []
    rows: list[tuple[int, int, int]] = []
    for i in sorted(range(len(entries)), key=lambda i: order.get(entries[i].tensor, last)):
        itemsize = dtypes.get(entries[i].tensor, torch.uint8).itemsize
        for source, box, n in sources.parts(entries[i], max(1, round_bytes // itemsize)):
            boxes.append(box)
            rows.append((i, source, n * itemsize))
    entry, source_of, nbytes = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    rounds = _rounds(source_of, nbytes, round_bytes)
    return Geometry(entries, boxes, entry, source_of, nbytes, rounds)


def _rounds(source: Ints, nbytes: Ints, limit: int) -> Ints:
    """Returns the round of each slice, [slices]: sources take turns in proportion to what they
    have, so that all of them send in every round."""
    by_source = np.argsort(source, kind="stable")
    ends = np.cumsum(nbytes[by_source])
    total = np.bincount(source, nbytes)
    turn = np.empty(len(nbytes))
    turn[by_source] = ends - nbytes[by_source] - (np.cumsum(total) - total)[source[by_source]]
    turn /= total[source]
    order = np.argsort(turn, kind="stable")
    rounds = np.empty(len(nbytes), dtype=np.int64)
    numbers: list[int] = []
    number, filled = 0, 0
    for size in nbytes[order].tolist():
        if filled and filled + size > limit:
            number, filled = number + 1, 0
        filled += size
        numbers.append(number)
    rounds[order] = numbers
    return rounds


def split(box: Box, most: int) -> Iterator[Box]:
    """Yields parts of a box of at most `most` numbers each, in row-major order."""
    if numel(box) <= most:
        yield box
        return
    shape, (start, stop) = extents(box), box
    dim = next(d for d in range(len(shape)) if shape[d] > 1)
    step = max(1, most // math.prod(shape[dim + 1 :]))
    for first in range(start[dim], stop[dim], step):
        low, high = list(start), list(stop)
        low[dim], high[dim] = first, min(first + step, stop[dim])
        yield from split((tuple(low), tuple(high)), most)
