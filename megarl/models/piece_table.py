"""The piece table: for every HF tensor, the pieces of Megatron parameters that make it up.

Pure data: no process group, no tensors; buildable for any layout anywhere. A piece says that a
strided view of one rank's local parameter and a box of one HF tensor hold the same numbers in the
same row-major order; how an op cuts a tensor over ranks gives both (`shard_map`).

`pieces` are owners: together they cover every element of the HF tensor exactly once. `replicas`
repeat an owner's numbers elsewhere (norms on the other tensor-parallel ranks, the tied embedding on
the last pipeline stage). Loading fills both; saving and streaming read owners. Data- and
context-parallel replicas hold what their peer at (pp, tp), or for experts (pp, ep, etp), holds;
they are not listed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from megarl.models.families import family_of
from megarl.models.families.params import Param
from megarl.models.hf_config import ModelConfig
from megarl.models.ops import Op, Permuted, Sections, Segment, Shape, SliceMap
from megarl.models.ops import View as View
from megarl.parallel.layout import Coords, Layout


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
    if isinstance(op, Permuted):
        shape = op.local_shape(model, ranks, vocab)
        (source,) = op.hf_shapes(model)
        return ShardMap(((source, op.slices(model, ranks)),), shape, (shape[0],) * ranks)
    segments = sorted(
        op.segments(model, ranks, vocab), key=lambda s: (s.source, s.tp, s.hf_row, s.hf_col)
    )
    by_source = {k: list(g) for k, g in groupby(segments, key=lambda s: s.source)}
    filled = [0] * ranks
    for s in segments:
        filled[s.tp] = max(filled[s.tp], s.row + s.rows)
    sources = tuple(
        (shape, tuple(_box(run, shape) for run in _merge(by_source[source])))
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
    step = s.row - a.row
    return step > 0 if len(run) < 2 else step == a.row - run[-2].row


def _box(run: list[Segment], hf_shape: Shape) -> SliceMap:
    first, last = run[0], run[-1]
    shape: Shape = (first.rows, first.cols)
    strides: Shape = (first.cols, 1)
    if len(run) > 1:
        shape = (len(run), *shape)
        strides = ((run[1].row - first.row) * first.cols, *strides)
    start: Shape = (first.hf_row, first.hf_col)
    stop: Shape = (last.hf_row + last.rows, first.hf_col + first.cols)
    if len(hf_shape) == 1:  # a vector: drop the column
        shape, strides = shape[:-1], strides[:-1]
    if len(hf_shape) != 2:  # whole behind its rows
        start = (start[0], *(0 for _ in hf_shape[1:]))
        stop = (stop[0], *hf_shape[1:])
    view = View(first.row * first.cols, shape, strides)
    return SliceMap(first.tp, view, start, stop)


# Rows per tensor-parallel rank are padded to a multiple of this: 16-byte rows of bf16 logits, which
# is what tensor cores ask for. Megatron-LM's default is 128: give that to share its checkpoints.
VOCAB_DIVISIBLE_BY = 8


def padded_vocab_size(vocab_size: int, tp: int, divisible_by: int = VOCAB_DIVISIBLE_BY) -> int:
    """Returns the smallest multiple of divisible_by * tp that holds `vocab_size` rows."""
    unit = divisible_by * tp
    return -(-vocab_size // unit) * unit


@dataclass(frozen=True, slots=True)
class Place:
    """Says which ranks hold a piece: dense weights have (pp, tp), experts (pp, ep, etp), and the
    other fields are None. `vpp`: the virtual pipeline chunk on those ranks."""

    pp: int
    vpp: int
    tp: int | None = None
    ep: int | None = None
    etp: int | None = None

    def holds(self, c: Coords) -> bool:
        """Returns whether the rank at `c` holds the piece, in whichever data-parallel replica."""
        if self.tp is not None:
            return (self.pp, self.tp) == (c.pp, c.tp)
        return (self.pp, self.ep, self.etp) == (c.pp, c.ep, c.etp)

    def rank(self, layout: Layout) -> int:
        """Returns the rank that holds the piece in the first data-parallel replica."""
        if self.tp is not None:
            return layout.dense_rank(pp=self.pp, tp=self.tp)
        assert self.ep is not None and self.etp is not None
        return layout.expert_rank(pp=self.pp, ep=self.ep, etp=self.etp)


@dataclass(frozen=True, slots=True)
class Piece:
    """Says that `view` of `param` at `place` equals box [start, stop) of the HF tensor."""

    place: Place
    param: str
    view: View
    start: Shape
    stop: Shape

    @property
    def numel(self) -> int:
        """Returns how many numbers the piece has."""
        return math.prod(self.view.shape)

    @property
    def box(self) -> tuple[slice, ...]:
        """Returns the slices of the HF tensor that the piece equals, one for each dimension."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))


