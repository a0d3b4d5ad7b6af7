"""Works out how an op cuts the HF tensors of a parameter over ranks: strided views and boxes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from megarl.models.hf_config import ModelConfig
from megarl.models.ops import Op, Segment, Shape


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of a contiguous local parameter, in elements."""

    offset: int
    shape: Shape
    strides: Shape

    def runs(self) -> Iterator[tuple[int, int]]:
        """Returns an iterator over [start, stop) of the contiguous runs that the view touches."""
        shape, strides, run = list(self.shape), list(self.strides), 1
        while shape and strides[-1] == run:
            run *= shape.pop()
            strides.pop()
        starts = [self.offset]
        for n, stride in zip(shape, strides, strict=True):
            starts = [s + i * stride for s in starts for i in range(n)]
        return ((s, s + run) for s in starts)


@dataclass(frozen=True, slots=True)
class SliceMap:
    """A rank's view of its parameter, and the box [start, stop) of the HF tensor that it equals."""

    rank: int
    view: View
    start: Shape
    stop: Shape


@dataclass(frozen=True, slots=True)
class ShardMap:
    """Says how an op cuts its HF tensors over ranks, wherever these stand.

    sources: shape and boxes of each HF tensor. filled: how many rows of each rank's parameter,
    which has `shape`, HF tensors fill.
    """

    sources: tuple[tuple[Shape, tuple[SliceMap, ...]], ...]
    shape: Shape
    filled: tuple[int, ...]


def shard_map(model: ModelConfig, op: Op, ranks: int, vocab: int) -> ShardMap:
    """Cuts the HF tensors of `op` over `ranks` ranks; `vocab` is the padded vocabulary in rows."""
    segments = sorted(
        op.segments(model, ranks, vocab), key=lambda s: (s.source, s.tp, s.hf_row, s.hf_col)
    )
    by_source = {k: list(g) for k, g in groupby(segments, key=lambda s: s.source)}
    filled = [0] * ranks
    for s in segments:
        filled[s.tp] = max(filled[s.tp], s.row + s.rows)
    sources = tuple(
        (shape, tuple(_box(run, len(shape)) for run in _merge(by_source[source])))
        for source, shape in enumerate(op.hf_shapes(model))
    )
    return ShardMap(sources, op.local_shape(model, ranks, vocab), tuple(filled))


def _merge(segments: list[Segment]) -> Iterator[list[Segment]]:
    """Yields runs of one rank's segments that one strided view can hold: equally many rows,
    adjacent in the HF tensor, equally far apart in the parameter (a head's rows in every query
    group)."""
    run: list[Segment] = []
    for s in segments:
        if run and not _continues(run, s):
            yield run
            run = []
        run.append(s)
    if run:
        yield run


def _continues(run: list[Segment], s: Segment) -> bool:
    a = run[-1]
    below = (a.tp, a.rows, a.hf_col, a.cols, a.hf_row + a.rows)
    if below != (s.tp, s.rows, s.hf_col, s.cols, s.hf_row):
        return False
    return len(run) < 2 or s.row - a.row == a.row - run[-2].row


def _box(run: list[Segment], ndim: int) -> SliceMap:
    first, last = run[0], run[-1]
    shape: Shape = (first.rows, first.cols)
    strides: Shape = (first.cols, 1)
    if len(run) > 1:
        shape = (len(run), *shape)
        strides = ((run[1].row - first.row) * first.cols, *strides)
    start = (first.hf_row, first.hf_col)
    stop = (last.hf_row + last.rows, first.hf_col + first.cols)
    if ndim == 1:  # a vector: drop the column
        shape, strides = shape[:-1], strides[:-1]
    view = View(first.row * first.cols, shape, strides)
    return SliceMap(first.tp, view, start[:ndim], stop[:ndim])
