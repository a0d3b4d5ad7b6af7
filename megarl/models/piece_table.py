"""The piece table: for every HF tensor, the pieces of Megatron parameters that make it up.

Pure data: no process group, no tensors; buildable for any layout anywhere. A piece says that a
strided view of one rank's local parameter and a box of one HF tensor hold the same numbers in the
same row-major order.

`pieces` are owners: together they cover every element of the HF tensor exactly once. `replicas`
repeat an owner's numbers elsewhere (norms on the other tensor-parallel ranks, the tied embedding on
the last pipeline stage). Loading fills both; saving and streaming read owners. Data- and
context-parallel replicas hold everything their peer, (pp, tp) or for experts (pp, ep, etp), holds
and are not listed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from megarl.models.families import Param
from megarl.models.hf_config import ModelConfig
from megarl.models.ops import Segment, Shape
from megarl.parallel.layout import Coords, Layout

# Rows per tensor-parallel rank are padded to a multiple of this: 16-byte rows of bf16 logits, which
# is what tensor cores ask for. Megatron-LM's default is 128: give that to share its checkpoints.
VOCAB_DIVISIBLE_BY = 8


def padded_vocab_size(vocab_size: int, tp: int, divisible_by: int = VOCAB_DIVISIBLE_BY) -> int:
    """Smallest multiple of divisible_by * tp that holds `vocab_size` rows."""
    unit = divisible_by * tp
    return -(-vocab_size // unit) * unit


@dataclass(frozen=True, slots=True)
class Place:
    """Who holds a piece. Dense weights have (tp), experts have (ep, etp); the others are None."""

    pp: int
    vpp: int
    tp: int | None = None
    ep: int | None = None
    etp: int | None = None

    def holds(self, c: Coords) -> bool:
        """Whether the rank at `c` holds it, in whichever data-parallel replica."""
        if self.tp is not None:
            return (self.pp, self.tp) == (c.pp, c.tp)
        return (self.pp, self.ep, self.etp) == (c.pp, c.ep, c.etp)

    def rank(self, layout: Layout) -> int:
        """The rank of the first data-parallel replica."""
        if self.tp is not None:
            return layout.dense_rank(pp=self.pp, tp=self.tp)
        assert self.ep is not None and self.etp is not None
        return layout.expert_rank(pp=self.pp, ep=self.ep, etp=self.etp)


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of a contiguous local parameter, in elements."""

    offset: int
    shape: Shape
    strides: Shape

    def runs(self) -> Iterator[tuple[int, int]]:
        """[start, stop) of the contiguous runs it touches."""
        shape, strides, run = list(self.shape), list(self.strides), 1
        while shape and strides[-1] == run:
            run *= shape.pop()
            strides.pop()
        starts = [self.offset]
        for n, stride in zip(shape, strides, strict=True):
            starts = [s + i * stride for s in starts for i in range(n)]
        return ((s, s + run) for s in starts)


@dataclass(frozen=True, slots=True)
class Piece:
    """`view` of parameter `param` at `place` equals box [start, stop) of the HF tensor."""

    place: Place
    param: str
    view: View
    start: Shape
    stop: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.view.shape)

    @property
    def box(self) -> tuple[slice, ...]:
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))


@dataclass(frozen=True, slots=True)
class HfTensor:
    """`buffer`: not trained, and fp32 in every model, file and message."""

    name: str
    shape: Shape
    pieces: tuple[Piece, ...]
    replicas: tuple[Piece, ...] = ()
    buffer: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def held_by(self, c: Coords) -> Iterator[Piece]:
        """Pieces, owned or replicated, on the rank at `c`."""
        return (p for p in (*self.pieces, *self.replicas) if p.place.holds(c))


@dataclass(frozen=True, slots=True)
class LocalParam:
    """`padding`: rows [start, stop) that no HF tensor fills."""

    place: Place
    name: str
    shape: Shape
    padding: tuple[int, int]


