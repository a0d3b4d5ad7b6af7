"""Transfers between two layouts, and parameters moved by them within one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megarl.models.families import family_of
from megarl.models.families.grouped_query import GroupedQuery
from megarl.models.hf_config import ModelConfig
from megarl.models.params import load_params
from megarl.models.piece_table import (
    HfTensor,
    LocalParam,
    Piece,
    PieceTable,
    Place,
    View,
    build_piece_table,
    check_coverage,
)
from megarl.parallel.layout import Layout
from megarl.transfer import boxes as box_module
from megarl.transfer.boxes import Box
from megarl.transfer.geometry import Slice
from megarl.transfer.moves import Parts, land, lay_out, pack
from megarl.transfer.reallocate import plan_reallocation
from tests.unit.family_configs import FAMILIES, config

Params = list[dict[str, torch.Tensor]]  # by rank


@st.composite
def layouts(draw: Any, m: ModelConfig) -> Layout:
    tp, pp, dp = (draw(st.sampled_from(x)) for x in ((1, 2, 4), (1, 2, 4), (1, 2)))
    vpp = draw(st.sampled_from((1, 2))) if pp == 2 else 1
    ep, etp = (draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 2)))) if m.moe else (1, 1)
    assume(tp * dp % (ep * etp) == 0)
    split = draw(st.sampled_from((None, (1, 3)))) if pp == 2 and vpp == 1 else None
    return Layout(tp=tp, pp=pp, dp=dp, vpp=vpp, ep=ep, etp=etp, split=split)


@st.composite
def moves(draw: Any) -> tuple[PieceTable, PieceTable]:
    m = config(
        draw(st.sampled_from(sorted(FAMILIES))),
        vocab_size=draw(st.integers(5, 40)),
        tie_word_embeddings=draw(st.booleans()),
    )
    if isinstance(m.attention, GroupedQuery):
        m = config(
            f"{family_of(m).architecture}", vocab_size=m.vocab_size,
            num_key_value_heads=draw(st.sampled_from((1, 2, 4))),
            tie_word_embeddings=m.tie_word_embeddings,
        )  # fmt: skip
    a, b = (
        build_piece_table(m, draw(layouts(m)), vocab_divisible_by=draw(st.sampled_from((1, 2, 8))))
        for _ in range(2)
    )
    return a, b


def empty(table: PieceTable, value: float = 0.0) -> Params:
    """By rank, so that data-parallel replicas are memory of their own."""
    return [
        {n: torch.full(p.shape, value) for n, p in table.local_params(c).items()}
        for c in table.layout.all_coords
    ]


def numbered(table: PieceTable) -> Params:
    """Every element of every HF tensor has a number of its own; padding is 0."""
    starts, end = {}, 1
    for t in table.tensors:
        starts[t.name], end = end, end + t.numel

    def read(t: HfTensor, box: tuple[slice, ...]) -> torch.Tensor:
        return (starts[t.name] + torch.arange(float(t.numel))).view(t.shape)[box]

    params = empty(table)
    for c, local in zip(table.layout.all_coords, params, strict=True):
        load_params(table, c, local, read)
    return params


class Way:
    """A reallocation, and what every rank does in it, by rank."""

    def __init__(self, a: PieceTable, b: PieceTable, limit: int = 1 << 30, **options: Any) -> None:
        self.sources: Any = options.pop("source_ranks", range(a.layout.world_size))
        self.targets: Any = options.pop("target_ranks", range(b.layout.world_size))
        plan = plan_reallocation(
            a, b, self.sources, self.targets, dtype=torch.bfloat16, bucket_bytes=limit, **options
        )
        self.steps = {
            rank: plan.steps(rank, self.sources, limit)
            for rank in sorted({*self.sources, *self.targets})
        }

    @property
    def kept(self) -> list[tuple[int, Slice]]:
        """(rank of the target, where it puts a slice)"""
        return [
            (self.targets.index(rank), part)
            for rank, steps in self.steps.items()
            for step in steps
            for part in (*(s for _, s in step.stays), *(s for m in step.receives for s in m.slices))
        ]

    @property
    def pairs(self) -> set[tuple[int, int]]:
        """Ranks that send, and to whom."""
        return {
            (rank, m.receiver.rank)
            for rank, steps in self.steps.items()
            for step in steps
            for m in step.sends
        }

    def move(self, source: Params, target: Params) -> None:
        sent = {
            (m.round, m.sender, m.receiver.rank): pack(source[m.sender], whole(m.slices), CPU)
            for steps in self.steps.values()
            for step in steps
            for m in step.sends
        }
        for rank, steps in self.steps.items():
            for step in steps:
                for m in step.receives:
                    message = sent.pop((m.round, m.sender, rank))
                    land(target[self.targets.index(rank)], whole(m.slices), message)
                for here, there in step.stays:
                    message = pack(source[self.sources.index(rank)], whole([here]), CPU)
                    land(target[self.targets.index(rank)], whole([there]), message)
        assert not sent, "all that is sent is received"


CPU = torch.device("cpu")


def whole(slices: Sequence[Slice]) -> Parts:
    return lay_out(slices, {s.tensor: torch.float32 for s in slices})


@settings(max_examples=40, deadline=None)
@given(moves(), st.sampled_from((300, 1 << 30)))
def test_each_element_once_and_there_and_back_is_the_identity(
    tables: tuple[PieceTable, PieceTable], limit: int
) -> None:
    a, b = tables
    there, back = Way(a, b, limit), Way(b, a)
    written = empty(b)
    for rank, part in there.kept:
        for v in part.views:
            param = written[rank][part.param]
            param.as_strided(v.shape, v.strides, v.offset).add_(1)
    for c, local in zip(b.layout.all_coords, written, strict=True):
        for name, p in b.local_params(c).items():
            expected = torch.ones(p.shape)
            expected[slice(*p.padding)] = 0
            assert torch.equal(local[name], expected), (c, name)
    source, middle, end = numbered(a), empty(b), empty(a)
    there.move(source, middle)
    assert_equal(middle, numbered(b))
    back.move(middle, end)
    assert_equal(end, source)


@st.composite
def mixed_cuts(draw: Any) -> tuple[PieceTable, PieceTable]:
    """One matrix cut twice into boxes of any kind: each box along rows or columns, again and
    again. Every box is a parameter of its own."""
    shape = draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))

    def boxes(box: Box, depth: int) -> list[Box]:
        (start, stop), axis = box, draw(st.sampled_from((0, 1, None)))
        if depth == 0 or axis is None or stop[axis] - start[axis] < 2:
            return [box]
        at = draw(st.integers(start[axis] + 1, stop[axis] - 1))
        upper = tuple(at if i == axis else x for i, x in enumerate(stop))
        lower = tuple(at if i == axis else x for i, x in enumerate(start))
        return boxes((start, upper), depth - 1) + boxes((lower, stop), depth - 1)

    return matrix(shape, boxes(((0, 0), shape), 3)), matrix(shape, boxes(((0, 0), shape), 3))


def matrix(shape: tuple[int, int], boxes: list[Box]) -> PieceTable:
    """A table of one matrix whose boxes lie on two tensor-parallel ranks in turn."""
    layout, pieces, params = Layout(tp=2), [], []
    for i, (start, stop) in enumerate(boxes):
        rows, columns = (b - a for a, b in zip(start, stop, strict=True))
        place = Place(0, 0, tp=i % 2)
        pieces.append(Piece(place, f"p{i}", View(0, (rows, columns), (columns, 1)), start, stop))
        params.append(LocalParam(place, f"p{i}", (rows, columns), (rows, rows), False))
    table = PieceTable(config(), layout, 21, (HfTensor("w", shape, tuple(pieces)),), tuple(params))
    check_coverage(table)
    return table


@settings(max_examples=200, deadline=None)
@given(mixed_cuts())
def test_every_piece_of_mixed_cuts_is_found(tables: tuple[PieceTable, PieceTable]) -> None:
    a, b = tables
    target = empty(b, float("nan"))
    Way(a, b).move(numbered(a), target)
    assert_equal(target, numbered(b))


def test_rows_out_of_columns() -> None:
    """Source in two by columns, target in two by rows: each row block needs both columns."""
    columns = [((0, 0), (8, 4)), ((0, 4), (8, 8))]
    rows = [((0, 0), (4, 8)), ((4, 0), (8, 8))]
    way = Way(matrix((8, 8), columns), matrix((8, 8), rows))
    assert sorted((rank, part.start, part.stop) for rank, part in way.kept) == [
        (0, (0, 0), (4, 4)), (0, (0, 4), (4, 8)), (1, (4, 0), (8, 4)), (1, (4, 4), (8, 8)),
    ]  # fmt: skip
    assert way.pairs == {(0, 1), (1, 0)}


def test_a_source_with_a_hole_is_refused() -> None:
    whole = matrix((4, 4), [((0, 0), (4, 4))])
    (tensor,) = matrix((4, 4), [((0, 0), (2, 4)), ((2, 0), (4, 4))]).tensors
    hole = replace(whole, tensors=(replace(tensor, pieces=tensor.pieces[:1]),))
    with pytest.raises(ValueError, match="w: trainers hold 8 of the 16"):
        Way(hole, whole)


def assert_equal(a: Params, b: Params) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x)


def test_the_same_layout_moves_nothing() -> None:
    for layout in (Layout(tp=2, pp=2, dp=2), Layout(tp=4, pp=2)):
        table = build_piece_table(config(tie_word_embeddings=True), layout)
        assert not Way(table, table).pairs


def test_the_nearest_replica_sends_and_replicas_take_turns() -> None:
    m = config(vocab_size=32)
    a, b = build_piece_table(m, Layout(tp=2, dp=8)), build_piece_table(m, Layout(tp=4, dp=4))
    near = Way(a, b)  # a node of 8 ranks holds everything
    assert near.pairs and all(sender // 8 == receiver // 8 for sender, receiver in near.pairs)
    a, b = build_piece_table(m, Layout(tp=2, dp=4)), build_piece_table(m, Layout(tp=4, dp=2))
    far = Way(a, b, target_ranks=range(8, 16))
    assert {sender for sender, _ in far.pairs} == set(range(8))
    # rank 1 of the world is rank 0 of the target: what it has it takes from itself
    one = build_piece_table(m, Layout())
    stays = [s for step in Way(a, one, target_ranks=[1]).steps[1] for s, _ in step.stays]
    assert sum(s.numel for s in stays) > sum(t.numel for t in one.tensors) / 2


@pytest.mark.parametrize("limit", (1, 500, 1 << 20))
def test_steps_are_bounded_on_every_rank(limit: int) -> None:
    m = config("Qwen3MoeForCausalLM")
    a, b = build_piece_table(m, Layout(tp=2, pp=2, ep=2)), build_piece_table(m, Layout(tp=4))
    way = Way(a, b, limit)
    for steps in way.steps.values():
        for messages in ([*step.sends, *step.receives] for step in steps):
            sizes = [sum(2 * s.numel for s in message.slices) for message in messages]
            assert sum(sizes) <= limit or sizes == [2], "one number is the least that is sent"
    assert all(len(steps) == 1 for steps in way.steps.values()) == (limit == 1 << 20)


def test_no_rank_waits_in_a_circle() -> None:
    """A rank posts the messages of a step at once, and takes the next when all of them are done."""
    m = config("Qwen3MoeForCausalLM")
    a, b = build_piece_table(m, Layout(tp=2, pp=2, ep=2)), build_piece_table(m, Layout(tp=4))
    left = {
        rank: [
            {(m.round, m.sender, m.receiver) for m in (*step.sends, *step.receives)}
            for step in steps
        ]
        for rank, steps in Way(a, b, 300).steps.items()
    }
    while any(left.values()):
        posted = Counter(key for steps in left.values() for key in (steps[0] if steps else ()))
        met = {key for key, ends in posted.items() if ends == 2}
        ended = [steps for steps in left.values() if steps and not steps[0] - met]
        assert ended, "nobody can go on"
        for steps in left.values():
            if steps:
                steps[0] -= met
        for steps in ended:
            steps.pop(0)


def test_the_work_is_that_of_the_pieces_and_not_of_the_layers() -> None:
    """Layers that are alike cost no intersection, and more tensor ranks no more than pieces."""

    def calls(layers: int, tp: int) -> tuple[int, int]:
        m = config(num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=16,
                   intermediate_size=32, vocab_size=256)  # fmt: skip
        a, b = (build_piece_table(m, Layout(tp=n)) for n in (tp, 2 * tp))
        pieces = sum(len(t.pieces) + len(t.replicas) for x in (a, b) for t in x.tensors)
        with mock.patch.object(box_module, "intersection", wraps=box_module.intersection) as spy:
            Way(a, b)
        return spy.call_count, pieces

    assert calls(6, 4)[0] == calls(2, 4)[0]
    for tp in (2, 4, 8):
        count, pieces = calls(2, tp)
        assert count <= 2 * pieces
