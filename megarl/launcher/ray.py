"""Runs everything on a Ray cluster: an actor on every node starts and watches that node's agent.

    python -m megarl.launcher.ray [script.py] --config X.yaml [--nproc N] [key=value ...]
    ray job submit -- python -m megarl.launcher.ray ...

    --check           check the configuration, models, data and code it names, then stop
    --dry-run         print the nodes, the processes with their commands, variables, ports and logs,
                      and what Ray is asked for, then stop; --format json has every process in full

RAY_ADDRESS names the cluster, host:port; without it, it is the one that this machine belongs to.
allocation_mode and `cluster` say what the job needs. Every node is a bundle of a placement group
(STRICT_SPREAD: no two on one machine) with cluster.n_gpus_per_node GPUs, without GPUs with a CPU
for each process but a controller. Where there is no room the launcher waits
collective_timeout seconds.

The working directory and fileroot are on storage that this machine and the nodes share. Ray carries
no tensors: on every node one agent (megarl.launcher.node) starts, watches and ends the node's
processes. Rank 0 and the agents write to <run>/launch/ray-<attempt>-node<K>.log, which are shown
here, other ranks to <run>/logs/trainer_<rank>.log.

SIGTERM, SIGINT and SIGUSR1 have the trainers save a checkpoint and end within recover.grace
seconds; a second signal ends all of them at once. A process that fails ends all, and so does a node
that is lost; recover.restarts has the job started again, on the nodes that are left or join.
Nothing that was started outlives the launcher. The exit status is that of the trainers, 2 for a
configuration error, 4 where a node was lost or there was no room.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Sequence

from megarl.config.command_line import CommandLine
from megarl.config.errors import ConfigError
from megarl.config.run import ClusterConfig
from megarl.launcher.command import Launcher, run_launcher, start_again
from megarl.launcher.job import CONTROLLER, Job, JobFiles, Resources, described
from megarl.launcher.node import NODE_FAILED
from megarl.launcher.placement import SERVER_POOL
from megarl.launcher.plan import Plan, plan_cluster
from megarl.launcher.workers import NodeScheduler
from megarl.observability.logging import get_logger
from megarl.rpc.group import GroupSpec, Processes, WorkerSpec
from megarl.utils.child import Signals
from megarl.utils.env import ensure_job_token
from megarl.utils.extras import install_hint

log = get_logger("launcher")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the launcher with the command line `argv` (None: this process's); returns the exit
    status."""
    on_ray = Launcher(help=__doc__ or "", plan=_plan, start=_start, asks=_asks)
    return run_launcher(on_ray, argv)


def bundles(job: Job, cluster: ClusterConfig) -> list[Resources]:
    """Returns what is asked of Ray for each node: its GPUs, or a CPU for each of its processes, and
    what the configuration adds."""
    nodes: list[Resources] = []
    for node, gpus in enumerate(job.gpus_per_node):
        # a controller computes nothing
        processes = sum(t.node == node and t.role != CONTROLLER for t in job.tasks)
        other = cluster.server_pool if job.pools[node] == SERVER_POOL else None
        added = other.ray_resources if other else cluster.ray_resources
        nodes.append({**({"GPU": gpus, "CPU": 1} if gpus else {"CPU": processes}), **added})
    return nodes


def bundle(worker: WorkerSpec) -> Resources:
    """Returns what is asked of Ray for a worker."""
    resources = {"GPU": worker.gpus, "CPU": worker.cpus or 1, "memory": worker.memory}
    return {name: float(amount) for name, amount in resources.items() if amount}


def _plan(command: CommandLine) -> Plan:
    plan = plan_cluster(command)
    if plan.cfg.cluster.container:
        why = "processes run in the containers that Ray's nodes were started in; leave it out"
        raise ConfigError(f"cluster.container={plan.cfg.cluster.container}: {why}")
    return plan


def _asks(plan: Plan, job: Job) -> str:
    lines = ["Ray is asked for a placement group, STRICT_SPREAD, with a bundle for each node:"]
    nodes = enumerate(bundles(job, plan.cfg.cluster))
    return "\n".join(lines + [f"  node {i}: {described(bundle)}" for i, bundle in nodes])


def _start(plan: Plan, job: Job, command: CommandLine) -> int:
    """Runs the job to its end, starting it again as recover.restarts allows; returns the exit
    status. Raises ConfigError where there is no Ray."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"the package ray is not installed: {install_hint('ray')}")
    from megarl.launcher.ray_cluster import NoRoom, connected, run_attempt

    ensure_job_token()
    files = JobFiles.of(job)
    files.write(job, os.environ)
    asked, attempts = bundles(job, plan.cfg.cluster), 0
    with connected(), Signals(signal.SIGUSR1) as signals:

        def run_once() -> int:
            nonlocal attempts
            attempts += 1
            return run_attempt(job, files, asked, signals)

        try:
            status = start_again(job.restarts, signals, run_once)
        except NoRoom as e:
            log.error("%s", e)
            status = NODE_FAILED
        log.info("%s ended with status %d after %d attempt(s)", job.name, status, attempts)
    return status


class RayScheduler(NodeScheduler):
    """Starts each worker in an actor of its own, all of a group in one placement group (PACK). A
    worker ends with its actor, and with this process. interface: as cluster.interface, of
    this machine and of the nodes."""

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


if __name__ == "__main__":
    sys.exit(main())
