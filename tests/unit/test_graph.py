"""Tests of running a dataflow graph, with models that are threads: order, concurrency, hooks."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from operator import itemgetter
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

from megarl.config.engine import ParallelConfig
from megarl.controller.graph import CallFailed, GraphExecution, GraphPlan, Task, run_tasks
from megarl.controller.group import Pending
from megarl.dataflow import graphs
from megarl.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, Call, allocate, build_graph
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


def run(plan: GraphPlan, perform: Callable[[Task], None], *, timeout: float = WAIT) -> list[str]:
    """Runs a step whose tasks are threads; returns the tasks in the order of their ends."""
    ended: list[str] = []

    def start(task: Task) -> Pending:
        future: Future[None] = Future()

        def work() -> None:
            try:
                future.set_result(perform(task))
            except Exception as e:
                future.set_exception(e)

        threading.Thread(target=work, daemon=True).start()
        return Pending(task.name, (), [future], itemgetter(0))

    run_tasks(plan.tasks, start, lambda task, _: ended.append(task.name), step=0, timeout=timeout)
    return ended


# ---- the plan ------------------------------------------------------------------------------------


def test_ppo_on_two_meshes_is_its_calls_and_the_publication_of_the_actor() -> None:
    plan = GraphPlan(ppo())
    assert names(plan) == [
        "generate: place",
        "values",
        "gae",
        "train_critic",
        "train_actor",
        "train_actor: publish",
    ]
    by_name = {task.name: task for task in plan.tasks}
    assert by_name["gae"].ranks == {0, 1} and by_name["train_critic"].ranks == {2, 3}
    assert by_name["train_actor: publish"].needs == {"train_actor"}
    assert by_name["values"].needs == {"generate: place"}
    assert by_name["train_actor"].needs == {"generate: place", "gae"}
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
    copy, source = move.copies
    assert move.ranks == {0, 1, 2} and str(source) == "actor on g0-g1 dp2"
    assert [c for c in plan.copies if plan.is_placeholder(c)] == [copy]


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
        "generate: place",
        *("score: onload", "score", "score: offload"),
        *("train: onload", "train", "train: publish", "train: offload"),
    ]
    assert plan.tasks[1].needs == {"generate: place"}  # not before there is something to do


def test_a_model_without_a_place_is_named() -> None:
    with pytest.raises(ValueError, match="has no mesh, nor has another call of"):
        GraphPlan(graphs.ppo(reward_model=False, reference=False))


# ---- running it ----------------------------------------------------------------------------------


def test_disjoint_meshes_run_at_the_same_time() -> None:
    both = threading.Barrier(2)  # breaks unless both train steps are under way at once

    def perform(task: Task) -> None:
        if task.name in ("train_actor", "train_critic"):
            both.wait(WAIT)

    plan = GraphPlan(ppo())
    assert set(run(plan, perform)) == set(names(plan))


@pytest.mark.parametrize("seed", range(5))
def test_every_rank_sees_its_tasks_in_the_one_order(seed: int) -> None:
    graph = ppo(train_actor=at(0, 4), values=at(2, 2), train_critic=at(1, 2), gae=at(0, 4))
    plan, rng, lock = GraphPlan(graph), random.Random(seed), threading.Lock()
    seen: dict[int, list[str]] = {rank: [] for rank in range(4)}
    busy: set[int] = set()
    crossed: list[str] = []

    def perform(task: Task) -> None:
        with lock:
            crossed.extend([task.name] if busy & task.ranks else [])
            busy.update(task.ranks)
            for rank in task.ranks:
                seen[rank].append(task.name)
            pause = rng.random() / 200
        time.sleep(pause)
        with lock:
            busy.difference_update(task.ranks)

    run(plan, perform)
    assert not crossed
    assert seen == {rank: [t.name for t in plan.tasks if rank in t.ranks] for rank in range(4)}


def test_a_call_waits_for_what_it_reads() -> None:
    plan = GraphPlan(ppo())
    over: set[str] = set()
    early: list[str] = []

    def perform(task: Task) -> None:
        early.extend(task.needs - over)
        over.add(task.name)

    run(plan, perform)
    assert not early and over == set(names(plan))


def test_an_error_names_the_call_and_nothing_starts_after_it() -> None:
    hang, begun = threading.Event(), list[str]()

    def perform(task: Task) -> None:
        begun.append(task.name)
        if task.name == "train_actor":
            hang.wait(WAIT)  # is not waited for
        if task.name == "train_critic":
            raise RuntimeError("worker trainers/3 (host, pid 7): out of memory")

    with pytest.raises(CallFailed) as failed:
        run(GraphPlan(ppo()), perform)
    hang.set()
    assert "'train_critic' of step 1, on critic on g2-g3 tp2, failed: worker trainers/3" in str(
        failed.value
    )
    assert isinstance(failed.value.__cause__, RuntimeError)
    assert "train_actor: publish" not in begun


def test_a_call_that_does_not_end_is_given_up() -> None:
    hang = threading.Event()

    def perform(task: Task) -> None:
        if task.name == "values":
            hang.wait(WAIT)

    with pytest.raises(CallFailed, match=r"'values' of step 1, .* did not end within 0.05 s"):
        run(GraphPlan(ppo()), perform, timeout=0.05)
    hang.set()


# ---- the execution -------------------------------------------------------------------------------


class Workers:
    """Is a group whose calls end at once, and notes for which ranks it is asked for a part."""

    world = None

    def __init__(self) -> None:
        self.parts: list[tuple[int, ...]] = []

    def __len__(self) -> int:
        return 4

    def on(self, ranks: list[int]) -> Workers:
        self.parts.append(tuple(ranks))
        return self

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Workers:
        return self

    def submit(self, fn: Any, args: Any, kwargs: Any, fields: Any = None) -> Pending:
        future: Future[Any] = Future()
        future.set_result(({}, (0.0, 0.0)))
        return Pending("call", (), [future], itemgetter(0))


class Everything:
    """Is a batch with every key."""

    def __contains__(self, key: str) -> bool:
        return True


def execution(
    workers: Any, publish: Callable[[Any, int], dict[str, float]], *, timeout: float = WAIT
) -> GraphExecution:
    """PPO, whose critic computes values on the actor's ranks: all four move its weights there."""
    roles: Any = dict.fromkeys(("actor", "critic"))

    def batches(step: int) -> Any:
        return Everything()

    graph = ppo(values=at(0, 2, tp=2))
    return GraphExecution(graph, workers, roles, batches=batches, publish=publish, timeout=timeout)


def test_a_step_makes_no_world() -> None:
    workers = Workers()
    graph = execution(workers, lambda role, version: {})
    parts = set(workers.parts)
    assert {(0, 1), (2, 3), (0, 1, 2, 3)} <= parts
    graph.step(0)
    assert set(workers.parts) == parts


HANGS = """
import threading
from megarl.controller.graph import CallFailed
from tests.unit.test_graph import Workers, execution
try:
    execution(Workers(), lambda role, version: threading.Event().wait(), timeout=0.5).step(0)
except CallFailed as e:
    print(e, flush=True)
"""


def test_a_publication_that_hangs_does_not_keep_the_process() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", HANGS],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    assert "did not end within 0.5 s" in ran.stdout
