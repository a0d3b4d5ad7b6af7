"""Tests of running a dataflow graph, with models that are threads: order, concurrency, hooks."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import networkx as nx
import pytest

from megarl.config.parallel import ParallelConfig
from megarl.controller.graph_buffer import KeyBuffer
from megarl.controller.graph_plan import GraphPlan, Task
from megarl.controller.graph_runner import CallFailed, GraphRunner
from megarl.dataflow import graphs
from megarl.dataflow.call import GENERATE, INFERENCE, TRAIN_STEP, Call
from megarl.dataflow.graph import allocate, build_graph, calls_of
from megarl.dataflow.mesh import Allocation, Mesh

WAIT = 20.0  # seconds that a test's thread waits for another before it gives up


def at(first: int, count: int, **degrees: int) -> Allocation:
    return Allocation(Mesh(first, count), ParallelConfig(**degrees))


ACTOR, CRITIC, ALL = at(0, 2), at(2, 2, tp=2), at(0, 4)


def ppo(**where: Allocation) -> nx.DiGraph:
    places = {"train_actor": ACTOR, "train_critic": CRITIC, "values": CRITIC}
    return allocate(graphs.ppo(reward_model=False, reference=False), places | where)


def names(plan: GraphPlan) -> list[str]:
    return [task.name for task in plan.tasks]


def run(
    plan: GraphPlan, perform: Callable[[Task, int], None], *, steps: int = 1, timeout: float = WAIT
) -> list[int]:
    ended: list[int] = []
    GraphRunner(plan.tasks, perform, timeout=timeout).run(0, steps, ended.append)
    return ended


# ---- the plan ------------------------------------------------------------------------------------


def test_ppo_on_two_meshes_is_its_calls_and_the_publication_of_the_actor() -> None:
    plan = GraphPlan(ppo())
    assert names(plan) == [
        "generate",
        "generate: place",
        "values",
        "gae",
        "train_critic",
        "train_actor",
        "train_actor: publish",
    ]
    by_name = {task.name: task for task in plan.tasks}
    assert by_name["gae"].ranks == {0, 1} and by_name["train_critic"].ranks == {2, 3}
    assert not by_name["generate"].ranks  # the servers' work
    assert by_name["generate"].earlier == {"generate": 1, "train_actor: publish": 1}
    assert {str(copy) for copy in plan.copies} == {"actor on g0-g1 dp2", "critic on g2-g3 tp2"}


def test_a_copy_in_another_strategy_gets_weights_before_its_call_and_loses_them_after() -> None:
    graph = allocate(
        graphs.grpo(reference=False, recompute=True),
        {"train_actor": at(0, 2), "logp": at(1, 2, tp=2)},
    )
    plan = GraphPlan(graph)
    order = names(plan)
    hooks = order.index("logp: reallocate"), order.index("logp"), order.index("logp: drop")
    assert hooks == (hooks[0], hooks[0] + 1, hooks[0] + 2)
    assert hooks[2] < order.index("train_actor")  # reads the weights from before the update
    move = plan.tasks[hooks[0]]
    assert move.ranks == {0, 1, 2} and str(move.source) == "actor on g0-g1 dp2"
    (copy,) = [c for c in plan.copies if plan.is_placeholder(c)]
    assert copy == move.copy


def test_weights_come_once_for_two_calls_of_a_copy_and_anew_after_a_train_step() -> None:
    home, other = at(0, 1), at(1, 1)
    graph = build_graph(
        [
            Call("a", "m", INFERENCE, ("x",), ("a",), where=other),
            Call("b", "m", INFERENCE, ("a",), ("b",), where=other),
            Call("train", "m", TRAIN_STEP, ("b",), ("t",), where=home),
            Call("c", "m", INFERENCE, ("t",), ("c",), where=other),
        ],
        given=("x",),
    )
    assert names(GraphPlan(graph)) == [
        "data",
        *("a: reallocate", "a", "b", "b: drop", "train"),
        *("c: reallocate", "c", "c: drop"),
    ]


def test_what_is_offloaded_after_its_call_returns_before_the_next() -> None:
    graph = build_graph(
        [
            Call("generate", "actor", GENERATE, ("prompts",), ("x",)),
            Call("score", "ref", INFERENCE, ("x",), ("y",), where=at(0, 1), offload=True),
            Call("train", "actor", TRAIN_STEP, ("y",), where=at(0, 1), offload=True),
        ]
    )
    plan = GraphPlan(graph)
    assert names(plan) == [
        *("generate", "generate: place"),
        *("score: onload", "score", "score: offload"),
        *("train: onload", "train", "train: publish", "train: offload"),
    ]
    assert plan.tasks[2].needs == {
        "generate",
        "generate: place",
    }  # not before there is something to do


def test_a_model_without_a_place_is_named() -> None:
    with pytest.raises(ValueError, match="has no mesh, nor has another call of"):
        GraphPlan(graphs.ppo(reward_model=False, reference=False))


# ---- running it ----------------------------------------------------------------------------------


def test_disjoint_meshes_run_at_the_same_time() -> None:
    both = threading.Barrier(2)  # breaks unless both train steps are under way at once

    def perform(task: Task, step: int) -> None:
        if task.name in ("train_actor", "train_critic"):
            both.wait(WAIT)

    assert run(GraphPlan(ppo()), perform, steps=3) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_every_rank_sees_its_tasks_in_the_one_order(seed: int) -> None:
    graph = ppo(train_actor=at(0, 4), values=at(2, 2), train_critic=at(1, 2), gae=at(0, 4))
    plan, rng, lock = GraphPlan(graph), random.Random(seed), threading.Lock()
    seen: dict[int, list[tuple[int, str]]] = {rank: [] for rank in range(4)}
    busy: set[int] = set()
    crossed: list[str] = []

    def perform(task: Task, step: int) -> None:
        with lock:
            crossed.extend([task.name] if busy & task.ranks else [])
            busy.update(task.ranks)
            for rank in task.ranks:
                seen[rank].append((step, task.name))
            pause = rng.random() / 200
        time.sleep(pause)
        with lock:
            busy.difference_update(task.ranks)

    run(plan, perform, steps=3)
    assert not crossed
    for rank in range(4):
        own = [t.name for t in plan.tasks if rank in t.ranks]
        assert seen[rank] == [(step, name) for step in range(3) for name in own]


def test_a_call_waits_for_what_it_reads() -> None:
    plan = GraphPlan(ppo())
    over: set[tuple[int, str]] = set()
    early: list[str] = []

    def perform(task: Task, step: int) -> None:
        early.extend(n for n in task.needs if (step, n) not in over)
        over.add((step, task.name))

    run(plan, perform, steps=2)
    assert not early and len(over) == 2 * len(plan.tasks)


@pytest.mark.parametrize("ahead", [0, 1])
def test_generation_waits_for_the_weights_unless_it_may_run_ahead(ahead: int) -> None:
    published, generated = threading.Event(), threading.Event()
    order: list[str] = []

    def perform(task: Task, step: int) -> None:
        if (task.kind, step) == ("publish", 0):
            if ahead:
                assert generated.wait(WAIT), "generation of step 2 did not begin"
            order.append("published")
            published.set()
        if (task.name, step) == ("generate", 1):
            order.append("generated")
            generated.set()

    run(GraphPlan(ppo(), ahead=ahead), perform, steps=2)
    assert order == (["generated", "published"] if ahead else ["published", "generated"])


def test_an_error_names_the_call_and_nothing_starts_after_it() -> None:
    hang, begun = threading.Event(), list[str]()

    def perform(task: Task, step: int) -> None:
        begun.append(task.name)
        if task.name == "train_actor":
            hang.wait(WAIT)  # is not waited for
        if task.name == "train_critic":
            raise RuntimeError("worker trainers/3 (host, pid 7): out of memory")

    with pytest.raises(CallFailed) as failed:
        run(GraphPlan(ppo()), perform, steps=2)
    hang.set()
    assert "'train_critic' of step 1, on critic on g2-g3 tp2, failed: worker trainers/3" in str(
        failed.value
    )
    assert isinstance(failed.value.__cause__, RuntimeError)
    assert "train_actor: publish" not in begun


def test_a_call_that_does_not_end_is_given_up() -> None:
    hang = threading.Event()

    def perform(task: Task, step: int) -> None:
        if task.name == "values":
            hang.wait(WAIT)

    with pytest.raises(CallFailed, match=r"'values' of step 1, .* did not end within 0.05 s"):
        run(GraphPlan(ppo()), perform, timeout=0.05)
    hang.set()


# ---- keys ----------------------------------------------------------------------------------------


def test_a_key_goes_with_its_last_reader() -> None:
    calls = calls_of(ppo())
    by_name = {call.name: call for call in calls}
    keys = KeyBuffer(calls, keep=("rewards",))
    assert keys.put(by_name["generate"].outputs) == ["versions"]  # nobody reads it
    assert keys.read_by(by_name["values"]) == []  # input_ids has more readers
    keys.put(("values", "last_value"))
    assert keys.read_by(by_name["gae"]) == ["last_value"]  # rewards are kept
    keys.put(("advantages", "returns"))
    assert keys.read_by(by_name["train_actor"]) == ["advantages", "logprobs"]
    assert keys.read_by(by_name["train_critic"]) == ["input_ids", "loss_mask", "returns", "values"]
    assert keys.there == {"rewards"}
