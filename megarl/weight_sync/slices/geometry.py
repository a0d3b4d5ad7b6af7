"""Cuts the entries of a server rank's table into slices that one trainer rank holds each.

A slice is the overlap of an entry with an owner's piece, cut further where it exceeds a round. The
trainer ranks that hold the same numbers are its sources. Which of them sends is decided elsewhere,
so servers with equal tables share all of this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.models.piece_table import PieceTable
from megarl.weight_sync.boxes import Box, BoxIndex, cut, extents, numel
from megarl.weight_sync.reallocation_plan import copies, holders
from megarl.weight_sync.slices.tables import Entry, ServerTable

Ints = NDArray[np.int64]


class Sources:
    """Finds the pieces of the trainers' tensors that an entry overlaps, and who holds them.

    Sources are numbered: source i is `ranks[i]`, all trainer ranks that hold the same pieces, in
    order.
    """

    def __init__(self, table: PieceTable) -> None:
        self.order = {t.name: i for i, t in enumerate(table.tensors)}
        self.ranks: list[tuple[int, ...]] = []
        self._tensors = table.by_name
        self._holders = holders(table.layout, None)
        self._numbers: dict[tuple[int, ...], int] = {}
        self._kinds: dict[tuple[Box, ...], int] = {}  # of tensors cut alike
        self._indices: list[BoxIndex] = []
        self._of_tensor: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._found: dict[Any, tuple[tuple[int, Box, int], ...]] = {}

    def parts(self, e: Entry, most: int) -> Iterator[tuple[int, Box, int]]:
        """Yields parts of the entry of at most `most` numbers, each within one piece: (its source,
        its box, how many numbers). Raises ValueError where pieces do not cover the entry exactly,
        its view is of another size, or the model does not have its tensor."""
        kind, sources = self._of_tensor.get(e.tensor) or self._read(e)
        key = kind, most, e.start, e.stop, e.shape
        if (found := self._found.get(key)) is None:  # layers and experts are alike
            self._found[key] = found = tuple(
                (i, part, numel(part))
                for i, overlap in self._indices[kind].meeting(e.box)
                for part in split(overlap, most)
            )
            covered = sum(n for _, _, n in found)
            if not covered == e.numel == math.prod(e.shape):
                del self._found[key]
                raise ValueError(
                    f"{e.tensor}: trainers hold {covered} of the {e.numel} elements of the box "
                    f"{list(e.start)} to {list(e.stop)}, and {e.param} has a view of "
                    f"{list(e.shape)} for it; serve the model that is trained, and record the "
                    "server's table again"
                )
        return ((sources[i], box, n) for i, box, n in found)

    def _read(self, e: Entry) -> tuple[int, tuple[int, ...]]:
        if e.tensor not in self._tensors:
            raise ValueError(
                f"{e.tensor}: {e.param} of a server is made of it, and the trained model has none "
                "of this name; serve the model that is trained"
            )
        held = copies(self._tensors[e.tensor])
        sources = []
        for pieces in held.values():
            ranks = tuple(sorted({r for p in pieces for r in self._holders(p.place)}))
            number = self._numbers.setdefault(ranks, len(self.ranks))
            if number == len(self.ranks):
                self.ranks.append(ranks)
            sources.append(number)
        boxes = tuple(held)
        kind = self._kinds.setdefault(boxes, len(self._indices))
        if kind == len(self._indices):
            self._indices.append(BoxIndex(boxes))
        self._of_tensor[e.tensor] = kind, tuple(sources)
        return self._of_tensor[e.tensor]


@dataclass(frozen=True)
class Geometry:
    """Holds the slices of one table in HF order, and the rounds they come in.

    entry, source, nbytes, round: of each slice, [slices]. size: its bytes, rounded up to those of
    the widest number sent. boxes: of each, in its HF tensor.
    """

    entries: Sequence[Entry]
    boxes: Sequence[Box]
    entry: Ints
    source: Ints
    nbytes: Ints
    size: Ints
    round: Ints

    @cached_property
    def rounds(self) -> int:
        """Returns the number of rounds."""
        return int(self.round.max(initial=-1)) + 1

    @cached_property
    def parts(self) -> Mapping[tuple[int, int], Ints]:
        """Returns the numbers of the slices of each (round, source) that has any, in HF order."""
        order = np.lexsort((self.source, self.round))
        keys = np.stack((self.round, self.source), 1)[order]
        groups = np.split(order, np.flatnonzero((keys[1:] != keys[:-1]).any(1)) + 1)
        return {(int(self.round[g[0]]), int(self.source[g[0]])): g for g in groups if len(g)}

    @cached_property
    def rounds_of(self) -> Mapping[int, list[int]]:
        """Returns the numbers of the rounds in which there is a slice of a source."""
        found: dict[int, list[int]] = {}
        for number, source in self.parts:
            found.setdefault(source, []).append(number)
        return found

    @cached_property
    def packed(self) -> list[list[tuple[int, list[Any]]]]:
        """Returns, for each round, (source, its slices) as JSON-able data: an entry's number where
        the slice is all of it, else [number, [[offset, shape, strides] of each view]]."""
        rounds: list[list[tuple[int, list[Any]]]] = [[] for _ in range(self.rounds)]
        for (number, source), group in self.parts.items():
            rounds[number].append((source, [self._json(i) for i in group.tolist()]))
        return rounds

    def bytes_of_sources(self, sources: int) -> Ints:
        """Returns the bytes of the slices of each of `sources` sources, [sources]."""
        found = np.zeros(sources, dtype=np.int64)
        np.add.at(found, self.source, self.nbytes)
        return found

    def tensor(self, i: int) -> str:
        """Returns the HF tensor of slice i."""
        return self.entries[self.entry[i]].tensor

    def _json(self, i: int) -> Any:
        number, box = int(self.entry[i]), self.boxes[i]
        e = self.entries[number]
        if box == e.box:
            return number
        views = cut(e.view, e.box, box)
        return [number, [[v.offset, list(v.shape), list(v.strides)] for v in views]]


def cut_table(
    table: ServerTable, sources: Sources, itemsizes: Mapping[str, int], round_bytes: int
) -> Geometry:
    """Cuts a server's table into slices and rounds: no slice or round exceeds `round_bytes`,
    unless one number does. itemsizes: bytes of a number by HF tensor, as it is sent. Raises
    ValueError naming the tensor as `Sources.parts` does."""
    align = max(itemsizes.values(), default=1)
    limit = round_bytes // align * align  # messages align slices to their items
    order, last = sources.order, len(sources.order)
    entries = table.entries
    boxes: list[Box] = []
    rows: list[tuple[int, int, int]] = []
    for i in sorted(range(len(entries)), key=lambda i: order.get(entries[i].tensor, last)):
        itemsize = itemsizes.get(entries[i].tensor, align)
        for source, box, n in sources.parts(entries[i], max(1, limit // itemsize)):
            boxes.append(box)
            rows.append((i, source, n * itemsize))
    entry, source_of, nbytes = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    size = -(-nbytes // align) * align
    return Geometry(entries, boxes, entry, source_of, nbytes, size, _rounds(source_of, size, limit))


def _rounds(source: Ints, size: Ints, limit: int) -> Ints:
    """Returns the round of each slice, [slices]: sources take turns in proportion to what they
    have, so that all of them send in every round."""
    by_source = np.argsort(source, kind="stable")
    ends = np.cumsum(size[by_source])
    total = np.bincount(source, size)
    turn = np.empty(len(size))
    turn[by_source] = ends - size[by_source] - (np.cumsum(total) - total)[source[by_source]]
    turn /= total[source]
    order = np.argsort(turn, kind="stable")
    rounds = np.empty(len(size), dtype=np.int64)
    numbers: list[int] = []
    number, held = 0, 0
    for nbytes in size[order].tolist():
        if held and held + nbytes > limit:
            number, held = number + 1, 0
        held += nbytes
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
