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

from megarl.models.piece_table import HfTensor, PieceTable
from megarl.weight_sync.boxes import Box, BoxIndex, cut, extents, numel
from megarl.weight_sync.reallocation_plan import copies, holders
from megarl.weight_sync.slices.tables import Entry, ServerTable

Ints = NDArray[np.int64]


class Sources:
    """Finds the pieces of the trainers' tensors that a box overlaps, and who holds them.

    Sources are numbered: source i is `ranks[i]`, all trainer ranks that hold the same pieces, in
    order. Raises ValueError for a tensor the model does not have.
    """

    def __init__(self, table: PieceTable) -> None:
        self.order = {t.name: i for i, t in enumerate(table.tensors)}
        self.ranks: list[tuple[int, ...]] = []
        self._tensors = table.by_name
        self._holders = holders(table.layout, None)
        self._numbers: dict[tuple[int, ...], int] = {}
        self._indices: dict[tuple[Box, ...], BoxIndex] = {}
        self._found: dict[Any, tuple[tuple[int, Box], ...]] = {}
        self._of_tensor: dict[str, tuple[tuple[Box, ...], tuple[int, ...]]] = {}

    def overlaps(self, e: Entry) -> Iterator[tuple[int, Box]]:
        """Yields, for each piece that the entry overlaps, its source and the overlap. Raises
        ValueError where pieces do not cover the entry exactly, or its view is of another size."""
        boxes, sources = self._owners(e)
        key = boxes, e.start, e.stop
        if key not in self._found:  # layers and experts are alike
            if boxes not in self._indices:
                self._indices[boxes] = BoxIndex(boxes)
            self._found[key] = tuple(self._indices[boxes].meeting(e.box))
        found = self._found[key]
        covered = sum(numel(box) for _, box in found)
        if not covered == e.numel == math.prod(e.shape):
            raise ValueError(
                f"{e.tensor}: trainers hold {covered} of the {e.numel} elements of the box "
                f"{list(e.start)} to {list(e.stop)} that {e.param} has a view of {list(e.shape)} "
                "for; record the server's table again"
            )
        return ((sources[i], box) for i, box in found)

    def _owners(self, e: Entry) -> tuple[tuple[Box, ...], tuple[int, ...]]:
        if e.tensor not in self._of_tensor:
            if e.tensor not in self._tensors:
                raise ValueError(
                    f"{e.tensor}: {e.param} of a server has it, and the trained model has not; "
                    "serve the model that is trained"
                )
            self._of_tensor[e.tensor] = self._read(self._tensors[e.tensor])
        return self._of_tensor[e.tensor]

    def _read(self, t: HfTensor) -> tuple[tuple[Box, ...], tuple[int, ...]]:
        held = copies(t)
        sources = []
        for pieces in held.values():
            ranks = tuple(sorted({r for p in pieces for r in self._holders(p.place)}))
            number = self._numbers.setdefault(ranks, len(self.ranks))
            if number == len(self.ranks):
                self.ranks.append(ranks)
            sources.append(number)
        return tuple(held), tuple(sources)


@dataclass(frozen=True)
class Geometry:
    """Holds the slices of one table in HF order, and its rounds.

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
        return int(self.round[-1]) + 1 if len(self.round) else 0

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
    ValueError naming the tensor as `Sources.overlaps` does."""
    align = max(itemsizes.values(), default=1)
    order = sources.order
    last = len(order)
    numbered = sorted(enumerate(table.entries), key=lambda x: order.get(x[1].tensor, last))
    boxes: list[Box] = []
    rows: list[tuple[int, int, int, int, int]] = []
    number, held = 0, 0
    limit = round_bytes // align * align  # messages align slices to their items
    for i, e in numbered:
        itemsize = itemsizes.get(e.tensor, align)
        for source, overlap in sources.overlaps(e):
            for box in split(overlap, max(1, limit // itemsize)):
                nbytes = numel(box) * itemsize
                size = -(-nbytes // align) * align
                if held and held + size > limit:
                    number, held = number + 1, 0
                held += size
                boxes.append(box)
                rows.append((i, source, nbytes, size, number))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    return Geometry(table.entries, boxes, *columns)


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
