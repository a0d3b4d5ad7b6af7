"""Starts the workers of a script on the nodes of a cluster: on Ray, and in an allocation of Slurm.

A group is a job whose nodes have one worker each: the launcher's agent (node.py) starts it, watches
it and ends it. A worker that fails ends its group. Files of a group are in <log_dir>/<name>.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from megarl.config.errors import ConfigError
from megarl.config.recipes import BaseConfig
from megarl.launcher.files import JobFiles
from megarl.launcher.job import MASTER, MASTER_MARKS, TRAINER, Job, Task
from megarl.launcher.names import LOOK_INTERVAL
from megarl.launcher.node import names_of
from megarl.rpc.errors import WorkerDied
from megarl.rpc.group import (
    LOST,
    Arrivals,
    GroupSpec,
    Processes,
    Scheduler,
    WatchedGroup,
    WorkerSpec,
)
from megarl.rpc.link import split
from megarl.rpc.nodes import PACKAGE, Resources, forwarded, node_address
from megarl.rpc.worker import rank_env
from megarl.utils.child import TERM_TIMEOUT, Child, Signals, stop_all, wait_until
from megarl.utils.env import CONTROLS
from megarl.utils.importing import load_object
from megarl.utils.job_token import ENV as TOKEN

_KINDS = {  # by trainer.scheduler, and under a launcher
    "launched": "megarl.launcher.workers:LaunchedScheduler",
    "local": "megarl.rpc.group:LocalScheduler",
    "ray": "megarl.launcher.workers:RayScheduler",
    "slurm": "megarl.launcher.workers:SlurmScheduler",
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
            raise ValueError(
                f"{spec.name}: a launcher starts the groups {', '.join(self._places)}; start "
                "others by a LocalScheduler"
            )
        return Arrivals(*split(self._places[spec.name]))

    def start_processes(self, spec: GroupSpec, address: str) -> None:
        """Starts none."""


class _OnNodes(Scheduler):
    """Starts groups on nodes that share the log directory with this machine, and have this package
    and the workers' Python at the same path."""

    def __init__(self, interface: str) -> None:
        super().__init__()
        self._interface, self._host = interface, node_address(interface)

    def listen(self, spec: GroupSpec) -> Arrivals:
        """Listens where nodes reach this machine. Raises ValueError without a log directory."""
        if not spec.log_dir:
            raise ValueError(
                f"{spec.name}: log_dir is empty; name a directory that the nodes share"
            )
        return Arrivals(self._host)

    def start_processes(self, spec: GroupSpec, address: str) -> Processes:
        """Starts an agent on each node of a job."""
        job = group_job(spec, address, self._interface)
        files = JobFiles.of(job)
        files.write_records(job, os.environ)
        return self.start_agents(spec, job, files, f"{time.time_ns()}.0")

    def start_agents(self, spec: GroupSpec, job: Job, files: JobFiles, attempt: str) -> Processes:
        """Starts an agent on each node of the job."""
        raise NotImplementedError


