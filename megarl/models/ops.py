"""Describes how one Megatron parameter is made of HF tensors: the ops of a family's declaration.

An op answers three questions about a model cut over `tp` ranks (for an expert's parameter those
that share the expert): the shapes of the HF tensors it is made of, the shape of the local
parameter, and its *segments*: which rows of which HF tensor lie at which rows of which rank's
parameter. Nothing else in the project knows how weights are fused or sharded; loading, saving and
streaming all follow from the segments, so each op is written once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from megarl.models.shapes import Attention, ModelConfig

Shape = tuple[int, ...]
# a number, or the name of the ModelConfig's field that has it: "hidden_size", "attention.query"
Dim = int | str
H = "hidden_size"


def size(m: ModelConfig, dim: Dim) -> int:
    """Returns the number that `dim` stands for. Raises AssertionError for a number of experts in a
    dense model."""
    return dim if isinstance(dim, int) else int(attrgetter(dim)(m))


@dataclass(frozen=True, slots=True)
class Segment:
    """Says that rows [row, row + rows) of the parameter on tensor-parallel rank `tp`, all its
    columns, are rows [hf_row, hf_row + rows), columns [hf_col, hf_col + cols) of HF tensor number
    `source`. A vector is a matrix of one column."""

    tp: int
    source: int
    row: int
    hf_row: int
    rows: int
    hf_col: int
    cols: int


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of a contiguous local parameter, in elements."""

    offset: int
    shape: Shape
    strides: Shape

    def runs(self) -> Iterator[tuple[int, int]]:
        """Returns an iterator over [start, stop) of the contiguous runs that the view touches, in
        the parameter's order."""
        dims = sorted((s, n) for n, s in zip(self.shape, self.strides, strict=True) if n > 1)
        run = 1
        while dims and dims[0][0] == run:
            run *= dims.pop(0)[1]
        starts = [self.offset]
        for stride, n in reversed(dims):
            starts = [s + i * stride for s in starts for i in range(n)]
        return ((s, s + run) for s in starts)

    def backwards(self) -> View:
        """Returns the view of this view's numbers, in its own order, that are the parameter, which
        it must be all of."""
        order = sorted(range(len(self.shape)), key=self.strides.__getitem__, reverse=True)
        dense = [math.prod(self.shape[d + 1 :]) for d in range(len(self.shape))]
        return View(0, tuple(self.shape[d] for d in order), tuple(dense[d] for d in order))


@dataclass(frozen=True, slots=True)
class SliceMap:
    """A rank's view of its parameter, and the box [start, stop) of the HF tensor that it equals."""

    rank: int
    view: View
    start: Shape
    stop: Shape


class Op(ABC):
    """One invertible step from HF tensors to a Megatron parameter. `replicated`: every
    tensor-parallel rank holds the same whole parameter. `linear`: a linear map of a layer, which is
    what block-wise FP8 stores in fewer bits: not an embedding, head, norm, bias or router."""

    replicated = False
    linear = False

    @abstractmethod
    def hf_shapes(self, m: ModelConfig) -> tuple[Shape, ...]:
        """Returns the shapes of the HF tensors that the parameter is made of."""

    @abstractmethod
    def segments(self, m: ModelConfig, tp: int, vocab_rows: int) -> Iterator[Segment]:
        """Yields every row of every HF tensor on each of `tp` ranks that holds it; `vocab_rows` is
        the whole padded vocabulary."""

    def local_shape(self, m: ModelConfig, tp: int, vocab_rows: int) -> Shape:
        """Returns the shape on one of `tp` ranks, which all have the same."""
        first = [s for s in self.segments(m, tp, vocab_rows) if s.tp == 0]
        shape = (max(s.row + s.rows for s in first), first[0].cols)
        return shape[: len(self.hf_shapes(m)[0])]


@dataclass(frozen=True)
class Replicated(Op):
    """A vector, or with `cols` a matrix, that every rank holds: norms, routers, value heads, and
    with `linear` maps of a layer."""

    rows: Dim
    cols: Dim | None = None
    linear: bool = False
    replicated = True

    def hf_shapes(self, m: ModelConfig) -> tuple[Shape, ...]:
        """Returns one shape: [rows, cols], or [rows] for a vector."""
        return ((size(m, self.rows), size(m, self.cols)) if self.cols else (size(m, self.rows),),)

    def segments(self, m: ModelConfig, tp: int, vocab_rows: int) -> Iterator[Segment]:
        """Yields the whole tensor on every rank."""
        cols = size(m, self.cols) if self.cols else 1
        for rank in range(tp):
            yield Segment(rank, 0, 0, 0, size(m, self.rows), 0, cols)


