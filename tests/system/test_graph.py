"""Dataflow graphs on four worker processes: what runs at once, and the weights that come of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import networkx as nx
import pytest
import torch

from megarl.cli.trace import read_timeline, trace_events
from megarl.config.engine import ParallelConfig
from megarl.controller.graph import CallFailed, GraphExecution, StepState
from megarl.controller.group import WorkerGroup
from megarl.controller.worker import SERVE
from megarl.dataflow import graphs
from megarl.dataflow.graph import allocate
from megarl.dataflow.mesh import Allocation, Devices, Mesh
from megarl.observability.timeline import timeline
from megarl.parallel.worlds import init_distributed
from megarl.rpc.group import GroupSpec, LocalScheduler, WorkerSpec
from tests.dist.engine_jobs import save_model
from tests.dist.invariance import UPDATES, worst
from tests.dist.world import World
from tests.system import graph_jobs as jobs

DEVICES = Devices(1, 4)
Weights = dict[str, dict[str, torch.Tensor]]


def at(first: int, count: int, **degrees: Any) -> Allocation:
    return Allocation(Mesh(first, count), ParallelConfig(**degrees))


class Workers(NamedTuple):
    trainers: WorkerGroup
    rollout: WorkerGroup
    path: str


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    root = tmp_path_factory.mktemp("graph")
    scheduler = LocalScheduler()

    def group(name: str, count: int) -> WorkerGroup:
        worker = WorkerSpec(env={"OMP_NUM_THREADS": "1"})
        spec = GroupSpec(
            name=name, count=count, serve=SERVE, options={"group": name}, worker=worker,
            log_dir=str(root),
        )  # fmt: skip
        started = scheduler.start(spec)
        return WorkerGroup(name, started.workers, started.clients)

    try:
        trainers = group("trainers", 4)
        trainers.call(init_distributed, timeout=60.0)
        yield Workers(trainers, group("rollout", 1), save_model(root, "qwen3", True))
    finally:
        scheduler.close()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(2, timeout=120) as two:
        yield two


def execute(
    workers: Workers,
    graph: nx.DiGraph,
    roles: dict[str, Any],
    look: Callable[[GraphExecution, StepState], None] = lambda execution, state: None,
) -> Weights:
    """Runs the steps of a graph; returns the weights of the trained models. look: is called after
    every step."""
    execution = GraphExecution(
        graph,
        workers.trainers,
        roles,
        batches=lambda step: workers.rollout.call(jobs.make_batch, step),
        publish=jobs.publish,
        spec=jobs.SPEC,
        timeout=120.0,
    )
    for step in range(jobs.STEPS):
        look(execution, execution.step(step))
    weights = {}
    for model in execution.plan.trained:
        home = workers.trainers.on(execution.plan.homes[model].where.mesh.devices)
        weights[model] = home.call(jobs.state_of, execution.role(model))
    execution.destroy()
    return weights


def give(graph: nx.DiGraph, name: str, args: dict[str, Any]) -> None:
    """Gives a call's verb further arguments."""
    graph.nodes[name]["call"] = replace(graph.nodes[name]["call"], args=args)


def both_at_once(state: StepState, one: str, other: str) -> bool:
    """Returns whether workers were at both calls at the same time."""
    (a, b), (c, d) = state.worked[one], state.worked[other]
    return max(a, c) < min(b, d)


def test_ppo_on_two_meshes_trains_both_at_once_to_the_bits_of_the_plain_step(
    workers: Workers, world: World, tmp_path: Path
) -> None:
    critic = ParallelConfig(tp=2)
    graph = allocate(
        graphs.ppo(reward_model=False, reference=False, recompute=True),
        {"train_actor": at(0, 2), "train_critic": at(2, 2, tp=2)},
        DEVICES,
    )
    give(graph, "gae", jobs.GAE | dict(kl_ctl=0.0))
    at_once: list[bool] = []
    timeline.open(tmp_path, 0)
    try:
        made = execute(
            workers,
            graph,
            jobs.roles(workers.path, "actor", "critic", meeting=tmp_path),
            lambda _, state: at_once.append(both_at_once(state, "train_actor", "train_critic")),
        )
    finally:
        timeline.close()
    assert at_once == [True] * jobs.STEPS
    want = world.run(jobs.plain, workers.path, "actor", "critic", critic=critic)[0]
    assert_equal(made, want)
    events = trace_events(read_timeline(tmp_path), {})
    rows = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows >= {"calls on g0-g1", "calls on g2-g3", "calls on servers"}