@dataclass(frozen=True, slots=True)
class HfTensor:
    """Describes a tensor of the HF model, and the pieces that make it up. `buffer`: not trained.
    `fp32`: fp32 in every file and message, and in a bfloat16 model. `linear`: a linear map of a
    layer (see Op). `initial`: see Param."""

    name: str
    shape: Shape
    pieces: tuple[Piece, ...]
    replicas: tuple[Piece, ...] = ()
    buffer: bool = False
    fp32: bool = False
    linear: bool = False
    initial: str = ""

    @property
    def numel(self) -> int:
        """Returns how many numbers the tensor has."""
        return math.prod(self.shape)

    def held_by(self, c: Coords) -> Iterator[Piece]:
        """Returns an iterator over the pieces, owned or replicated, on the rank at `c`."""
        return (p for p in (*self.pieces, *self.replicas) if p.place.holds(c))


@dataclass(frozen=True, slots=True)
class LocalParam:
    """Describes a parameter of the ranks at `place`. `padding`: rows [start, stop) that no HF
    tensor fills. `replicated`: the ranks it could be cut over all hold the same whole parameter.
    `parts`: the parts that megatron-core's checkpoints keep one by one: what is behind the
    parameter's name, and rows."""

    place: Place
    name: str
    shape: Shape
    padding: tuple[int, int]
    replicated: bool
    parts: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class PieceTable:
    """Holds all pieces of a model in a layout. `tensors` are in HF order; `params` are those of all
    ranks; `padded_vocab_size` is in rows over all tensor-parallel ranks."""

    model: ModelConfig
    layout: Layout
    padded_vocab_size: int
    tensors: tuple[HfTensor, ...]  # in HF order
    params: tuple[LocalParam, ...]

    @cached_property
    def by_name(self) -> Mapping[str, HfTensor]:
        """Returns the tensors by HF name."""
        return {t.name: t for t in self.tensors}

    @cached_property
    def trained(self) -> PieceTable:
        """Returns the table without the buffers."""
        return replace(self, tensors=tuple(t for t in self.tensors if not t.buffer))

    @cached_property
    def buffers(self) -> frozenset[str]:
        """Returns the names of the parameters that are buffers."""
        return frozenset(p.param for t in self.tensors if t.buffer for p in t.pieces)

    @cached_property
    def fp32(self) -> frozenset[str]:
        """Returns the names of the parameters that are fp32 in a bfloat16 model."""
        return frozenset(p.param for t in self.tensors if t.fp32 for p in t.pieces)

    def local_params(self, c: Coords) -> dict[str, LocalParam]:
        """Returns, by canonical name, the parameters that the rank at `c` must have."""
        return {p.name: p for p in self.params if p.place.holds(c)}

    def check_params(self, c: Coords, shapes: Mapping[str, Iterable[int]]) -> None:
        """Raises AssertionError unless the rank's parameters have the table's names and shapes."""
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
    """Builds the table of `model` cut as `layout` says, and checks its coverage. `params`, each
    with its layer or None, stand in for those of the model's family. Raises AssertionError where
    coverage fails."""
    vocab = padded_vocab_size(model.vocab_size, layout.tp, vocab_divisible_by)
    tensors: dict[str, HfTensor] = {}
    local: list[LocalParam] = []
    chunk_of = layout.chunk_of(model.num_layers)
    last = (layout.pp - 1, layout.vpp - 1)
    cuts: dict[tuple[Op, int], ShardMap] = {}  # layers and experts are cut alike
    for param, layer in family_of(model).params(model) if params is None else params:
        op, ranks = param.op, layout.tp if param.expert is None else layout.etp
        if (op, ranks) not in cuts:
            cuts[op, ranks] = shard_map(model, op, ranks, vocab)
        cut = cuts[op, ranks]
        parts: tuple[tuple[str, int], ...] = ()
        if isinstance(op, Sections) and param.parts:
            parts = tuple(
                zip((f".{part}" for part in param.parts), op.sections(model, ranks), strict=True)
            )
        if layer is not None:
            chunk = chunk_of[layer]
        else:
            chunk = (0, 0) if param.stage == "first" else last
        homes = [(param.name, _places(model, layout, param, chunk))]
        if param.copy_on_last and layout.pp > 1:
            homes.append((param.copy_on_last, _places(model, layout, param, last)))
        for name, places in homes:
            for place, filled in zip(places, cut.filled, strict=True):
                padding = (filled, cut.shape[0])
                local.append(LocalParam(place, name, cut.shape, padding, op.replicated, parts))
        sources = zip(param.hf, param.hf_shapes(model), cut.sources, strict=True)
        for hf_name, shape, (_, boxes) in sources:
            pieces = tuple(
                Piece(places[box.rank], name, box.view, *hf_box(param, box))
                for name, places in homes
                for box in boxes
            )
            # owners come first: the first home's, of what ranks hold alike the first rank's
            owners = sum(box.rank == 0 for box in boxes) if op.replicated else len(boxes)
            tensor = HfTensor(
                hf_name,
                shape,
                pieces[:owners],
                pieces[owners:],
                buffer=param.buffer,
                fp32=param.fp32 or param.buffer,
                linear=op.linear,
                initial=param.initial,
            )
            if param.stacked and (others := tensors.get(hf_name)) is not None:
                owned = others.pieces + tensor.pieces
                tensor = replace(others, pieces=owned, replicas=others.replicas + tensor.replicas)
            else:
                assert hf_name not in tensors, f"two parameters are made of {hf_name}"
            tensors[hf_name] = tensor
    table = PieceTable(model, layout, vocab, tuple(tensors.values()), tuple(local))
    check_coverage(table)
    return table


