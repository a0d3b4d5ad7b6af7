"""Graphs of calls: built from keys, checked, placed on meshes, and ReaL's two examples."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import networkx as nx
import pytest

from megarl.config.engine import ParallelConfig
from megarl.dataflow.graph import (
    GENERATE,
    INFERENCE,
    TRAIN_STEP,
    Call,
    across_steps,
    allocate,
    build_graph,
    calls_of,
    homes,
)
from megarl.dataflow.graphs import GRAPHS, grpo, ppo, remax, sft
from megarl.dataflow.mesh import Allocation, Devices, Mesh
from megarl.models.piece_table import build_piece_table
from tests.unit.family_configs import config
from tests.unit.graph_facts import (
    concurrent,
    groups,
    layers,
    peak_residents,
    reallocated,
    residents,
    unrolled,
)

GEN = Call("gen", "actor", GENERATE, ("prompts",), ("ids",))
TRAIN = Call("train", "actor", TRAIN_STEP, ("ids",))


def at(first: int, count: int, **degrees: int) -> Allocation:
    return Allocation(Mesh(first, count), ParallelConfig(**degrees))


# meshes


def test_meshes_are_whole_nodes_or_equal_parts_of_one() -> None:
    devices = Devices(2, 4)
    parts = [(i, 1) for i in range(8)] + [(i, 2) for i in range(0, 8, 2)]
    meshes = [*parts, (0, 4), (4, 4), (0, 8)]
    for first in range(-1, 9):
        for count in range(10):
            legal = (first, count) in meshes
            if legal:
                devices.check(Mesh(first, count))
            else:
                with pytest.raises(ValueError, match="mesh "):
                    devices.check(Mesh(first, count))


def test_a_mesh_of_a_node_that_is_no_power_of_two() -> None:
    for count in (1, 2, 3, 6):
        Devices(1, 6).check(Mesh(0, count))
    with pytest.raises(ValueError, match=r"mesh g1-g2: .* such as g0 or g3-g5"):
        Devices(1, 6).check(Mesh(1, 2))


def test_meshes_overlap_or_are_disjoint() -> None:
    assert not set(Mesh(0, 4).devices).isdisjoint(Mesh(2, 2).devices)
    assert set(Mesh(0, 4).devices).isdisjoint(Mesh(4, 4).devices)
    assert list(Mesh(8, 3).devices) == [8, 9, 10]


def test_a_strategy_fits_its_mesh() -> None:
    assert str(at(4, 4, tp=2)) == "g4-g7 dp2 tp2" and str(at(3, 1)) == "g3"
    assert Allocation.parse("g0-g7 dp4 pp2") == at(0, 8, pp=2)
    assert Allocation.parse("g8 ") == at(8, 1)
    for text, message in (
        ("0-7 tp2", "give a mesh and degrees"),
        ("g0-g7 tp", "give a mesh and degrees"),
        ("", "give a mesh and degrees"),
        ("g0-g7 dp2 tp2", "dp2 does not fit: dp is 4 on this mesh"),
    ):
        with pytest.raises(ValueError, match=message):
            Allocation.parse(text)
    with pytest.raises(ValueError, match=r"tp\*pp\*cp = 1\*3\*1 = 3 does not divide"):
        at(0, 4, pp=3)


# building


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([GEN, replace(GEN, outputs=())], "2 calls are named 'gen'"),
        ([replace(GEN, kind="sample")], "call 'gen': kind 'sample' is none of generate, inference"),
        ([TRAIN], "call 'train' reads 'ids', which no call makes"),
        ([GEN, replace(GEN, name="again")], "key 'ids' is made by call 'gen' and call 'again'"),
        ([replace(GEN, outputs=("prompts",))], "'prompts' is made by the data set and call 'gen'"),
        ([GEN, TRAIN, replace(TRAIN, name="more")], "calls 'train' and 'more' both train 'actor'"),
        ([replace(GEN, into="logp")], "call 'gen': into='logp' is not among its outputs"),
        ([GEN, replace(TRAIN, outputs=("a",), inputs=("a",))], r"'train' waits for 'train' \(a\)"),
        (
            [Call("a", "x", INFERENCE, ("k",), ("l",)), Call("b", "y", INFERENCE, ("l",), ("k",))],
            r"'b' waits for 'a' \(l\); 'a' waits for 'b' \(k\)",
        ),
        ([replace(GEN, where=at(1, 2))], "call 'gen': mesh g1-g2: a mesh is whole nodes of 4"),
        ([replace(GEN, where=at(4, 4))], "call 'gen': mesh g4-g7: 1x4 devices are g0-g3"),
    ],
)
def test_a_wrong_graph_is_refused_by_name(calls: list[Call], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_graph(calls, devices=Devices(1, 4))


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        build_graph([TRAIN, replace(TRAIN, name="again", kind="learn")])
    assert len(str(caught.value).splitlines()) == 3


def test_two_models_that_wait_for_each_others_new_weights() -> None:
    """Each call reads old weights of a model whose new ones it would need to be made first."""
    calls = [
        Call("train_a", "a", TRAIN_STEP, (), ("x",)),
        Call("read_b", "b", INFERENCE, ("x",)),
        Call("train_b", "b", TRAIN_STEP, (), ("y",)),
        Call("read_a", "a", INFERENCE, ("y",)),
    ]
    with pytest.raises(ValueError, match=r"wait for each other: .*the weights of [ab]"):
        build_graph(calls)


def test_old_weights_are_read_before_they_change() -> None:
    watch = Call("watch", "actor", INFERENCE, ("ids",), ("entropy",))
    after = Call("after", "actor", INFERENCE, ("done",))
    graph = build_graph([GEN, replace(TRAIN, outputs=("done",)), watch, after])
    assert graph.edges["gen", "train"] == {"keys": ("ids",), "version": ""}
    assert graph.edges["watch", "train"] == {"keys": (), "version": "actor"}
    assert graph.edges["train", "after"] == {"keys": ("done",), "version": ""}
    assert [c.name for c in calls_of(graph)] == ["gen", "watch", "train", "after"]


def test_the_first_call_of_a_step_follows_the_models_last_of_the_step_before() -> None:
    graph = ppo()
    assert set(across_steps(graph)) == {
        ("train_actor", "generate"),
        ("train_critic", "values"),
        ("reward", "reward"),
        ("ref", "ref"),
    }
    many = unrolled(graph, 3)
    assert len(many) == 21 and nx.is_directed_acyclic_graph(many)
    edge = many.edges[(0, "train_critic"), (1, "values")]
    assert edge == {"keys": (), "version": "critic"}
    # the actor's new weights are enough to generate: the critic may still be training
    assert not nx.has_path(many, (0, "train_critic"), (1, "generate"))
    assert calls_of(graph)[0] == many.nodes[2, "generate"]["call"]


def test_the_algorithms() -> None:
    assert list(GRAPHS) == ["ppo", "grpo", "remax", "sft"]
    assert [c.name for c in calls_of(ppo(recompute=True))] == [
        *("generate", "reward", "ref", "logp", "values", "gae", "train_critic", "train_actor")
    ]
    assert [c.name for c in calls_of(grpo())] == ["generate", "ref", "advantages", "train_actor"]
    assert [c.name for c in calls_of(remax())] == ["generate", "advantages", "train_actor"]
    assert list(sft()) == ["train"] and across_steps(sft()) == [("train", "train")]
    assert grpo().edges["generate", "advantages"]["keys"] == ("loss_mask", "rewards", "group_ids")
    assert "baseline" in remax().edges["generate", "advantages"]["keys"]


# placing


def test_graphs_and_their_drawings_need_no_torch() -> None:
    code = "import sys, megarl.dataflow.graph; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_what_runs_elsewhere_than_at_home() -> None:
    where = {"generate": at(0, 4), "train_actor": at(0, 2), "values": at(2, 2), "ref": at(0, 2)}
    where["train_critic"] = at(2, 2)
    graph = allocate(ppo(reward_model=False), where, Devices(1, 4))
    assert homes(graph) == {"actor": at(0, 2), "critic": at(2, 2), "ref": at(0, 2)}
    assert reallocated(graph) == {"generate"}
    assert concurrent(graph) == {
        frozenset(pair) for pair in (("values", "ref"), ("train_critic", "train_actor"))
    }
    assert residents(graph)[3] == {
        "generate": ("critic", "actor (generate)"),
        "values": ("critic",),
        "train_critic": ("critic",),
    }
    assert peak_residents(graph)[0] == ("actor", "ref", "actor (generate)")
    with pytest.raises(ValueError, match="no call is named 'reward'; the graph's are generate"):
        allocate(graph, {"reward": at(0, 1)})


def test_an_offloaded_model_is_there_while_it_is_called() -> None:
    where = {"generate": at(0, 2), "ref": at(0, 2), "train_actor": at(0, 2)}
    graph = allocate(grpo(), where)
    assert peak_residents(graph)[1] == ("actor", "ref")
    calls = [replace(c, offload=c.model == "ref") for c in calls_of(graph)]
    found = residents(build_graph(calls))[1]
    assert found["ref"] == ("actor", "ref") and found["train_actor"] == ("actor",)


# ReaL's text: "Implementation Details" (arXiv 2406.14088)

EIGHT = {
    "generate": at(0, 8, pp=2),
    "values": at(0, 2),
    "reward": at(2, 2, pp=2),
    "ref": at(4, 4, pp=4),
    "train_critic": at(4, 4, pp=2),
    "train_actor": at(0, 4, pp=2),
}


def test_ppo_on_one_node_of_eight() -> None:
    """The six calls of ppo_manual, with their degrees and their meshes."""
    graph = allocate(ppo(), EIGHT, Devices(1, 8))
    assert {name: str(where) for name, where in EIGHT.items()} == {
        "generate": "g0-g7 dp4 pp2",
        "values": "g0-g1 dp2",
        "reward": "g2-g3 pp2",
        "ref": "g4-g7 pp4",
        "train_critic": "g4-g7 dp2 pp2",
        "train_actor": "g0-g3 dp2 pp2",
    }
    side_by_side = [{"values", "reward"}, {"values", "ref"}, {"reward", "ref"}]
    side_by_side += [{"train_critic", "train_actor"}]
    assert concurrent(graph) == {frozenset(pair) for pair in side_by_side}
    assert reallocated(graph) == {"generate", "values"}
    # ReaL's frozen models rest in host memory
    calls = [replace(c, offload=c.model in ("ref", "reward_model")) for c in calls_of(graph)]
    found = residents(build_graph(calls))
    assert found[0] == {
        "generate": ("actor", "actor (generate)"),
        "values": ("actor", "critic (values)"),
        "gae": ("actor",),
        "train_actor": ("actor",),
    }
    assert found[4]["ref"] == ("critic", "ref") and found[2]["reward"] == ("actor", "reward_model")
    assert {len(there) for there in peak_residents(build_graph(calls)).values()} == {2}


def test_who_holds_which_layers_in_ppo_on_one_node_of_eight() -> None:
    """The text's list, for models of 32 layers, beside what it leaves out: g0 and g1 hold the first
    half of the actor to generate, too; and the critic's copy is on g1 as well, since dp is 2."""
    whole, first, second = range(32), range(16), range(16, 32)
    quarters = [range(8 * i, 8 * i + 8) for i in range(4)]
    listed: dict[str, dict[int, range]] = {
        "train_actor": {0: first, 1: first, 2: second, 3: second},
        "values": {0: whole, 1: whole},
        "generate": {g: first if g < 4 else second for g in range(8)},
        "reward": {2: first, 3: second},
        "train_critic": {4: first, 5: first, 6: second, 7: second},
        "ref": {4 + i: quarter for i, quarter in enumerate(quarters)},
    }
    for name, where in EIGHT.items():
        assert layers(where, 32) == {g: tuple(held) for g, held in listed[name].items()}, name
    m = config(num_hidden_layers=32)  # the same from the piece table, weight by weight
    for name, where in EIGHT.items():
        table = build_piece_table(m, where.layout)
        for rank, device in enumerate(where.mesh.devices):
            held = {
                int(t.name.split(".")[2])
                for t in table.tensors
                if ".layers." in t.name and any(t.held_by(where.layout.coords(rank)))
            }
            assert held == set(listed[name][device]), (name, device)


def test_two_calls_on_two_nodes_of_eight() -> None:
    """Sub-groups, rank mappings and groups as the text lists them. It calls call 2's pipeline group
    [g0..g15], "virtual": with pp=1 each stage is alone, and tp*dp has all 16."""
    devices = Devices(2, 8)
    calls = at(8, 8, tp=2, pp=2), at(0, 16, tp=4)
    for call in calls:
        devices.check(call.mesh)
    one, two = calls
    assert (str(one), str(two)) == ("g8-g15 dp2 tp2 pp2", "g0-g15 dp4 tp4")
    assert list(one.mesh.devices) == list(range(8, 16)) and two.mesh == devices.all
    assert list(two.mesh.devices) == list(range(16))
    assert groups(one, "pp") == [[8, 12], [9, 13], [10, 14], [11, 15]]
    assert groups(one, "tp") == [[8, 9], [10, 11], [12, 13], [14, 15]]
    assert groups(one, "dp") == [[8, 10], [9, 11], [12, 14], [13, 15]]
    assert groups(two, "tp") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert groups(two, "dp") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    assert groups(two, "pp") == [[g] for g in range(16)]
