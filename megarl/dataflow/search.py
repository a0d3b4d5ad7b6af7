"""Searches meshes and strategies for the calls of a graph: the fastest step in the cost model.

A plan says where every call runs. Plans are simulated, and those that do not fit into memory are
left out. Small spaces are searched whole; else seeded annealing, as in ReaL (arXiv 2406.14088,
section 5), and then a descent that changes one call at a time until none is better; another descent
begins with every call on all devices.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import networkx as nx

from megarl.config.parallel import ParallelConfig
from megarl.dataflow.call import COMPUTE
from megarl.dataflow.graph import calls_of
from megarl.dataflow.mesh import Allocation, Devices, Mesh
from megarl.dataflow.schedule import Costs, Places, Simulator, Timeline
from megarl.models.hf_config import ModelConfig, check_layout

WHOLE = 20_000  # plans that are simulated one and all
TRIES = 4_000
STARTS = 3
Options = Mapping[str, Sequence[Allocation]]  # by call


@dataclass(frozen=True)
class Plan:
    """Describes where each call runs, and the simulated steps."""

    where: Places
    timeline: Timeline

    @property
    def seconds(self) -> float:
        """Returns the seconds of a step."""
        return self.timeline.seconds

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the fullest device."""
        return max(self.timeline.nbytes.values())


def options(
    graph: nx.DiGraph, devices: Devices, models: Mapping[str, ModelConfig]
) -> dict[str, list[Allocation]]:
    """Returns by call the allocations to choose from: every mesh of the rule, and on it every tp
    (within a node), pp and, for experts, ep in powers of two that fit the model. Runs of several
    nodes are those of a power of two whose first node is a multiple of it. A "compute" has none:
    it runs where its model is at home."""
    return {
        call.name: list(_allocations(devices, models[call.model]))
        for call in calls_of(graph)
        if call.kind != COMPUTE
    }


def _allocations(devices: Devices, m: ModelConfig) -> Iterator[Allocation]:
    experts = m.moe.num_experts if m.moe else 1
    for mesh in devices.meshes():
        if _power(mesh.count) and mesh.first % mesh.count == 0:
            powers = [1 << i for i in range(mesh.count.bit_length())]
            for tp, pp, ep in product(powers, powers, (p for p in powers if p <= experts)):
                p = ParallelConfig(tp=tp, pp=pp, ep=ep, sequence_parallel=tp > 1)
                if tp <= devices.per_node and m.num_layers % pp == 0 and _fits(m, mesh, p):
                    yield Allocation(mesh, p)


def _power(n: int) -> bool:
    return n & (n - 1) == 0


def _fits(m: ModelConfig, mesh: Mesh, parallel: ParallelConfig) -> bool:
    try:
        check_layout(m, parallel)
        Allocation(mesh, parallel)
    except ValueError:
        return False
    return True


def search(
    graph: nx.DiGraph,
    choices: Options,
    costs: Costs,
    *,
    keep: int = 5,
    seed: int = 0,
    tries: int = TRIES,
) -> list[Plan]:
    """Returns the fastest plans that were found, the best first, and of plans with equal times one.

    The same seed finds the same; tries: changes that annealing makes from each start. Raises
    ValueError where no plan fits into memory.
    """
    space = _Space(Simulator(graph, costs), choices)
    if math.prod(len(found) for found in choices.values()) <= WHOLE:
        for plan in product(*(range(len(found)) for found in choices.values())):
            space.seconds(plan)
    else:
        rng = random.Random(seed)
        space.descend(space.widest())
        for _ in range(STARTS):
            space.descend(space.anneal(rng, tries))
    return space.best(keep)


Picks = tuple[int, ...]  # the choice of each call, by number


class _Space:
    """Holds what is known of the plans that were simulated."""

    def __init__(self, simulator: Simulator, choices: Options) -> None:
        self.simulator, self.names = simulator, list(choices)
        self.choices = [self._alone(name, choices[name]) for name in self.names]
        self.known: dict[Picks, float] = {}

    def _alone(self, name: str, found: Sequence[Allocation]) -> list[Allocation]:
        """Returns those allocations in which the call, with its model, fits into memory."""
        simulator = self.simulator
        call = next(call for call in simulator.calls if call.name == name)
        fit = [
            where
            for where in found
            if max(simulator.costs.held(call, where)) + max(simulator.costs.working(call, where))
            <= simulator.costs.capacity
        ]
        if not fit:
            raise ValueError(
                f"call {name!r}: its model fits into the devices' memory in none of "
                f"{len(found)} allocations; use more devices or smaller micro-batches"
            )
        return fit

    def where(self, picks: Picks) -> dict[str, Allocation]:
        """Returns the allocation of each call."""
        return {n: found[i] for n, found, i in zip(self.names, self.choices, picks, strict=True)}

    def seconds(self, picks: Picks) -> float:
        """Returns the seconds of a step, infinite for a plan that does not fit."""
        if picks not in self.known:
            timeline = self.simulator.run(self.where(picks))
            fits = max(timeline.nbytes.values()) <= self.simulator.costs.capacity
            self.known[picks] = timeline.seconds if fits else math.inf
        return self.known[picks]

    def widest(self) -> Picks:
        """Returns a plan with every call on as many devices as it can have."""
        sizes = [[where.mesh.count for where in found] for found in self.choices]
        return tuple(found.index(max(found)) for found in sizes)

    def anneal(self, rng: random.Random, tries: int) -> Picks:
        """Returns the best plan of a walk that takes a worse one ever more rarely."""
        now = best = tuple(rng.randrange(len(found)) for found in self.choices)
        for i in range(tries):
            call = rng.randrange(len(now))
            other = (*now[:call], rng.randrange(len(self.choices[call])), *now[call + 1 :])
            old, new = self.seconds(now), self.seconds(other)
            warmth = 0.1 * (1 - i / tries) * min(old, new)
            if new <= old or (new < math.inf and rng.random() < math.exp((old - new) / warmth)):
                now = other
            best = min(best, now, key=self.seconds)
        return best

    def descend(self, picks: Picks) -> None:
        """Changes one call at a time to its best, until no change makes the step faster."""
        before = math.inf
        while self.seconds(picks) < before:
            before = self.seconds(picks)
            for call, found in enumerate(self.choices):
                others = [(*picks[:call], i, *picks[call + 1 :]) for i in range(len(found))]
                picks = min([picks, *others], key=self.seconds)

    def best(self, keep: int) -> list[Plan]:
        """Returns the fastest plans; raises ValueError where none fits."""
        plans: list[Plan] = []
        for picks, seconds in sorted(self.known.items(), key=lambda item: item[1]):
            if seconds == math.inf or len(plans) == keep:
                break
            if not plans or not math.isclose(seconds, plans[-1].seconds, rel_tol=1e-6):
                where = self.where(picks)
                plans.append(Plan(where, self.simulator.run(where)))
        if not plans:
            raise ValueError(
                f"none of {len(self.known)} plans fits into the devices' memory: use more devices, "
                "smaller micro-batches or recomputation"
            )
        return plans