def hf_box(param: Param, box: SliceMap) -> tuple[Shape, Shape]:
    """Returns the box [start, stop) of a parameter's HF tensor, which may be that of all
    experts."""
    if not param.stacked:
        return box.start, box.stop
    assert param.expert is not None
    return (param.expert, *box.start), (param.expert + 1, *box.stop)


def _places(
    model: ModelConfig, layout: Layout, param: Param, chunk: tuple[int, int]
) -> list[Place]:
    """Returns the places of a parameter's shares in a pipeline chunk (pp, vpp): experts lie on
    expert-parallel ranks in order, evenly."""
    if param.expert is None:
        return [Place(*chunk, tp=rank) for rank in range(layout.tp)]
    ep = param.expert * layout.ep // model.experts.num_experts
    return [Place(*chunk, ep=ep, etp=rank) for rank in range(layout.etp)]


def check_coverage(table: PieceTable) -> None:
    """Raises AssertionError unless owners cover every HF element exactly once, and owners and
    replicas every element of every local parameter exactly once, vocabulary padding aside.

    A cover that was found right is not checked again: layers and experts are alike.
    """
    views: dict[tuple[Place, str], list[View]] = {}
    right: set[object] = set()
    for t in table.tensors:
        boxes = (t.shape, *((p.start, p.stop, p.view) for p in t.pieces))
        if boxes not in right:
            _check_boxes(t)
            right.add(boxes)
        for p in (*t.pieces, *t.replicas):
            views.setdefault((p.place, p.param), []).append(p.view)
            extent = (p.view.shape, p.start, p.stop)
            if extent not in right:
                size = math.prod(b - a for a, b in zip(p.start, p.stop, strict=True))
                assert p.numel == size, f"{t.name}: view and box differ in size: {p}"
                right.add(extent)
    for lp in table.params:
        found = views.pop((lp.place, lp.name), [])
        cover = (lp.shape, lp.padding, *found)
        if cover not in right:
            _check_views(lp, found)
            right.add(cover)
    assert not views, f"pieces of undeclared parameters: {sorted(n for _, n in views)}"


def _check_views(lp: LocalParam, views: list[View]) -> None:
    width = math.prod(lp.shape[1:])
    covered = [run for view in views for run in view.runs()]
    covered.append((lp.padding[0] * width, lp.padding[1] * width))
    end = 0
    for start, stop in sorted(covered):
        assert start == end, f"{lp}: element {min(start, end)} is covered not exactly once"
        end = stop
    assert end == math.prod(lp.shape), f"{lp}: elements from {end} on are not covered"


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
