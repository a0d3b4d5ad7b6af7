"""Plans of slices from trainers' parameters to those of servers, and their bounds."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tools.plan as tool
from megarl.models.piece_table import HfTensor, Piece, PieceTable, Place, View, build_piece_table
from megarl.parallel.layout import Layout
from megarl.planning.sync import server_tables
from megarl.transfer.boxes import Box, extents, uncovered
from megarl.transfer.geometry import Slice, Sources, TargetTable
from megarl.transfer.plan import Receiver, TransferPlan, nearest, plan_transfer
from tests.unit.family_configs import FAMILIES, config
from tests.unit.slice_moves import assert_delivered, dtypes
from tests.unit.test_reallocation_plan import layouts

MOE = "Qwen3MoeForCausalLM"


def planned(
    table: PieceTable, servers: Any, round_bytes: int = 1 << 20, **options: Any
) -> TransferPlan:
    targets = {Receiver(s, r): t for s, ranks in enumerate(servers) for r, t in enumerate(ranks)}
    return plan_transfer(
        Sources(table), targets, dtypes=dtypes(table), round_bytes=round_bytes, **options
    )


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_every_element_of_every_server_arrives_exactly_once(data: Any) -> None:
    m = config(data.draw(st.sampled_from(sorted(FAMILIES))), tie_word_embeddings=True)
    table = build_piece_table(m, data.draw(layouts(m)))
    shapes = st.sampled_from([(1, 1), (2, 1), (4, 1)] + [(2, 2), (4, 2)] * bool(m.moe))
    cuts = data.draw(st.lists(shapes, min_size=1, max_size=2))
    servers = [server_tables(m, tp, ep) for tp, ep in cuts]
    limit = data.draw(st.sampled_from((1, 30, 400, 1 << 20)))
    assert_delivered(planned(table, servers, limit), servers)


@st.composite
def boxes(draw: Any, box: Box, depth: int = 3) -> list[Box]:
    """A box cut in two along any dimension, again and again."""
    (start, stop), axis = box, draw(st.sampled_from((*range(len(box[0])), None)))
    if depth == 0 or axis is None or stop[axis] - start[axis] < 2:
        return [box]
    cut = draw(st.integers(start[axis] + 1, stop[axis] - 1))
    upper = tuple(cut if i == axis else x for i, x in enumerate(stop))
    lower = tuple(cut if i == axis else x for i, x in enumerate(start))
    return draw(boxes((start, upper), depth - 1)) + draw(boxes((lower, stop), depth - 1))


@st.composite
def views(draw: Any, shape: tuple[int, ...]) -> View:
    """Any strided view of as many numbers: dimensions in two, in any order, with gaps."""
    dims: list[int] = []
    for n in shape:
        rows = draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))
        dims += [n // rows, rows]
    strides, end = [0] * len(dims), 1
    for i in draw(st.permutations(range(len(dims)))):
        strides[i], end = end, end * dims[i] + draw(st.integers(0, 2))
    return View(draw(st.integers(0, 3)), tuple(dims), tuple(strides))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_box_meets_any_pieces_through_any_view(data: Any) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    whole = ((0,) * len(shape), shape)
    cut = [(box, data.draw(views(extents(box)))) for box in data.draw(boxes(whole))]
    pieces = [
        Piece(Place(0, 0, tp=i % 2), f"p{i}", view, *box) for i, (box, view) in enumerate(cut)
    ]
    table = PieceTable(config(), Layout(tp=2), 21, (HfTensor("w", shape, tuple(pieces)),), ())
    theirs = [(box, data.draw(views(extents(box)))) for box in data.draw(boxes(whole))]
    entries = [Slice("w", *box, f"q{i}", (v,)) for i, (box, v) in enumerate(theirs)]
    limit = data.draw(st.sampled_from((2, 10, 1 << 20)))
    servers = [[TargetTable(entries, "a"), TargetTable(entries[:1], "b")]]
    assert_delivered(planned(table, servers, limit), servers)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_numbers_in_no_box_are_counted(data: Any) -> None:
    """Boxes of two cuts of one tensor, some of each."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=3)))
    whole = ((0,) * len(shape), shape)
    found = [box for _ in range(2) for box in data.draw(boxes(whole)) if data.draw(st.booleans())]
    seen = np.zeros(shape, dtype=bool)
    for start, stop in found:
        seen[tuple(map(slice, start, stop))] = True
    assert uncovered(shape, found) == int((~seen).sum())


def test_a_row_of_a_view_that_runs_over_two_dimensions() -> None:
    """A loader that flattened a matrix left one dimension for its rows and columns."""
    piece = Piece(Place(0, 0, tp=0), "p", View(0, (12,), (1,)), (0, 0), (3, 4))
    table = PieceTable(config(), Layout(), 21, (HfTensor("w", (3, 4), (piece,)),), ())
    servers = [[TargetTable([Slice("w", (1, 1), (3, 3), "q", (View(0, (2, 2), (2, 1)),))], "a")]]
    assert_delivered(planned(table, servers), servers)


def test_messages_rounds_and_senders_are_bounded() -> None:
    m, limit = config(MOE), 300
    table = build_piece_table(m, Layout(tp=2, pp=2, dp=2, ep=2))
    plan = planned(table, [server_tables(m, 2)] * 2 + [server_tables(m, 4)], limit)
    for g in plan.geometries:
        assert np.bincount(g.round, g.nbytes).max() <= limit
    for rank in range(table.layout.world_size):
        sent = [sum(2 * s.numel for m in group for s in m.slices) for group in plan.sends(rank)]
        assert len(sent) > 2 and max(sent) <= limit
        rounds = [m.round for group in plan.sends(rank) for m in group]
        assert rounds == sorted(rounds), "both ends take rounds in order"


