"""Configures the machines of a job, and how schedulers are asked for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from megarl.config.base import NOT_NEGATIVE, POSITIVE, TIMEOUT


@dataclass(kw_only=True)
class PoolConfig:
    """Describes nodes that differ from the others."""

    n_gpus_per_node: Annotated[int, POSITIVE] = 8
    """GPUs of a node; without GPUs, processes"""
    sbatch_args: list[str] = field(default_factory=list)
    """arguments of sbatch for these nodes, like --partition=inference"""
    ray_resources: dict[str, float] = field(default_factory=dict)
    """as cluster.ray_resources, for these nodes"""


@dataclass(kw_only=True)
class RewardPoolConfig:
    """Describes nodes without GPUs that compute rewards."""

    n_nodes: Annotated[int, POSITIVE] = 1
    """nodes, each with rollout.reward_workers processes"""
    restarts: Annotated[int, NOT_NEGATIVE] = 3
    """times that a dead reward worker is started again; one more death ends the run"""
    sbatch_args: list[str] = field(default_factory=list)
    """arguments of sbatch for these nodes, like --partition=cpu"""


@dataclass(kw_only=True)
class SlurmConfig:
    """Configures what megarl.launcher.slurm asks Slurm for."""

    minutes: Annotated[int, POSITIVE] | None = None
    """time limit of one attempt; null is the partition's"""
    save_before: Annotated[int, POSITIVE] = 300
    """seconds before the time limit at which the job saves a checkpoint and queues again"""
    requeue: bool = True
    """queue the job again after a time limit, a preemption or the loss of a node; it continues
    from its newest checkpoint"""
    sbatch_args: list[str] = field(default_factory=list)
    """more arguments of sbatch, like [--partition=gpu,--account=us,--qos=high], but not for
    server_pool and reward_pool; nodes are requested whole unless an argument says how to share them
    (--oversubscribe, --mem, ...)"""


@dataclass(kw_only=True)
class ClusterConfig:
    """Describes the nodes that a cluster's launchers use."""

    n_nodes: Annotated[int, POSITIVE] | None = None
    """nodes of the job; null is as many as its processes need"""
    n_gpus_per_node: Annotated[int, POSITIVE] = 8
    """GPUs of a node; without GPUs, processes"""
    server_pool: PoolConfig | None = None
    """nodes of another kind for the servers; null puts them on nodes like the others"""
    reward_pool: RewardPoolConfig | None = None
    """nodes without GPUs for rewards; null computes them beside rank 0"""
    interface: str = ""
    """network interface of the nodes that processes meet on; empty is that of the node's host
    name"""
    container: str = ""
    """image that the processes run in, as srun --container-image or a pod takes it; the
    configuration's paths are those inside it"""
    container_mounts: list[str] = field(default_factory=list)
    """directories that the container sees, each as /here or /here:/there"""
    python: str = ""
    """interpreter on the nodes; empty is this one's path"""
    forward_env: list[str] = field(default_factory=list)
    """further environment variables that processes get from the launcher's environment, by name;
    AWS_* stands for all that begin so"""
    rendezvous_timeout: Annotated[float, TIMEOUT] = 900.0
    """seconds the nodes wait for each other at the start"""
    ray_resources: dict[str, float] = field(default_factory=dict)
    """what to request from Ray on each node besides GPUs and CPUs, by name, like
    {accelerator_type:H100: 0.001}"""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    """Slurm"""
