"""Runs the nodes of a job on a Ray cluster: finds room, runs an agent on each node, watches.

Ray places one actor on each node, which runs the node's agent (node.py): that ends with its actor,
its launcher and its node. The agents meet as under any scheduler (names.py). Of a node that Ray has
lost the launcher tells the other agents, which then end.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.job_config import JobConfig
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.config.errors import ConfigError
from megarl.launcher.job import PACKAGE, Job, JobFiles, Resources, described
from megarl.launcher.names import FileNames, new_attempt
from megarl.launcher.node import NODE_FAILED, names_of
from megarl.observability.logging import get_logger
from megarl.utils.child import Child, LogTail, Signals, wait_until

log = get_logger("launcher")

KINDS = ("GPU", "CPU")  # of which a cluster says what it has
CONNECT = 10.0  # seconds to reach the head
LONGEST = 400  # characters of what Ray says
LOOK = 0.5  # seconds between looks at logs and signals
SOON = 3.0  # seconds that a placement takes where there is room
END_WAIT = 120.0  # seconds the other nodes have to end when one has


class NoRoom(RuntimeError):
    """Says that the cluster had no room for the job in time."""


class Agent:
    """Runs one node's agent, a child of the process of an actor. Not in that process: when an actor
    ends Ray kills its children one by one, and with the agent, the first, its processes end as
    whole groups."""

    def __init__(self, command: Sequence[str], log_path: str) -> None:
        """Starts the command. log_path: gets all that the agent and its processes print."""
        path = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        self._child = Child("agent", command, env=env, log_path=log_path)

    def wait(self) -> int:
        """Returns the agent's exit status when it has ended."""
        wait_until(lambda: self._child.poll() is not None, timeout=math.inf)
        return self._child.poll() or 0

    def signal(self, number: int) -> None:
        """Sends a signal to the agent."""
        self._child.signal(number)


@dataclass(kw_only=True)
class _Node:
    """Is a node in one attempt. answer: the pending call of `wait`. lost: why, where it is."""

    where: str
    log: Path
    agent: Any
    answer: Any
    status: int | None = None
    lost: str = ""


class RayNodes:
    """Runs the agents of a job's nodes, each in an actor in a bundle of one placement group, from
    its construction until `close`."""

    def __init__(
        self,
        files: JobFiles,
        attempt: str,
        bundles: Sequence[Resources],
        *,
        spread: str,
        limit: float,
        key: str,
        signals: Signals,
    ) -> None:
        """Waits for room; no node runs where a signal came first. bundles: what each node takes of
        Ray's resources. spread: the group's strategy. limit: seconds, which `key` names. Raises
        NoRoom where the cluster has none in time."""
        apart = ", each on a machine of its own" if spread == "STRICT_SPREAD" else ""
        self._group = placement_group(list(bundles), strategy=spread)
        self.nodes: list[_Node] = []
        try:
            if _wait_for(self._group, f"{counted(bundles)}{apart}", limit, key, signals):
                self._start(files, attempt, bundles)
        except BaseException:
            self.close()
            raise

    def _start(self, files: JobFiles, attempt: str, bundles: Sequence[Resources]) -> None:
        hosts = {n["NodeID"]: n["NodeManagerHostname"] for n in ray.nodes()}
        placed = placement_group_table(self._group)["bundles_to_node_id"]
        actor: Any = ray.remote(Agent)
        for number, resources in enumerate(bundles):
            path = files.directory / f"ray-{attempt}-node{number}.log"
            agent = actor.options(
                max_concurrency=3,  # a signal comes while `wait` runs
                num_cpus=resources.get("CPU", 0),
                num_gpus=resources.get("GPU", 0),
                memory=resources.get("memory"),
                resources={k: v for k, v in resources.items() if k not in (*KINDS, "memory")},
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, number),
            ).remote(files.agent(attempt, "--node", str(number)), str(path))
            where = f"node {number} ({hosts.get(placed[number], '?')}, Ray's {placed[number]})"
            self.nodes.append(_Node(where=where, log=path, agent=agent, answer=agent.wait.remote()))

    def hear(self, timeout: float) -> None:
        """Notes which agents have ended, or are lost, by `timeout` seconds from now."""
        waiting = {node.answer: node for node in self.nodes if node.status is None}
        for answer in ray.wait(list(waiting), num_returns=len(waiting), timeout=timeout)[0]:
            node = waiting[answer]
            try:
                node.status = ray.get(answer)
            except ActorUnavailableError:  # Ray does not yet know whether the node is lost
                time.sleep(timeout)
                node.answer = node.agent.wait.remote()
            except RayError as e:
                node.status, node.lost = NODE_FAILED, one_line(e)

    def poll(self) -> Mapping[int, int]:
        """Returns the exit statuses of the agents that have ended."""
        if any(node.status is None for node in self.nodes):
            self.hear(0)
        return {k: node.status for k, node in enumerate(self.nodes) if node.status is not None}

    def signal(self, number: int) -> None:
        """Sends a signal to the agents."""
        for node in self.nodes:
            node.agent.signal.remote(number)

    def close(self) -> None:
        """Kills the agents, with all that they started."""
        for node in self.nodes:
            ray.kill(node.agent)
        remove_placement_group(self._group)