@dataclass(frozen=True)
class PieceTable:
    model: ModelConfig
    layout: Layout
    padded_vocab_size: int
    tensors: tuple[HfTensor, ...]  # in HF order
    params: tuple[LocalParam, ...]

    @cached_property
    def by_name(self) -> Mapping[str, HfTensor]:
        return {t.name: t for t in self.tensors}

    @cached_property
    def trained(self) -> PieceTable:
        """Without the buffers."""
        return replace(self, tensors=tuple(t for t in self.tensors if not t.buffer))

    @cached_property
    def buffers(self) -> frozenset[str]:
        """Names of the parameters that are buffers."""
        return frozenset(p.param for t in self.tensors if t.buffer for p in t.pieces)

    def local_params(self, c: Coords) -> dict[str, LocalParam]:
        """The parameters the rank at `c` must have."""
        return {p.name: p for p in self.params if p.place.holds(c)}

    def check_params(self, c: Coords, shapes: Mapping[str, Iterable[int]]) -> None:
        """AssertionError unless the rank's real parameters are exactly the table's."""
        want = {n: p.shape for n, p in self.local_params(c).items()}
        have = {n: tuple(s) for n, s in shapes.items()}
        wrong = {n: (have.get(n), want.get(n)) for n in want.keys() | have.keys()}
        wrong = {n: pair for n, pair in wrong.items() if pair[0] != pair[1]}
        assert not wrong, f"{c}: (shape in the model, shape in the piece table) differ: {wrong}"


def build_piece_table(
    model: ModelConfig,
    layout: Layout,
    *,
    vocab_divisible_by: int = VOCAB_DIVISIBLE_BY,
    params: Iterable[tuple[Param, int | None]] | None = None,
) -> PieceTable:
    """The table of `model` cut as `layout` says, its coverage checked. `params` with the layers
    they belong to stand in for those of its family."""
    vocab = padded_vocab_size(model.vocab_size, layout.tp, vocab_divisible_by)
    tensors: list[HfTensor] = []
    local: list[LocalParam] = []
    chunk_of = {
        i: (pp, vpp)
        for pp in range(layout.pp)
        for vpp in range(layout.vpp)
        for i in layout.layers(model.num_layers, pp, vpp)
    }
    last = (layout.pp - 1, layout.vpp - 1)
    for param, layer in model.declaration.params(model) if params is None else params:
        if layer is not None:
            chunk = chunk_of[layer]
        else:
            chunk = (0, 0) if param.stage == "first" else last
        homes = [(chunk, param.name)]
        if param.copy_on_last and layout.pp > 1:
            homes.append((last, param.copy_on_last))
        tensors.extend(_tensors(model, layout, vocab, param, homes))
        local.extend(_local_params(model, layout, vocab, param, homes))
    table = PieceTable(model, layout, vocab, tuple(tensors), tuple(local))
    check_coverage(table)
    return table


Chunk = tuple[int, int]  # (pp, vpp)
Home = tuple[Chunk, str]  # chunk, parameter name; the first home owns


def _ranks(layout: Layout, param: Param) -> int:
    """How many ranks a parameter is cut over."""
    return layout.tp if param.expert is None else layout.etp


