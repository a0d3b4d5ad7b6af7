"""Rank arithmetic, against megatron-core's own generator of rank groups."""

from __future__ import annotations

import pytest

from megarl.config.engine import ParallelConfig
from megarl.parallel import mcore  # noqa: F401
from megarl.parallel.layout import Coords, Layout

from megatron.core.parallel_state import RankGenerator

DENSE = [
    Layout(tp=2, cp=2, dp=3, pp=2),
    Layout(tp=4, pp=2, dp=2),
    Layout(dp=8),
]
EXPERTS = [Layout(tp=2, dp=4, pp=2, ep=2, etp=2), Layout(tp=4, dp=2, ep=8), Layout(dp=8, ep=4)]


def together(layout: Layout, *same: str) -> set[frozenset[int]]:
    """Ranks that share every coordinate in `same`."""
    groups: dict[tuple[int, ...], set[int]] = {}
    for rank in range(layout.world_size):
        c = layout.coords(rank)
        groups.setdefault(tuple(getattr(c, a) for a in same), set()).add(rank)
    return {frozenset(g) for g in groups.values()}


def megatron(axis: str, **sizes: int) -> set[frozenset[int]]:
    generator = RankGenerator(**{"ep": 1, "cp": 1, **sizes}, order="tp-cp-ep-dp-pp")
    return {frozenset(g) for g in generator.get_ranks(axis)}


@pytest.mark.parametrize("layout", DENSE, ids=str)
def test_dense_coordinates_are_megatrons(layout):
    sizes = dict(tp=layout.tp, cp=layout.cp, dp=layout.dp, pp=layout.pp)
    for axis in ("tp", "cp", "dp", "pp"):
        rest = {"tp", "cp", "dp", "pp"} - {axis}
        assert together(layout, *sorted(rest)) == megatron(axis, **sizes), axis


@pytest.mark.parametrize("layout", EXPERTS, ids=str)
def test_expert_coordinates_are_megatrons(layout):
    sizes = dict(tp=layout.etp, ep=layout.ep, dp=layout.edp, pp=layout.pp)
    for axis, name in (("tp", "etp"), ("ep", "ep"), ("dp", "edp"), ("pp", "pp")):
        rest = {"etp", "ep", "edp", "pp"} - {name}
        assert together(layout, *sorted(rest)) == megatron(axis, **sizes), axis


def test_two_model_function_calls_on_a_mesh_of_two_nodes():
    """The example of ReaL's documentation ("Parallelism Strategy", arXiv 2406.14088): 2 nodes of 8
    GPUs, one call on the second node, the other on both. A mesh is a run of consecutive ranks.
    """
    second_node = range(8, 16)
    call_1, call_2 = Layout(dp=2, tp=2, pp=2), Layout(dp=4, tp=4, pp=1)
    assert call_1.world_size == len(second_node) and call_2.world_size == 16

    def groups(layout: Layout, axis: str, mesh: range = range(16)) -> list[list[int]]:
        rest = {"tp", "cp", "dp", "pp"} - {axis}
        return sorted(sorted(mesh[r] for r in g) for g in together(layout, *sorted(rest)))

    assert groups(call_1, "pp", second_node) == [[8, 12], [9, 13], [10, 14], [11, 15]]
    assert groups(call_1, "tp", second_node) == [[8, 9], [10, 11], [12, 13], [14, 15]]
    assert groups(call_1, "dp", second_node) == [[8, 10], [9, 11], [12, 14], [13, 15]]
    assert groups(call_2, "tp") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert groups(call_2, "dp") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    # pp=1: every stage is alone, where ReaL speaks of one virtual group of all
    assert groups(call_2, "pp") == [[r] for r in range(16)]
    # GPU 13 holds half of the second half of call 1's layers, and a quarter of each of call 2's
    assert call_1.coords(second_node.index(13)) == Coords(
        tp=1, cp=0, dp=0, pp=1, ep=0, etp=0, edp=1
    )
    assert call_1.layers(8, pp=1) == range(4, 8) and call_2.layers(8, pp=0) == range(8)
    assert (call_2.coords(13).tp, call_2.coords(13).dp) == (1, 3)


@pytest.mark.parametrize("layout", DENSE + EXPERTS, ids=str)
def test_ranks_and_coordinates_are_inverse(layout):
    assert len(set(layout.all_coords)) == layout.world_size
    for rank, c in enumerate(layout.all_coords):
        assert layout.dense_rank(pp=c.pp, tp=c.tp, dp=c.dp, cp=c.cp) == rank
        assert layout.expert_rank(pp=c.pp, ep=c.ep, etp=c.etp, edp=c.edp) == rank


def test_data_parallel_degree_is_derived():
    cfg = ParallelConfig(tp=2, pp=2, sequence_parallel=True)
    layout = Layout.from_config(cfg, 8)
    assert (layout.dp, layout.world_size, layout.sequence_parallel) == (2, 8, True)
    assert layout.coords(5) == Coords(tp=1, cp=0, dp=0, pp=1, ep=0, etp=0, edp=1)


@pytest.mark.parametrize(
    ("parallel", "world", "message"),
    [
        (dict(tp=3), 8, r"tp\*pp\*cp = 3\*1\*1 = 3 does not divide the world size 8"),
        (dict(tp=0), 8, r"parallel.tp=0"),
        (dict(ep=3), 8, r"etp\*ep\*pp = 1\*3\*1 = 3 does not divide the world size 8"),
        (dict(vpp=2), 8, r"parallel.vpp=2: needs parallel.pp > 1"),
        (dict(sequence_parallel=True), 8, r"sequence_parallel=true: needs parallel.tp > 1"),
    ],
)
def test_impossible_layouts_name_the_value(parallel, world, message):
    with pytest.raises(ValueError, match=message):
        Layout.from_config(ParallelConfig(**parallel), world)


def test_layers_of_interleaved_chunks():
    layout = Layout(pp=2, vpp=2)
    assert list(layout.layers(8, pp=0, vpp=0)) == [0, 1]
    assert list(layout.layers(8, pp=1, vpp=0)) == [2, 3]
    assert list(layout.layers(8, pp=0, vpp=1)) == [4, 5]
    with pytest.raises(ValueError, match="6 layers do not divide"):
        layout.layers(6, pp=0)


def test_a_rank_outside_is_an_error():
    with pytest.raises(ValueError, match="rank 8 is outside"):
        Layout(dp=8).coords(8)