@dataclass(frozen=True)
class RowParallel(Op):
    """A matrix [rows, cols] cut along its input dimension (columns)."""

    rows: Dim
    cols: Dim
    linear = True

    def hf_shapes(self, m: ModelConfig) -> tuple[Shape, ...]:
        """Returns one shape, [rows, cols]."""
        return ((size(m, self.rows), size(m, self.cols)),)

    def segments(self, m: ModelConfig, tp: int, vocab_rows: int) -> Iterator[Segment]:
        """Yields each rank's columns, which are all rows high."""
        rows, cols = size(m, self.rows), size(m, self.cols) // tp
        for rank in range(tp):
            yield Segment(rank, 0, 0, 0, rows, rank * cols, cols)


@dataclass(frozen=True)
class VocabParallel(Op):
    """A matrix [V,H] cut along the vocabulary; its padding rows are zero and never exported."""

    def hf_shapes(self, m: ModelConfig) -> tuple[Shape, ...]:
        """Returns one shape, [V,H], without padding."""
        return ((m.vocab_size, m.hidden_size),)

    def local_shape(self, m: ModelConfig, tp: int, vocab_rows: int) -> Shape:
        """Returns [vocab_rows / tp, H], padding included."""
        return (vocab_rows // tp, m.hidden_size)

    def segments(self, m: ModelConfig, tp: int, vocab_rows: int) -> Iterator[Segment]:
        """Yields each rank's rows of the real vocabulary; a rank of padding alone has none."""
        per = vocab_rows // tp
        for rank in range(tp):
            start, stop = rank * per, min((rank + 1) * per, m.vocab_size)
            if start < stop:
                yield Segment(rank, 0, 0, start, stop - start, 0, m.hidden_size)


@dataclass(frozen=True)
class FusedQKV(Op):
    """One matrix or bias of q, k, v interleaved by query group: [q heads of group 0, k0, v0, q
    heads of group 1, ...]. `gate`: every query head has an output gate. HF's q has a head's gate
    below the head; in the group all heads come before all gates.

    The interleaved rows are cut evenly over ranks. With more ranks than groups the cut falls inside
    a group (megatron-core gathers the activations and picks its heads), so no weight is held twice
    even then; the key/value *heads* are what ranks share.
    """

    bias: bool = False
    gate: bool = False

    @property
    def linear(self) -> bool:  # type: ignore[override]
        """Returns whether it is the matrix."""
        return not self.bias

    def hf_shapes(self, m: ModelConfig) -> tuple[Shape, ...]:
        """Returns the shapes of q, k and v: [heads * head_dim, H]; without H for biases."""
        a = m.attention
        queries = (1 + self.gate) * a.heads
        rows = (heads * a.head_dim for heads in (queries, a.kv_heads, a.kv_heads))
        return tuple((r,) if self.bias else (r, m.hidden_size) for r in rows)

    def segments(self, m: ModelConfig, tp: int, vocab_rows: int) -> Iterator[Segment]:
        """Yields the runs of q, k and v rows of every group, split where a rank's share ends."""
        cols = 1 if self.bias else m.hidden_size
        per = sum(shape[0] for shape in self.hf_shapes(m)) // tp
        row = 0  # of the interleaved matrix
        for source, first, rows in self._runs(m.attention):
            start, stop = row, row + rows
            while row < stop:
                rank, local = divmod(row, per)
                n = min(stop, (rank + 1) * per) - row
                yield Segment(rank, source, local, first + row - start, n, 0, cols)
                row += n

    def _runs(self, a: Attention) -> Iterator[tuple[int, int, int]]:
        """Yields (HF tensor, its first row, rows) of the interleaved matrix from top to bottom."""
        dim, of_group = a.head_dim, a.heads // a.kv_heads
        for group in range(a.kv_heads):
            first = group * of_group
            if self.gate:
                for part in (0, 1):
                    for head in range(first, first + of_group):
                        yield 0, (2 * head + part) * dim, dim
            else:
                yield 0, first * dim, of_group * dim
            yield 1, group * dim, dim
            yield 2, group * dim, dim


@dataclass(frozen=True)
class Sections(Op):
    """Sections below each other, each cut evenly over ranks by groups of rows.

    sources: for each HF tensor, the rows of one group in each of its sections, in the parameter's
    order. by_group: HF has all sections of group 0, then those of group 1, ...; else all groups of
    the first section, then those of the second, ... cols: the sizes behind the rows. Four groups of
    sections a and b on two ranks:

        HF, by_group      a0 b0 a1 b1 a2 b2 a3 b3
        HF, else          a0 a1 a2 a3 b0 b1 b2 b3
        rank 0, rank 1    a0 a1 b0 b1, a2 a3 b2 b3
    """

    groups: Dim
    sources: tuple[tuple[Dim, ...], ...]
    cols: tuple[Dim, ...] = ()
    by_group: bool = False

    @property
    def linear(self) -> bool:  # type: ignore[override]
        """Returns whether it is a matrix."""
        return len(self.cols) == 1

    def hf_shapes(self, m: ModelConfig) -> tuple[Shape, ...]:
        """Returns [groups * rows of a group, *cols] for each source."""
        groups, cols = size(m, self.groups), tuple(size(m, c) for c in self.cols)
        return tuple((groups * sum(size(m, d) for d in dims), *cols) for dims in self.sources)

    def sections(self, m: ModelConfig, tp: int) -> tuple[int, ...]:
        """Returns the rows of each section on one of `tp` ranks."""
        groups = size(m, self.groups) // tp
        return tuple(groups * size(m, d) for dims in self.sources for d in dims)

    def local_shape(self, m: ModelConfig, tp: int, vocab_rows: int) -> Shape:
        """Returns [rows of all sections / tp, *cols]."""
        return (sum(self.sections(m, tp)), *self.hf_shapes(m)[0][1:])

    def segments(self, m: ModelConfig, tp: int, vocab_rows: int) -> Iterator[Segment]:
        """Yields the rows of every section that lie together in HF, too: a group's or a rank's."""
        groups, width = size(m, self.groups), math.prod(size(m, c) for c in self.cols)
        per, below = groups // tp, 0  # below: a rank's rows of the sections before
        for source, dims in enumerate(self.sources):
            rows_of = [size(m, d) for d in dims]
            for section, rows in enumerate(rows_of):
                before, run, apart = sum(rows_of[:section]) * groups, per, rows
                if self.by_group:
                    before, run, apart = sum(rows_of[:section]), 1, sum(rows_of)
                for group in range(0, groups, run):
                    rank, local = divmod(group, per)
                    row, hf_row = below + local * rows, before + group * apart
                    yield Segment(rank, source, row, hf_row, run * rows, 0, width)
                below += per * rows


class ColumnParallel(Sections):
    """A matrix [rows, cols] cut along its output dimension (rows)."""

    def __init__(self, rows: Dim, cols: Dim) -> None:
        super().__init__(rows, ((1,),), (cols,))


class GateUp(Sections):
    """SwiGLU's first matrix: every rank holds its rows of gate, then its rows of up. `fused`: in HF
    they are one matrix too, all of gate above all of up."""

    def __init__(self, rows: Dim = "intermediate_size", *, fused: bool = False) -> None:
        super().__init__(rows, ((1, 1),) if fused else ((1,), (1,)), (H,))


class Permuted(Op):
    """A parameter whose rows are not rows of its one HF tensor: it says its views itself."""

    @abstractmethod
    def slices(self, m: ModelConfig, ranks: int) -> tuple[SliceMap, ...]:
        """Returns what each of `ranks` ranks holds of the HF tensor."""

    def segments(self, m: ModelConfig, tp: int, vocab_rows: int) -> Iterator[Segment]:
        """Raises TypeError: there are no common rows."""
        raise TypeError(f"{self} has views in place of rows")


@dataclass(frozen=True)
class Transposed(Permuted):
    """A matrix [rows, cols] cut along its columns, which is [cols, rows] in HF."""

    rows: Dim
    cols: Dim

    def hf_shapes(self, m: ModelConfig) -> tuple[Shape, ...]:
        """Returns one shape, [cols, rows]."""
        return ((size(m, self.cols), size(m, self.rows)),)

    def local_shape(self, m: ModelConfig, tp: int, vocab_rows: int) -> Shape:
        """Returns [rows, cols / tp]."""
        return size(m, self.rows), size(m, self.cols) // tp

    def slices(self, m: ModelConfig, ranks: int) -> tuple[SliceMap, ...]:
        """Returns each rank's columns, which are rows of HF's matrix."""
        rows, per = self.local_shape(m, ranks, 0)
        view = View(0, (per, rows), (1, per))
        return tuple(SliceMap(r, view, (r * per, 0), ((r + 1) * per, rows)) for r in range(ranks))


@dataclass(frozen=True)
class GateUpInTurns(Permuted):
    """SwiGLU's first matrix, or its bias without `cols`: every rank holds its rows of gate, then
    its rows of up. In HF the matrix is [cols, 2 * rows], with columns of gate and up in turns."""

    rows: Dim
    cols: Dim | None = None

    def hf_shapes(self, m: ModelConfig) -> tuple[Shape, ...]:
        """Returns one shape, [cols, 2 * rows], or [2 * rows] of a bias."""
        return ((*self._width(m), 2 * size(m, self.rows)),)

    def local_shape(self, m: ModelConfig, tp: int, vocab_rows: int) -> Shape:
        """Returns [2 * rows / tp, cols], or [2 * rows / tp] of a bias."""
        return 2 * size(m, self.rows) // tp, *self._width(m)

    def slices(self, m: ModelConfig, ranks: int) -> tuple[SliceMap, ...]:
        """Returns each rank's columns of HF's matrix."""
        width, per = self._width(m), size(m, self.rows) // ranks
        row = math.prod(width)
        view = View(0, (*width, per, 2), (*(1 for _ in width), row, per * row))
        first = tuple(0 for _ in width)
        return tuple(
            SliceMap(r, view, (*first, 2 * per * r), (*width, 2 * per * (r + 1)))
            for r in range(ranks)
        )

    def _width(self, m: ModelConfig) -> Shape:
        return () if self.cols is None else (size(m, self.cols),)