def _place(model: ModelConfig, layout: Layout, param: Param, chunk: Chunk, rank: int) -> Place:
    """Experts lie on expert-parallel ranks in order, equally many on each."""
    if param.expert is None:
        return Place(*chunk, tp=rank)
    assert model.moe is not None
    return Place(*chunk, ep=param.expert * layout.ep // model.moe.num_experts, etp=rank)


def _tensors(
    model: ModelConfig, layout: Layout, vocab: int, param: Param, homes: list[Home]
) -> Iterator[HfTensor]:
    shapes = param.op.hf_shapes(model)
    tp = _ranks(layout, param)
    segments = sorted(
        param.op.segments(model, tp, vocab), key=lambda s: (s.source, s.tp, s.hf_row, s.hf_col)
    )
    by_source = {k: list(g) for k, g in groupby(segments, key=lambda s: s.source)}
    for source, (name, shape) in enumerate(zip(param.hf, shapes, strict=True)):
        owners: list[Piece] = []
        replicas: list[Piece] = []
        for home, (chunk, local_name) in enumerate(homes):
            for run in _merge(by_source[source]):
                rank = run[0].tp
                owned = home == 0 and (rank == 0 or not param.op.replicated)
                place = _place(model, layout, param, chunk, rank)
                piece = _piece(place, local_name, run, len(shape))
                (owners if owned else replicas).append(piece)
        yield HfTensor(name, shape, tuple(owners), tuple(replicas), param.buffer)


def _merge(segments: list[Segment]) -> Iterator[list[Segment]]:
    """Runs of one rank's segments that one strided view can hold: equally many rows, adjacent in
    the HF tensor, equally far apart in the parameter (a head's rows in every query group)."""
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
    if (a.tp, a.rows, a.hf_col, a.cols, a.hf_row + a.rows) != (
        s.tp, s.rows, s.hf_col, s.cols, s.hf_row,
    ):  # fmt: skip
        return False
    return len(run) < 2 or s.row - a.row == a.row - run[-2].row


def _piece(place: Place, name: str, run: list[Segment], ndim: int) -> Piece:
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
    return Piece(
        place, name, View(first.row * first.cols, shape, strides), start[:ndim], stop[:ndim]
    )


def _local_params(
    model: ModelConfig, layout: Layout, vocab: int, param: Param, homes: list[Home]
) -> Iterator[LocalParam]:
    tp = _ranks(layout, param)
    shape = param.op.local_shape(model, tp, vocab)
    filled = [0] * tp
    for s in param.op.segments(model, tp, vocab):
        filled[s.tp] = max(filled[s.tp], s.row + s.rows)
    for chunk, name in homes:
        for rank in range(tp):
            place = _place(model, layout, param, chunk, rank)
            yield LocalParam(place, name, shape, (filled[rank], shape[0]))


def check_coverage(table: PieceTable) -> None:
    """AssertionError unless owners cover every HF element exactly once, and owners and replicas
    every element of every local parameter exactly once, vocabulary padding aside."""
    runs: dict[tuple[Place, str], list[tuple[int, int]]] = {}
    for t in table.tensors:
        _check_boxes(t)
        for p in (*t.pieces, *t.replicas):
            runs.setdefault((p.place, p.param), []).extend(p.view.runs())
            extent = tuple(b - a for a, b in zip(p.start, p.stop, strict=True))
            assert p.numel == math.prod(extent), f"{t.name}: view and box differ in size: {p}"
    for lp in table.params:
        width = math.prod(lp.shape[1:])
        covered = runs.pop((lp.place, lp.name), [])
        covered.append((lp.padding[0] * width, lp.padding[1] * width))
        end = 0
        for start, stop in sorted(covered):
            assert start == end, f"{lp}: element {min(start, end)} is covered not exactly once"
            end = stop
        assert end == math.prod(lp.shape), f"{lp}: elements from {end} on are not covered"
    assert not runs, f"pieces of undeclared parameters: {sorted(n for _, n in runs)}"


def _check_boxes(t: HfTensor) -> None:
    for p in t.pieces:
        inside = all(0 <= a < b <= n for a, b, n in zip(p.start, p.stop, t.shape, strict=True))
        assert inside, f"{t.name}{t.shape}: box of {p} lies outside"
    for i, p in enumerate(t.pieces):
        for q in t.pieces[:i]:
            overlap = all(
                max(a, c) < min(b, d)
                for a, b, c, d in zip(p.start, p.stop, q.start, q.stop, strict=True)
            )
            assert not overlap, f"{t.name}: covered twice by {p} and {q}"
    total = sum(p.numel for p in t.pieces)
    assert total == t.numel, f"{t.name}{t.shape}: {total} of {t.numel} elements covered"