def _wait_for(group: PlacementGroup, wanted: str, limit: float, key: str, signals: Signals) -> bool:
    """Returns whether a group is ready, which it is not where a signal came. Raises NoRoom after
    `limit` seconds."""
    begun, warned = time.monotonic(), False
    while not group.wait(LOOK):
        if signals.received:
            return False
        waited = time.monotonic() - begun
        if waited > limit:
            raise NoRoom(f"no room within {limit:g} s ({key}) for {wanted}; {cluster_has()}")
        if waited > SOON and not warned:
            warned = True
            log.warning("waiting %g s for room for %s; %s", limit, wanted, cluster_has())
    return not signals.received


def run_attempt(job: Job, files: JobFiles, bundles: Sequence[Resources], signals: Signals) -> int:
    """Runs a job once on nodes of its own, and ends all that it started; returns the exit status.
    Raises NoRoom where the cluster has none within collective_timeout."""
    attempt = new_attempt()
    ray_nodes = RayNodes(
        files,
        attempt,
        bundles,
        spread="STRICT_SPREAD",
        limit=job.rendezvous_timeout,
        key="collective_timeout",
        signals=signals,
    )
    try:
        if not ray_nodes.nodes:
            return signals.status
        return _follow(job, attempt, ray_nodes, signals)
    finally:
        ray_nodes.close()


def _follow(job: Job, attempt: str, ray_nodes: RayNodes, signals: Signals) -> int:
    """Waits until all agents have ended; returns the status of the attempt. When one has ended the
    others have END_WAIT seconds, after a signal recover.grace seconds more."""
    names, nodes = names_of(job, attempt), ray_nodes.nodes
    for node in nodes:
        log.info("attempt %s: %s, log %s", attempt, node.where, node.log)
    tails = [LogTail(node.log, f"{k}: ") for k, node in enumerate(nodes)]
    first_failure, passed_on, deadline = 0, 0, math.inf
    while running := {k: node for k, node in enumerate(nodes) if node.status is None}:
        ray_nodes.hear(LOOK)
        for number in signals.received[passed_on:]:
            passed_on += 1
            ray_nodes.signal(number)
            deadline = time.monotonic() + job.grace + END_WAIT
        for tail in tails:
            tail.show()
        for number, node in running.items():
            if node.status is None and time.monotonic() > deadline:
                node.status, node.lost = NODE_FAILED, f"it did not end within {END_WAIT:g} s"
            if node.status is None:
                continue
            deadline = min(deadline, time.monotonic() + END_WAIT)
            first_failure = first_failure or node.status
            if node.status:
                _tell_others(number, node, names)
    for tail in tails:
        tail.show(rest=True)
    return NODE_FAILED if any(node.lost for node in nodes) else first_failure


def _tell_others(number: int, node: _Node, names: FileNames) -> None:
    """Tells the other agents of one that has failed, where it has not done so itself."""
    why = node.lost or f"its agent ended with status {node.status}"
    log.error("%s%s: %s", node.where, " is lost" if node.lost else "", why)
    if not names.published(f"end.{number}"):
        names.put(f"lost.{number}", why)


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Connects to the cluster, until the block ends. Raises ConfigError where there is none."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address:
        _check_listens(address)
    try:
        ray.init(
            address or "auto",
            job_config=JobConfig(code_search_path=[str(PACKAGE.parent)]),
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except (ConnectionError, RuntimeError, ValueError) as e:
        raise _no_cluster(address, e) from e
    try:
        yield
    finally:
        ray.shutdown()


def _check_listens(address: str) -> None:
    """Raises ConfigError where nothing listens at an address; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        fix = "start the launcher on a machine of the cluster, or with `ray job submit`"
        raise ConfigError(f"RAY_ADDRESS={address}: must be host:port of the cluster's head; {fix}")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT).close()
    except OSError as e:
        raise _no_cluster(address, e) from e


def _no_cluster(address: str, error: Exception) -> ConfigError:
    fix = "start one with `ray start --head`, or set RAY_ADDRESS to host:port of its head"
    return ConfigError(f"RAY_ADDRESS={address}: no Ray cluster: {one_line(error)}; {fix}")


def cluster_has() -> str:
    """Says what nodes the cluster has."""
    alive = [n["Resources"] for n in ray.nodes() if n["Alive"]]
    kinds = counted([{k: r[k] for k in KINDS if k in r} for r in alive if {*KINDS} & {*r}])
    return f"the cluster has {kinds or 'no GPUs or CPUs'}, and `ray status` says what is in use"


def counted(nodes: Sequence[Resources]) -> str:
    """Returns how many nodes of each kind there are, as text."""
    kinds = Counter(map(described, nodes))
    return "; ".join(f"{count} node(s) of {kind}" for kind, count in kinds.items())


def one_line(error: BaseException) -> str:
    """Returns what Ray says of an error, without the fields of the actor that stand before it."""
    text = " ".join(str(error).split())
    _, because, why = text.partition("The actor died because ")
    text = why if because else text or type(error).__name__
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
