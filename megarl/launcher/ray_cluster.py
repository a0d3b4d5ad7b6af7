"""Runs the attempts of a job on a Ray cluster: finds room, starts an agent on each node, watches.

Ray places one actor on each node. The actor starts the node's agent and says how it ended; the
agents meet as under any scheduler (names.py). Of a node that Ray has lost the launcher tells the
other agents, which then end.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.launcher.files import JobFiles
from megarl.launcher.job import Job
from megarl.launcher.names import FileNames
from megarl.launcher.node import NAMES
from megarl.launcher.running import NODE_FAILED
from megarl.observability.logging import get_logger
from megarl.rpc.nodes import Resources
from megarl.rpc.ray_nodes import KINDS, Keeper, NoRoom, cluster_has, counted, import_path, one_line
from megarl.utils.child import LogTail, Signals
from megarl.utils.job_token import ensure_job_token

log = get_logger("launcher")

LOOK = 0.5  # seconds between looks at logs and signals
ANSWER = 5.0  # seconds after which an actor answers even where nothing has happened
SILENCE = 60.0  # seconds without an answer after which a node is lost
SOON = 3.0  # seconds that a placement takes where there is room
END_WAIT = 120.0  # seconds the other nodes have to end when one has


@dataclass(kw_only=True)
class _Node:
    """Holds what is known of a node in one attempt. answer: the pending call of its actor. heard:
    when it last answered, by time.monotonic(); patience: seconds it may be silent."""

    number: int
    where: str
    keeper: Any
    answer: Any
    tail: LogTail
    patience: float
    heard: float = field(default_factory=time.monotonic)
    status: int | None = None
    lost: str = ""  # why, where it is

    def lose(self, why: str) -> None:
        self.status, self.lost = NODE_FAILED, why


class RayJob:
    """Runs a job, each attempt in a placement group of its own. bundles: what each node takes of
    Ray's resources."""

    def __init__(
        self, job: Job, files: JobFiles, bundles: Sequence[Resources], signals: Signals
    ) -> None:
        self.job, self.files, self.bundles, self.signals = job, files, bundles, signals
        self.attempts = 0
        self._stamp = time.strftime("%Y%m%d%H%M%S", time.gmtime())

    def run_once(self) -> int:
        """Runs one attempt to its end and ends all that it started; returns the exit status. Raises
        NoRoom where the cluster has none within cluster.rendezvous_timeout."""
        attempt = f"{self._stamp}.{self.attempts}"
        self.attempts += 1
        with self._room(attempt) as group:
            if self.signals.received:
                return 128 + self.signals.received[0]
            nodes = self._begin(attempt, group)
            try:
                return _Watch(self.job, attempt, nodes, self.signals).to_the_end()
            finally:
                for node in nodes:
                    ray.kill(node.keeper)
                    node.tail.show(rest=True)

    @contextlib.contextmanager
    def _room(self, attempt: str) -> Iterator[PlacementGroup]:
        """Yields a placement group that is ready, or not where a signal came."""
        limit = self.job.rendezvous_timeout
        group = placement_group(
            list(self.bundles), strategy="STRICT_SPREAD", name=f"{self.job.name} {attempt}"
        )
        begun, said = time.monotonic(), False
        try:
            while not group.wait(LOOK) and not self.signals.received:
                waited = time.monotonic() - begun
                if waited > limit:
                    raise NoRoom(
                        f"no room within {limit:g} s (cluster.rendezvous_timeout) for "
                        f"{self._wanted()}; {cluster_has()}"
                    )
                if waited > SOON and not said:
                    said = True
                    log.warning(
                        "waiting %g s for room for %s; %s", limit, self._wanted(), cluster_has()
                    )
            yield group
        finally:
            remove_placement_group(group)

    def _wanted(self) -> str:
        return f"{counted(self.bundles)}, each on a machine of its own"

    def _begin(self, attempt: str, group: PlacementGroup) -> list[_Node]:
        """Starts an agent on every node of the group."""
        hosts = {n["NodeID"]: n["NodeManagerHostname"] for n in ray.nodes()}
        placed = placement_group_table(group)["bundles_to_node_id"]
        nodes = []
        for number, resources in enumerate(self.bundles):
            node_id = placed[number]
            tail = self.files.directory / f"ray-{attempt}-node{number}.log"
            actor: Any = ray.remote(Keeper)
            keeper = actor.options(
                max_concurrency=2,  # a signal comes while `wait` runs
                num_cpus=resources.get("CPU", 0),
                num_gpus=resources.get("GPU", 0),
                resources={k: v for k, v in resources.items() if k not in KINDS},
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
            ).remote(self._agent(attempt, number), import_path(), str(tail))
            node = _Node(
                number=number,
                where=f"node {number} ({hosts.get(node_id, '?')}, Ray's {node_id})",
                keeper=keeper,
                answer=keeper.wait.remote(0.0),
                tail=LogTail(tail, f"{number}: "),
                patience=self.job.rendezvous_timeout,
            )
            log.info("attempt %s: %s, log %s", attempt, node.where, tail)
            nodes.append(node)
        return nodes

    def _agent(self, attempt: str, number: int) -> list[str]:
        return [
            *(self.job.python, "-m", "megarl.launcher.node", "--job", str(self.files.job)),
            *("--environment", str(self.files.environment), "--attempt", attempt),
            *("--node", str(number)),
        ]