def group_job(spec: GroupSpec, address: str, interface: str = "") -> Job:
    """Returns a group of workers, which link to `address`, as a job. interface: the nodes' own."""
    variables = forwarded(os.environ)
    path = [str(PACKAGE.parent), *filter(None, [variables.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join(path)}
    if spec.worker.cpus and "OMP_NUM_THREADS" not in variables:
        env["OMP_NUM_THREADS"] = str(spec.worker.cpus)
    nodes = range(spec.count)
    tasks = [
        Task(
            role=TRAINER,
            index=index,
            node=index,
            gpus=None,
            command=(spec.python, "-m", "megarl.rpc.worker"),
            env=env | rank_env(index, nodes, *MASTER_MARKS) | spec.env(index, address),
            ports=() if index else (MASTER,),
            log=str(Path(spec.log(index)).resolve()),
        )
        for index in nodes
    ]
    return Job(
        name=spec.name,
        config="",
        directory=str(Path(spec.log_dir, spec.name)),
        working_directory=os.getcwd(),
        pools=("workers",) * spec.count,
        gpus_per_node=(spec.worker.gpus,) * spec.count,
        interface=interface,
        tasks=tuple(tasks),
        forwarded=tuple(variables),
        hidden=(),
        python=spec.python,
        start_timeout=spec.start_timeout,
        rendezvous_timeout=spec.start_timeout,
        grace=TERM_TIMEOUT,
        restarts=0,
    )


class RayScheduler(_OnNodes):
    """Starts each worker in an actor of its own, all of a group in one placement group (PACK). A
    worker ends with its actor, and with this process. interface: the network interface of this
    machine that nodes reach; empty is that of its name."""

    def __init__(self, *, interface: str = "") -> None:
        """Connects to the cluster of RAY_ADDRESS, or to this machine's, unless this process has.
        Raises ConfigError where there is none."""
        super().__init__(interface)
        import ray

        from megarl.launcher.ray_cluster import connected

        if not ray.is_initialized():
            self._stack.enter_context(connected())

    def start_agents(self, spec: GroupSpec, job: Job, files: JobFiles, attempt: str) -> Processes:
        from megarl.launcher.ray_cluster import RayNodes

        return RayNodes(
            files,
            attempt,
            [bundle(spec.worker)] * spec.count,
            spread="PACK",
            limit=spec.start_timeout,
            key="start_timeout",
            signals=Signals(),
        )


def bundle(worker: WorkerSpec) -> Resources:
    """Returns what is asked of Ray for a worker."""
    wanted = {"GPU": worker.gpus, "CPU": worker.cpus or 1, "memory": worker.memory}
    return {name: float(amount) for name, amount in wanted.items() if amount}


class SlurmScheduler(_OnNodes):
    """Starts each group by one `srun --overlap`, in the job that this process belongs to.
    interface: the network interface of this machine that nodes reach; empty is that of its name."""

    def __init__(self, *, interface: str = "") -> None:
        """Raises ConfigError outside of an allocation, or without an address."""
        if not os.environ.get("SLURM_JOB_ID"):
            raise ConfigError(
                ["SLURM_JOB_ID is not set: start this in an allocation, by sbatch or salloc"]
            )
        super().__init__(interface)

    def start_agents(self, spec: GroupSpec, job: Job, files: JobFiles, attempt: str) -> Processes:
        self._step = _SlurmStep(spec, job, files, attempt)
        return self._step

    def start(self, spec: GroupSpec) -> WatchedGroup:
        """Returns a group whose workers serve; see Scheduler. Errors show what srun says."""
        try:
            return super().start(spec)
        except (WorkerDied, TimeoutError) as e:
            raise type(e)(f"{e}{self._step.srun.tail()}") from e


class _SlurmStep:
    """Holds the srun of a group's agents, and reads what they say of their ends."""

    def __init__(self, spec: GroupSpec, job: Job, files: JobFiles, attempt: str) -> None:
        self._names = names_of(job, attempt)
        self._count, self._over = spec.count, 0.0
        self.srun = Child(
            f"srun of {spec.name}",
            srun_command(spec, files, attempt),
            env={k: v for k, v in os.environ.items() if k != TOKEN}
            | {"PYTHONPATH": str(PACKAGE.parent)},
            log_path=files.directory / f"srun-{attempt}.log",
        )

    def poll(self) -> Mapping[int, int]:
        """Returns the exit statuses of the agents, which are those of their workers."""
        status = self.srun.poll()
        ends = {k: self._names.peek(f"end.{k}") for k in range(self._count)}
        ended = {k: int(text) for k, text in ends.items() if text is not None}
        if status is None:
            return ended
        self._over = self._over or time.monotonic()
        if time.monotonic() < self._over + 2 * LOOK_INTERVAL:  # they may have said more
            return ended
        return dict.fromkeys(range(self._count), LOST) | ended

    def close(self) -> None:
        """Has the agents that are left end, with their workers, and srun with them."""
        if self.srun.poll() is None:
            self._names.put("lost.0", "the controller needs these workers no more")
            wait_until(lambda: self.srun.poll() is not None, timeout=TERM_TIMEOUT)
        stop_all([self.srun], Signals())


def srun_command(spec: GroupSpec, files: JobFiles, attempt: str) -> list[str]:
    """Returns the command that starts the agents of a group. Groups with GPUs do not share them:
    their steps take what they ask for, the others lie over all."""
    return [
        *("srun", f"--job-name={spec.name}", f"--ntasks={spec.count}"),
        *("--export=PATH,HOME,USER,LANG,PYTHONPATH,SLURM_CONF", "--kill-on-bad-exit=0"),
        *("--wait=0", *_asks(spec.worker)),
        *files.agent(attempt, "--node-variable", "SLURM_PROCID"),
    ]


def _asks(worker: WorkerSpec) -> Iterator[str]:
    cpus = worker.cpus or 1
    yield f"--cpus-per-task={cpus}"
    if worker.gpus:
        yield from ("--exact", f"--gpus-per-task={worker.gpus}")
    else:
        yield "--overlap"
    if worker.memory:  # Slurm has no bound for a task, but one for each of its cores
        yield f"--mem-per-cpu={-(-worker.memory // (cpus << 20))}M"
    elif worker.gpus:
        yield "--mem=0"
