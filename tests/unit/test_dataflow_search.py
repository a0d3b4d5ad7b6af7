"""Simulated steps against closed forms, the search for allocations, and the costs behind both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import networkx as nx
import pytest

from megarl.config.parallel import ParallelConfig
from megarl.dataflow import search as searching
from megarl.dataflow.call import COMPUTE, GENERATE, INFERENCE, TRAIN_STEP, Call
from megarl.dataflow.costs import ModelCosts, StepWork, incoming
from megarl.dataflow.graph import allocate, build_graph, calls_of
from megarl.dataflow.graphs import ppo
from megarl.dataflow.mesh import Allocation, Devices, Mesh
from megarl.dataflow.schedule import MOVE, RUN, Costs, Simulator, Timeline
from megarl.dataflow.search import options, search
from megarl.models.piece_table import build_piece_table
from megarl.models.value_model import value_model
from megarl.planning.traffic import Cluster
from megarl.weight_sync.reallocation_plan import plan_transfers
from tests.unit.family_configs import config
from tools import plan as tool


@dataclass
class Table:
    """Costs from a table: `work` by call, in device-seconds unless `fixed`."""

    work: Mapping[str, float]
    fixed: bool = True
    moving: float = 0.0
    loading: float = 0.0
    fetching: float = 0.0
    weights: Mapping[str, int] = field(default_factory=dict)
    capacity: int = 10

    def run(self, call: Call, where: Allocation, room: int) -> float:
        return self.work.get(call.name, 0.0) / (1 if self.fixed else where.mesh.count)

    def reallocate(self, model: str, source: Allocation, target: Allocation) -> float:
        return self.moving

    def onload(self, call: Call, where: Allocation) -> float:
        return self.loading

    def fetch(self, keys: Sequence[str], source: Allocation, target: Allocation) -> float:
        return self.fetching * len(keys)

    def held(self, call: Call, where: Allocation) -> Sequence[int]:
        return (self.weights.get(call.model, 0),)

    def working(self, call: Call, where: Allocation) -> Sequence[int]:
        return (1,)


def schedule(graph: nx.DiGraph, costs: Costs, steps: int = 3) -> Timeline:
    """The timeline of a graph whose calls say where they run."""
    where = {call.name: call.where for call in calls_of(graph) if call.where is not None}
    return Simulator(graph, costs).run(where, steps)


def at(first: int, count: int, **degrees: int) -> Allocation:
    return Allocation(Mesh(first, count), ParallelConfig(**degrees))


FORK = build_graph(
    [
        Call("gen", "actor", GENERATE, ("prompts",), ("ids",)),
        Call("ref", "ref", INFERENCE, ("ids",), ("ref_logp",)),
        Call("values", "critic", INFERENCE, ("ids",), ("values",)),
        Call("gae", "actor", COMPUTE, ("ref_logp", "values"), ("advantages",)),
        Call("train", "actor", TRAIN_STEP, ("ids", "advantages")),
    ]
)
WORK = {"gen": 4.0, "ref": 2.0, "values": 3.0, "train": 5.0}


def runs(timeline: Timeline, step: int = 0) -> dict[str, tuple[float, float]]:
    return {
        s.call.name: (s.start, s.end) for s in timeline.spans if (s.step, s.what) == (step, RUN)
    }


def placed(**where: Allocation) -> Timeline:
    return schedule(allocate(FORK, where), Table(WORK))


def test_calls_on_disjoint_meshes_overlap_and_on_one_mesh_take_turns() -> None:
    whole, left, right = at(0, 2), at(0, 1), at(1, 1)
    apart = placed(gen=whole, ref=left, values=right, train=whole)
    assert runs(apart) == {
        "gen": (0, 4), "ref": (4, 6), "values": (4, 7), "gae": (7, 7), "train": (7, 12),
    }  # fmt: skip
    assert apart.seconds == 4 + max(2, 3) + 5
    together = placed(gen=whole, ref=whole, values=whole, train=whole)
    assert runs(together)["values"] == (6, 9) and together.seconds == sum(WORK.values())
    # ids are there, but an earlier call of the one order has the device
    half = placed(gen=whole, ref=whole, values=right, train=whole)
    assert runs(half)["values"] == (6, 9)


def test_weights_that_move_take_both_meshes() -> None:
    graph = allocate(FORK, {"gen": at(0, 2), "ref": at(1, 1), "values": at(1, 1)})
    graph = allocate(graph, {"train": at(0, 1)})
    timeline = schedule(graph, Table(WORK, moving=0.5, fetching=0.25), steps=1)
    first, *_ = timeline.spans
    assert (first.call.name, first.what, first.start, first.end) == ("gen", MOVE, 0, 0.5)
    assert first.meshes == (Mesh(0, 1), Mesh(0, 2))
    # ids to ref and values; ref_logp and values to the actor's home, where gae runs; ids to train
    assert runs(timeline) == {
        "gen": (0.5, 4.5), "ref": (4.5, 6.75), "values": (6.75, 10.0),
        "gae": (10.0, 10.5), "train": (10.5, 15.75),
    }  # fmt: skip
    assert [s.hooks for s in timeline.spans] == [0, 0, 0.25, 0.25, 0.5, 0.25]


def test_a_model_in_host_memory_comes_back_for_its_call() -> None:
    graph = build_graph([replace(c, offload=c.model == "ref") for c in calls_of(FORK)])
    graph = allocate(graph, dict.fromkeys(("gen", "ref", "values", "train"), at(0, 1)))
    costs = Table(WORK, loading=0.5, weights={"actor": 4, "ref": 2, "critic": 3})
    timeline = schedule(graph, costs)
    assert timeline.seconds == sum(WORK.values()) + 0.5
    assert timeline.nbytes == {"gen": 8, "ref": 10, "values": 8, "gae": 8, "train": 8}


def test_the_next_step_begins_where_its_weights_and_devices_allow() -> None:
    """The critic trains on devices of its own while the actor, done, generates the next answers."""
    calls = [*calls_of(FORK), Call("fit", "critic", TRAIN_STEP, ("ids", "values"))]
    graph = build_graph(calls)
    left, right = at(0, 1), at(1, 1)
    where = dict(gen=left, ref=left, values=right, train=left, fit=right)
    timeline = schedule(allocate(graph, where), Table({**WORK, "fit": 12.0}))
    assert runs(timeline)["fit"] == (7, 19)
    assert runs(timeline, 1)["gen"] == (12, 16)  # gen 4, values 3, train 5
    assert runs(timeline, 1)["values"] == (19, 22)  # the critic's new weights
    assert timeline.seconds == 12 + 3
    # a third step waits for the end of the first
    slow = schedule(allocate(graph, where), Table({"gen": 1.0, "fit": 12.0}))
    assert [runs(slow, step)["gen"][0] for step in range(3)] == [0, 1, 13]


def test_a_call_without_a_mesh_is_an_error() -> None:
    with pytest.raises(ValueError, match="call 'ref' has no mesh"):
        schedule(allocate(FORK, {"gen": at(0, 1)}), Table(WORK))


# search


def test_the_search_finds_the_known_optimum() -> None:
    """Two frozen models side by side, each on half of the devices, where work scales badly: 1 s
    each on one device or two."""
    graph = build_graph(
        [
            Call("a", "a", INFERENCE, ("prompts",), ("x",)),
            Call("b", "b", INFERENCE, ("prompts",), ("y",)),
        ]
    )
    everywhere = [at(0, 2), at(0, 1), at(1, 1)]
    choices = {"a": everywhere, "b": everywhere}
    best, *others = search(graph, choices, Table({"a": 1.0, "b": 1.0}))
    assert best.seconds == 1.0 and others[0].seconds == 2.0
    assert not best.where["a"].mesh.overlaps(best.where["b"].mesh)
    # where work scales, sharing all devices is as good: 0.5 s each
    scaled = search(graph, choices, Table({"a": 1.0, "b": 1.0}, fixed=False))
    assert scaled[0].seconds == 1.0


def test_plans_that_do_not_fit_are_left_out() -> None:
    graph = build_graph([Call("a", "a", INFERENCE, ("prompts",), ("x",)),
                         Call("b", "b", INFERENCE, ("x",), ("y",))])  # fmt: skip
    choices = {"a": [at(0, 1), at(1, 1)], "b": [at(0, 1)]}
    work = {"a": 1.0, "b": 1.0}
    together = Table(work, fetching=1.5, weights={"a": 4, "b": 5}, capacity=10)
    assert search(graph, choices, together)[0].where == {"a": at(0, 1), "b": at(0, 1)}
    apart = search(graph, choices, replace(together, capacity=9))
    assert [plan.where["a"] for plan in apart] == [at(1, 1)] and apart[0].nbytes == 6
    with pytest.raises(ValueError, match="call 'b': its model fits into the devices' memory in no"):
        search(graph, choices, replace(together, capacity=5))
    with pytest.raises(ValueError, match="none of 1 plans fits"):
        search(graph, {"a": [at(0, 1)], "b": [at(0, 1)]}, replace(together, capacity=9))


def test_annealing_finds_what_the_whole_search_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, work = Devices(1, 4), {n: 1.0 + i for i, n in enumerate(("gen", "ref", "values"))}
    every = [Allocation(mesh, ParallelConfig()) for mesh in devices.meshes()]
    choices = dict.fromkeys(("gen", "ref", "values", "train"), every)
    costs = Table({**work, "train": 3.0}, fixed=False, moving=0.2, fetching=0.1)
    whole = search(FORK, choices, costs)
    monkeypatch.setattr(searching, "WHOLE", 1)
    found = search(FORK, choices, costs, seed=3)
    assert found[0].seconds == pytest.approx(whole[0].seconds)
    assert [p.where for p in found] == [p.where for p in search(FORK, choices, costs, seed=3)]


def test_options_are_meshes_of_the_rule_with_strategies_that_fit_the_model() -> None:
    m = config(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    models = dict.fromkeys(("actor", "ref", "critic", "reward_model"), m)
    found = options(ppo(), Devices(1, 4), models)
    assert list(found) == [c.name for c in calls_of(ppo()) if c.kind != COMPUTE]
    names = [str(a) for a in found["generate"]]
    assert len(names) == len(set(names)) == 4 * 1 + 2 * 3 + 6
    assert names[-6:] == [
        *("g0-g3 dp4", "g0-g3 dp2 pp2", "g0-g3 pp4", "g0-g3 dp2 tp2", "g0-g3 tp2 pp2", "g0-g3 tp4")
    ]


# costs


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (at(0, 4, pp=2), at(0, 8, pp=2)),
        (at(4, 4, tp=2), at(0, 2, pp=2)),
        (at(0, 2, tp=2), at(4, 4, tp=4)),
        (at(0, 8, tp=2, pp=2), at(0, 8, tp=2, pp=2)),
        (at(0, 4, pp=4), at(8, 8, tp=2)),
    ],
    ids=str,
)
def test_what_moves_is_what_the_reallocator_plans(source: Allocation, target: Allocation) -> None:
    m = config(num_hidden_layers=64, num_attention_heads=4, num_key_value_heads=4)
    tables = [build_piece_table(m, where.layout) for where in (source, target)]
    exact = dict.fromkeys(target.mesh.devices, 0)
    ranks = [list(where.mesh.devices) for where in (source, target)]
    for t in plan_transfers(*tables, *ranks, node_size=8):
        exact[t.target.rank] += 2 * t.numel * (t.source.rank != t.target.rank)
    found = [sum(pair) for pair in incoming(m, source, target, 8)]
    scale = max(*found, 1.0)
    # norms are whole on every tensor-parallel rank, embedding and head lie at the ends
    assert found == pytest.approx(list(exact.values()), abs=0.08 * scale)


def test_a_model_costs_what_the_planner_says() -> None:
    m, cluster, work = tool.read_model("llama-2-7b"), Cluster(), StepWork(answers=64)
    costs = ModelCosts({"actor": m}, cluster, work)
    gen, read, train = (Call("c", "actor", kind, ()) for kind in (GENERATE, INFERENCE, TRAIN_STEP))
    one, two = at(0, 1), at(0, 2)
    assert costs.run(train, one, 0) == pytest.approx(4 * costs.run(read, one, 0))  # recomputation
    assert costs.run(read, one, 0) == pytest.approx(2 * costs.run(read, two, 0))
    # decoding: every token of an answer reads the weights, and its cache of 0.5 MiB a token
    room, nbytes = costs.capacity, 2 * 6_738_415_616
    cache = 64 * 2 * 32 * 4096 * 2 * (1024 + 512)
    rate = 3.35e12 * 0.8
    arithmetic = 64 * 2 * 6_738_415_616 / (989.4e12 * 0.5)
    prefill = ModelCosts({"actor": m}, cluster, replace(work, answer=0)).run(read, one, 0)
    seconds = prefill + 1024 * ((nbytes + cache) / rate + arithmetic)
    assert costs.run(gen, one, room) == pytest.approx(seconds, rel=1e-3)
    # a cache for half of the answers: two rounds read the weights twice
    half = 32 * 2 * 32 * 4096 * 2 * 2048 - sum(costs.working(gen, one))
    assert costs.run(gen, one, half) == pytest.approx(seconds + 1024 * nbytes / rate, rel=1e-3)
    assert costs.held(train, at(0, 2, pp=2))[0] / costs.held(read, at(0, 2, pp=2))[0] == 9.0


def test_ppo_of_7b_on_eight_gpus_is_faster_with_meshes_of_its_own() -> None:
    """In the model: no more than that is claimed."""
    m = tool.read_model("llama-2-7b")
    v = value_model(m, m.raw, "llama-2-7b")
    models = {"actor": m, "ref": m, "critic": v, "reward_model": v}
    frozen = [replace(c, offload=c.model in ("ref", "reward_model")) for c in calls_of(ppo())]
    graph, devices = build_graph(frozen), Devices(1, 8)
    costs = ModelCosts(models, Cluster(), StepWork())
    every = options(graph, devices, models)
    wide, large = (
        {k: [a for a in found if a.mesh.count >= n] for k, found in every.items()} for n in (8, 4)
    )
    symmetric, best = (search(graph, c, costs, keep=1, tries=300)[0] for c in (wide, large))
    assert best.seconds < 0.98 * symmetric.seconds
    assert not math.isinf(best.seconds) and best.nbytes <= costs.capacity
    trained = [best.where[name].mesh for name in ("train_actor", "train_critic")]
    assert not trained[0].overlaps(trained[1])
