"""Starts the workers of a script on the nodes of a cluster: on Ray, and in an allocation of Slurm.

A group is a job whose nodes have one worker each: the launcher's agent (node.py) starts it, watches
it and ends it. A worker that fails ends its group. Files of a group are in <log_dir>/<name>.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from megarl.config.recipes import BaseConfig
from megarl.launcher.job import (
    MASTER,
    MASTER_MARKS,
    PACKAGE,
    TRAINER,
    Job,
    JobFiles,
    Task,
    forwarded,
)
from megarl.launcher.names import new_attempt, node_address
from megarl.rpc.group import Arrivals, GroupSpec, Processes, Scheduler
from megarl.rpc.worker import rank_env
from megarl.utils.child import TERM_TIMEOUT
from megarl.utils.env import CONTROLS
from megarl.utils.http import split_address
from megarl.utils.importing import load_object

_KINDS = {  # by trainer.scheduler, and under a launcher
    "launched": "megarl.launcher.workers:LaunchedScheduler",
    "local": "megarl.rpc.group:LocalScheduler",
    "ray": "megarl.launcher.ray:RayScheduler",
    "slurm": "megarl.launcher.slurm:SlurmScheduler",
}


def make_scheduler(config: BaseConfig) -> Scheduler:
    """Returns the scheduler that trainer.scheduler names, and under a launcher that has started the
    trainers, the one that meets them. Raises what it does without a cluster."""
    name = "launched" if os.environ.get(CONTROLS) else config.trainer.scheduler
    make: Callable[..., Scheduler] = load_object(_KINDS[name], what="scheduler")
    elsewhere = name in ("ray", "slurm")
    return make(interface=config.cluster.interface) if elsewhere else make()


class LaunchedScheduler(Scheduler):
    """Meets the workers of a job, which its launcher has started: its trainers, and a driver of
    rollouts. Where one ends, the launcher ends the job."""

    def __init__(self) -> None:
        """Raises KeyError outside of a job whose workers are to be met."""
        super().__init__()
        places = os.environ[CONTROLS].split(",")
        os.environ[CONTROLS] = ""  # they are met once
        self._places: dict[str, str] = dict(pair.split("=", 1) for pair in places)

    def listen(self, spec: GroupSpec) -> Arrivals:
        """Listens where the launcher has told the workers. Raises ValueError for a group that it
        has not started."""
        if spec.name not in self._places:
            why = f"a launcher starts {', '.join(self._places)}; start others by a LocalScheduler"
            raise ValueError(f"{spec.name}: {why}")
        return Arrivals(*split_address(self._places[spec.name]))

    def start_processes(self, spec: GroupSpec, address: str) -> None:
        """Starts none."""


class NodeScheduler(Scheduler):
    """Starts groups on nodes that share the log directory with this machine, and have this package
    and the workers' Python at the same path."""

    def __init__(self, interface: str) -> None:
        super().__init__()
        self._interface, self._host = interface, node_address(interface)

    def listen(self, spec: GroupSpec) -> Arrivals:
        """Listens where nodes reach this machine. Raises ValueError without a log directory."""
        if not spec.log_dir:
            raise ValueError(f"{spec.name}: log_dir is empty; name a directory that nodes share")
        return Arrivals(self._host)

    def start_processes(self, spec: GroupSpec, address: str) -> Processes:
        """Starts an agent on each node of a job."""
        job = group_job(spec, address, self._interface)
        files = JobFiles.of(job)
        files.write(job, os.environ)
        return self.start_agents(spec, job, files, new_attempt())

    def start_agents(self, spec: GroupSpec, job: Job, files: JobFiles, attempt: str) -> Processes:
        """Starts an agent on each node of the job."""
        raise NotImplementedError


def group_job(spec: GroupSpec, address: str, interface: str = "") -> Job:
    """Returns a group of workers, which link to `address`, as a job. interface: the nodes' own."""
    variables = forwarded(os.environ)
    path = [str(PACKAGE.parent), *filter(None, [variables.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join(path)}
    if "OMP_NUM_THREADS" not in variables:  # workers that share a node do not know of each other
        env["OMP_NUM_THREADS"] = str(spec.worker.cpus or 1)
    nodes = range(spec.count)
    tasks = [
        Task(
            role=TRAINER,
            index=index,
            node=index,
            command=(spec.python, "-m", "megarl.rpc.worker"),
            env=env | rank_env(index, nodes, *MASTER_MARKS) | spec.env(index, address),
            ports=() if index else (MASTER,),
            log=str(Path(spec.log(index)).resolve()),
        )
        for index in nodes
    ]
    return Job(
        name=spec.name,
        directory=str(Path(spec.log_dir, spec.name)),
        working_directory=os.getcwd(),
        pools=("workers",) * spec.count,
        gpus_per_node=(spec.worker.gpus,) * spec.count,
        interface=interface,
        tasks=tuple(tasks),
        forwarded=tuple(variables),
        python=spec.python,
        start_timeout=spec.start_timeout,
        rendezvous_timeout=spec.start_timeout,
        grace=TERM_TIMEOUT,
    )