def assert_equal(made: Weights, want: Weights) -> None:
    assert made.keys() == want.keys()
    for model, weights in want.items():
        assert weights and made[model].keys() == weights.keys()
        for name, value in weights.items():
            assert torch.equal(made[model][name], value), (model, name)


def step_by_step(
    workers: Workers, world: World, graph: nx.DiGraph, *models: str, **kw: Any
) -> None:
    """Asserts that a graph's steps give the weights of the same steps without a graph."""
    made = execute(workers, graph, jobs.roles(workers.path, *models, **kw))
    assert_equal(made, world.run(jobs.plain, workers.path, *models, **kw)[0])


@pytest.mark.full
def test_grpo_remax_and_sft_give_the_bits_of_the_plain_steps(
    workers: Workers, world: World
) -> None:
    policy = {"train_actor": at(0, 2)}
    step_by_step(
        workers,
        world,
        allocate(graphs.grpo(recompute=True), policy | {"ref": at(2, 2)}, DEVICES),
        *("actor", "ref"),
        kl_coef=0.1,
    )
    remax = allocate(graphs.remax(recompute=True), policy, DEVICES)
    step_by_step(workers, world, remax, "actor", advantages=jobs.remax())
    step_by_step(workers, world, allocate(graphs.sft(), {"train": at(2, 2)}, DEVICES), "model")


@pytest.mark.full
def test_copies_in_other_strategies_hold_weights_only_for_their_calls(
    workers: Workers, world: World
) -> None:
    """The actor's logprobs are computed on all devices, by a copy over which meshes overlap."""
    graph = allocate(
        graphs.grpo(recompute=True),
        {
            "train_actor": at(0, 2),
            "logp": at(0, 4, tp=2, sequence_parallel=True),
            "ref": at(2, 2, tp=2),
        },
        DEVICES,
    )
    for name in ("ref", "train_actor"):
        graph.nodes[name]["call"] = replace(graph.nodes[name]["call"], offload=True)
    held: list[list[int]] = []

    def look(execution: GraphExecution, state: StepState) -> None:
        roles = execution.roles.values()
        held.extend(workers.trainers.each(jobs.weight_bytes, role) for role in roles)

    models = ("actor", "ref")
    made = execute(workers, graph, jobs.roles(workers.path, *models, kl_coef=0.1), look)
    assert held == [[0] * 4] * (3 * jobs.STEPS)
    want = world.run(jobs.plain, workers.path, *models, kl_coef=0.1)[0]
    ratio, name = worst(made["actor"], want["actor"])
    assert ratio < UPDATES, name


@pytest.mark.full
def test_a_call_that_fails_is_named_with_its_worker(workers: Workers) -> None:
    graph = allocate(
        graphs.ppo(reward_model=False, reference=False, recompute=True),
        {"train_actor": at(0, 2), "train_critic": at(2, 2)},
        DEVICES,
    )
    give(graph, "gae", jobs.GAE | dict(discount="none"))
    execution = GraphExecution(
        graph,
        workers.trainers,
        jobs.roles(workers.path, "actor", "critic"),
        batches=lambda step: workers.rollout.call(jobs.make_batch, step),
        publish=jobs.publish,
        spec=jobs.SPEC,
    )
    with pytest.raises(CallFailed, match=r"'gae' of step 1, on actor on g0-g1 dp2, .*trainers/0"):
        execution.step(0)
    execution.destroy()
