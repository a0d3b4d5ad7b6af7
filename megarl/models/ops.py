"""Describes how one Megatron parameter is made of HF tensors: the ops of a family's declaration.

An op answers three questions about a model cut over `tp` ranks (for an expert's parameter those
that share the expert): the shapes of the HF tensors it is made of, the shape of the local
parameter, and its *segments*: which rows of which HF tensor lie at which rows of which rank's
parameter. Nothing else in the project knows how weights are fused or sharded; loading, saving and
streaming all follow from the segments, so each op is written once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from megarl.models.shapes import ModelConfig

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
class _Matrix(Op):
    rows: Dim
    cols: Dim
    linear = True

    def hf_shapes(self, m: ModelConfig) -> tuple[Shape, ...]:
        """Returns one shape, [rows, cols]."""
        return ((size(m, self.rows), size(m, self.cols)),)


class RowParallel(_Matrix):
    """A matrix [rows, cols] cut along its input dimension (columns)."""

    def segments(self, m: ModelConfig, tp: int, vocab_rows: int) -> Iterator[Segment]:
        """Yields each rank's columns, which are all rows high."""
        rows, cols = size(m, self.rows), size(m, self.cols) // tp
        for rank in range(tp):
            yield Segment(rank, 0, 0, 0, rows, rank * cols, cols)


class ColumnParallel(_Matrix):
    """A matrix [rows, cols] cut along its output dimension (rows)."""

    def segments(self, m: ModelConfig, tp: int, vocab_rows: int) -> Iterator[Segment]:
        """Yields each rank's rows."""
        per = size(m, self.rows) // tp
        for rank in range(tp):
            yield Segment(rank, 0, 0, rank * per, per, 0, size(m, self.cols))


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
class GateUp(Op):
    """SwiGLU's first matrix: every rank holds its rows of gate, then its rows of up. `fused`: in HF
    they are one matrix too, all of gate above all of up."""

    rows: Dim = "intermediate_size"
    fused: bool = False
    linear = True

    def hf_shapes(self, m: ModelConfig) -> tuple[Shape, ...]:
        """Returns [rows, H] for gate and for up, or [2*rows, H] where HF fuses them."""
        rows = size(m, self.rows)
        return ((2 * rows, m.hidden_size),) if self.fused else ((rows, m.hidden_size),) * 2

    def segments(self, m: ModelConfig, tp: int, vocab_rows: int) -> Iterator[Segment]:
        """Yields each rank's rows of gate, then its rows of up."""
        per = size(m, self.rows) // tp
        for rank in range(tp):
            for part in (0, 1):
                source, first = (0, part * size(m, self.rows)) if self.fused else (part, 0)
                hf_row = first + rank * per
                yield Segment(rank, source, part * per, hf_row, per, 0, m.hidden_size)


@dataclass(frozen=True)
class FusedQKV(Op):
    """One matrix or bias of q, k, v interleaved by query group: [q heads of group 0, k0, v0, q
    heads of group 1, ...].

    The interleaved rows are cut evenly over ranks. With more ranks than groups the cut falls inside
    a group (megatron-core gathers the activations and picks its heads), so no weight is held twice
    even then; the key/value *heads* are what ranks share.
    """

    bias: bool = False

    @property
    def linear(self) -> bool:  # type: ignore[override]
        """Returns whether it is the matrix."""
        return not self.bias

    def hf_shapes(self, m: ModelConfig) -> tuple[Shape, ...]:
        """Returns the shapes of q, k and v: [heads * head_dim, H]; without H for biases."""
        a = m.attention
        rows = (heads * a.head_dim for heads in (a.heads, a.kv_heads, a.kv_heads))
        return tuple((r,) if self.bias else (r, m.hidden_size) for r in rows)

    def segments(self, m: ModelConfig, tp: int, vocab_rows: int) -> Iterator[Segment]:
        """Yields the runs of q, k and v rows of every group, split where a rank's share ends."""
        a, cols = m.attention, 1 if self.bias else m.hidden_size
        per = (a.heads + 2 * a.kv_heads) * a.head_dim // tp
        q_rows = a.heads // a.kv_heads * a.head_dim
        row = 0  # of the interleaved matrix
        for group in range(a.kv_heads):
            for source, rows in enumerate((q_rows, a.head_dim, a.head_dim)):
                start, stop = row, row + rows
                while row < stop:
                    rank, local = divmod(row, per)
                    n = min(stop, (rank + 1) * per) - row
                    hf_row = group * rows + row - start
                    yield Segment(rank, source, local, hf_row, n, 0, cols)
                    row += n