class _Watch:
    """Watches the nodes of one attempt."""

    def __init__(self, job: Job, attempt: str, nodes: list[_Node], signals: Signals) -> None:
        self.job, self.nodes, self.signals = job, nodes, signals
        self.directory = Path(job.working_directory, job.directory, NAMES)
        self.names = FileNames(self.directory, attempt, token=ensure_job_token())
        self.failed = 0  # the status of the first agent that failed
        self.told = 0  # signals that were passed on
        self.deadline = math.inf

    def to_the_end(self) -> int:
        """Waits until all agents have ended; returns the status of the attempt. When one has ended
        the others have END_WAIT seconds, after a signal recover.grace seconds more."""
        while running := self.running():
            self.hear(running)
            self.pass_signals_on()
            for node in self.nodes:
                node.tail.show()
            if time.monotonic() > self.deadline:
                for node in self.running():
                    node.lose(f"it did not end within {END_WAIT:g} s")
                    self.ended(node)
        return NODE_FAILED if any(node.lost for node in self.nodes) else self.failed

    def running(self) -> list[_Node]:
        return [node for node in self.nodes if node.status is None]

    def hear(self, running: list[_Node]) -> None:
        """Takes the answers that actors give within LOOK seconds."""
        waiting = {node.answer: node for node in running}
        answered, _ = ray.wait(list(waiting), num_returns=1, timeout=LOOK)
        for answer in answered:
            self.take(waiting[answer])
        for node in running:
            if node.status is None and time.monotonic() - node.heard > node.patience:
                node.lose(f"no answer for {node.patience:g} s")
            if node.status is not None:
                self.ended(node)

    def take(self, node: _Node) -> None:
        """Takes a node's answer, and asks again where its agent still runs."""
        try:
            node.status = ray.get(node.answer)
        except ActorUnavailableError:  # Ray does not yet know whether the node is lost
            time.sleep(LOOK)
        except RayError as e:
            node.lose(one_line(e))
        else:
            node.heard, node.patience = time.monotonic(), SILENCE
        if node.status is None:
            node.answer = node.keeper.wait.remote(ANSWER)

    def ended(self, node: _Node) -> None:
        """Tells the other agents what this one cannot tell them any more."""
        why = node.lost or f"its agent ended with status {node.status}"
        if node.lost:
            log.error("%s is lost: %s", node.where, why)
        elif node.status:
            log.error("%s: %s", node.where, why)
        said = (self.directory / self.names.attempt / f"end.{node.number}").exists()
        if node.status and not said:
            self.names.put(f"lost.{node.number}", why)
        self.failed = self.failed or node.status or 0
        self.deadline = min(self.deadline, time.monotonic() + END_WAIT)

    def pass_signals_on(self) -> None:
        for number in self.signals.received[self.told :]:
            self.told += 1
            for node in self.running():
                node.keeper.signal.remote(number)
            self.deadline = time.monotonic() + self.job.grace + END_WAIT
