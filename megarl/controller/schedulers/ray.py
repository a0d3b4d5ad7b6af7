"""Starts workers on the nodes of a Ray cluster. Calls to them do not go through Ray."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.api.scheduler import GroupSpec, WorkerSpec
from megarl.rpc.gathering import Gathering
from megarl.rpc.group import LOST, WatchedGroup, node_env, worker_log
from megarl.rpc.nodes import Resources, described, node_address, write_environment
from megarl.rpc.ray_nodes import Keeper, NoRoom, cluster_has, connected, import_path
from megarl.rpc.worker import KEEP
from megarl.utils.job_token import ensure_job_token

ANSWER = 3600.0  # seconds after which an actor answers even where its worker still runs


class RayScheduler:
    """Starts each worker in an actor of its own, all of a group in one placement group.

    Nodes share the log directory with this machine, and have this package and the workers' Python
    at the same path. interface: the network interface of this machine that nodes reach; empty is
    that of its name. A worker ends with its actor, and with this process.
    """

    def __init__(self, *, interface: str = "") -> None:
        """Connects to the cluster of RAY_ADDRESS, or to this machine's, unless this process has.
        Raises ConfigError where there is none."""
        ensure_job_token()
        self._host = node_address(interface)
        self._stack = contextlib.ExitStack()  # ends what is left, whatever one end raises
        if not ray.is_initialized():
            self._stack.enter_context(connected())

    def start(self, spec: GroupSpec) -> WatchedGroup:
        """Returns a group whose workers serve. Raises NoRoom where the cluster has none for it
        within spec.start_timeout, ValueError without a log directory."""
        if not spec.log_dir:
            raise ValueError(
                f"{spec.name}: log_dir is empty; name a directory that the nodes share"
            )
        room = _room(spec)
        gathering = Gathering(spec, self._host)
        actors = _Actors(room)
        try:
            environment = Path(spec.log_dir, f"{spec.name}.environment.json").resolve()
            write_environment(environment, node_env(spec, gathering.address))
            for index in range(spec.count):
                actors.add(_keeper(spec, room, index, environment))
        except BaseException:
            gathering.close()
            actors.close()
            raise
        group = WatchedGroup(spec, actors, gathering)
        self._stack.callback(group.stop)
        return group

    def close(self) -> None:
        """Ends the groups that are left, and the connection that this has made."""
        self._stack.close()


def bundle(worker: WorkerSpec) -> Resources:
    """Returns what is asked of Ray for a worker."""
    wanted = {"GPU": worker.gpus, "CPU": worker.cpus or 1, "memory": worker.memory}
    return {name: float(amount) for name, amount in wanted.items() if amount}


def _room(spec: GroupSpec) -> PlacementGroup:
    """Returns a placement group that is ready."""
    wanted = bundle(spec.worker)
    room = placement_group([wanted] * spec.count, strategy="PACK", name=spec.name)
    if not room.wait(spec.start_timeout):
        remove_placement_group(room)
        raise NoRoom(
            f"{spec.name}: no room within {spec.start_timeout:g} s for {spec.count} worker(s) with "
            f"{described(wanted)}; {cluster_has()}"
        )
    return room


def _keeper(spec: GroupSpec, room: PlacementGroup, index: int, environment: Path) -> Any:
    """Starts the actor that keeps a worker."""
    command = [spec.python, "-m", "megarl.rpc.worker", KEEP]
    command += ["--environment", str(environment), "--index", str(index)]
    actor: Any = ray.remote(Keeper)
    wanted = bundle(spec.worker)
    return actor.options(
        num_cpus=wanted["CPU"],
        num_gpus=wanted.get("GPU", 0),
        memory=wanted.get("memory"),
        scheduling_strategy=PlacementGroupSchedulingStrategy(room, index),
    ).remote(command, import_path(), str(Path(worker_log(spec, index)).resolve()))


class _Actors:
    """Holds the actors of a group, each with its pending answer, and their placement group."""

    def __init__(self, room: PlacementGroup) -> None:
        self._room = room
        self._keepers: list[Any] = []
        self._answers: dict[Any, int] = {}  # the call that an actor has not answered -> its index
        self._ended: dict[int, int] = {}

    def add(self, keeper: Any) -> None:
        self._answers[keeper.wait.remote(ANSWER)] = len(self._keepers)
        self._keepers.append(keeper)

    def poll(self) -> Mapping[int, int]:
        if not self._answers:
            return self._ended
        waiting = list(self._answers)
        answered, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        for answer in answered:
            index = self._answers.pop(answer)
            status = _status(answer)
            if status is None:
                self._answers[self._keepers[index].wait.remote(ANSWER)] = index
            else:
                self._ended[index] = status
        return self._ended

    def close(self) -> None:
        for keeper in self._keepers:
            ray.kill(keeper)
        self._answers.clear()
        remove_placement_group(self._room)


def _status(answer: Any) -> int | None:
    """Returns the exit status of a worker, LOST where its node or actor is gone."""
    try:
        return ray.get(answer)
    except ActorUnavailableError:  # Ray does not yet know whether the node is lost
        return None
    except RayError:
        return LOST