def test_all_sources_send_all_the_time() -> None:
    """Not the first stage first: in every tenth of the rounds, each source sends its tenth."""
    m = config(MOE, num_hidden_layers=16, hidden_size=32, vocab_size=32)
    table = build_piece_table(m, Layout(pp=4, dp=2, ep=2))
    (g,) = planned(table, [server_tables(m, 1)], 2000).geometries
    for source in np.unique(g.source):
        own = g.source == source
        for k in range(1, 10):
            sent = g.nbytes[own & (g.round < k * g.rounds / 10)].sum() / g.nbytes[own].sum()
            assert sent == pytest.approx(k / 10, abs=0.12)  # of a slice, as these are few


def sent_bytes(plan: TransferPlan) -> Any:
    """What each trainer rank sends, and the largest share that one receiver takes of a source."""
    load = np.zeros(plan.sources.table.layout.world_size, dtype=np.int64)
    largest = 0
    for g, row in zip(plan.geometries, plan.senders, strict=True):
        share = np.bincount(g.source, g.nbytes, len(row)).astype(int)
        np.add.at(load, row[row >= 0], share[row >= 0])
        largest = max(largest, share.max())
    return load, largest


@pytest.mark.parametrize(
    "layout", [Layout(dp=8), Layout(tp=2, dp=4), Layout(pp=2, dp=4, ep=4), Layout(tp=4, dp=4, ep=8)]
)
def test_replicas_share_the_work(layout: Layout) -> None:
    m = config(MOE, num_experts=8)
    table = build_piece_table(m, layout)
    plan = planned(table, [server_tables(m, 2)] * 5 + [server_tables(m, 4)])
    load, largest = sent_bytes(plan)
    stages = load.reshape(layout.pp, -1)
    assert (stages.max(1) - stages.min(1) <= largest).all(), stages
    assert load.sum() == sum(g.nbytes.sum() for g in plan.geometries)


def test_a_server_takes_from_its_own_node_what_is_there() -> None:
    m = config(MOE)
    table = build_piece_table(m, Layout(tp=2, dp=4, ep=2))
    servers, trainers = [server_tables(m, 2)] * 3, ["a"] * 4 + ["b"] * 4
    near, nodes = nearest(trainers), ["a", "b", None]
    plan = planned(table, servers, prefer=lambda to, ranks: near(nodes[to.target], ranks))
    rows = [{trainers[i] for i in row[row >= 0]} for row in plan.senders]
    assert rows == [{"a"}, {"a"}, {"b"}, {"b"}, {"a", "b"}, {"a", "b"}]
    assert_delivered(plan, servers)


def test_every_rank_makes_the_same_plan_and_equal_servers_share_one() -> None:
    m = config(MOE)
    layout = Layout(tp=2, pp=2, dp=2, ep=2)
    servers = [server_tables(m, 2), *[server_tables(m, 4)] * 7]
    a, b = (planned(build_piece_table(m, layout), servers, 500) for _ in range(2))
    assert len({id(g) for g in a.geometries}) == 2 + 4 and a.digests == b.digests
    assert a.receivers == b.receivers and len(a.receivers) == 2 + 7 * 4
    assert [list(a.sends(r)) for r in range(8)] == [list(b.sends(r)) for r in range(8)]
    assert [a.receives(r) for r in a.receivers] == [b.receives(r) for r in b.receivers]


def test_what_cannot_be_filled_is_an_error_that_names_it() -> None:
    m = config()
    table = build_piece_table(m, Layout(tp=2))
    (theirs,) = server_tables(m, 1)

    def refuse(words: str, entry: Slice, made: PieceTable = table) -> None:
        with pytest.raises(ValueError, match=words):
            planned(made, [[TargetTable([entry], "x")]])

    norm = next(e for e in theirs.entries if e.tensor == "model.norm.weight")
    refuse(
        "model.score: .* is made of it, and the trained model has",
        norm._replace(tensor="model.score"),
    )
    refuse(
        r"model.norm.weight: trainers hold 8 of the 9 elements",
        norm._replace(stop=(9,), views=(View(0, (9,), (1,)),)),
    )
    refuse(r"8 elements .* has a view of \[4\]", norm._replace(views=(View(0, (4,), (1,)),)))
    up = "model.layers.0.mlp.up_proj.weight"
    tensor = table.by_name[up]
    hole = replace(tensor, pieces=tensor.pieces[:1])
    entry = next(e for e in theirs.entries if e.tensor == up)
    refuse(f"{up}: trainers hold 64 of the 128", entry, replace(table, tensors=(hole,)))
    with pytest.raises(ValueError, match="rank 1 of server 0 has another table of digest x"):
        planned(table, [[TargetTable([norm], "x"), TargetTable([entry], "x")]])
    with pytest.raises(ValueError, match="round_bytes=0: must be > 0"):
        planned(table, [[theirs]], 0)


@pytest.mark.full
def test_a_large_cluster_is_planned_within_seconds() -> None:
    """512 trainers to 32 servers of 8 on one core; the bound leaves room for a busy machine."""
    m = tool.read_model("qwen3-235b-a22b")
    table = build_piece_table(m, Layout(tp=4, pp=4, dp=32, ep=8, split=(24, 24, 23, 23)))
    servers = [server_tables(m, 8)] * 32
    started = time.process_time()
    plan = planned(table, servers, 256 << 20)
    own = list(plan.sends(0)), plan.receives(Receiver(31, 7))
    assert time.process_time() - started < 30 and all(own)
    load, largest = sent_bytes(plan)
    assert load.max() < 1.1 * load.mean() and largest < load.max()
