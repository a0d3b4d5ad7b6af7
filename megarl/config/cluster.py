"""Configures the machines of a job, and how schedulers are asked for them."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.base import arg
from megarl.config.bounds import NOT_NEGATIVE, POSITIVE, TIMEOUT


@dataclass(kw_only=True)
class PoolConfig:
    """Describes nodes that differ from the others."""

    n_gpus_per_node: int = arg(8, bounds=POSITIVE, help="GPUs of a node; without GPUs, processes")
    sbatch_args: list[str] = arg(
        factory=list, help="arguments of sbatch for these nodes, like --partition=inference"
    )
    ray_resources: dict[str, float] = arg(
        factory=dict, help="as cluster.ray_resources, for these nodes"
    )


@dataclass(kw_only=True)
class RewardPoolConfig:
    """Describes nodes without GPUs that compute rewards."""

    n_nodes: int = arg(1, bounds=POSITIVE, help="nodes, each with rollout.reward_workers processes")
    restarts: int = arg(
        3,
        bounds=NOT_NEGATIVE,
        help="a reward worker that dies is started again this many times, while others compute its "
        "rewards; one more death ends the run",
    )
    sbatch_args: list[str] = arg(
        factory=list, help="arguments of sbatch for these nodes, like --partition=cpu"
    )


@dataclass(kw_only=True)
class SlurmConfig:
    """Configures what megarl.launcher.slurm asks Slurm for."""

    partition: str = arg("", help="partition; empty is Slurm's default")
    account: str = arg("", help="account to charge; empty is the user's default")
    reservation: str = arg("", help="reservation to use; empty is none")
    minutes: int | None = arg(
        None, bounds=POSITIVE, help="time limit of one attempt; null is the partition's"
    )
    save_before: int = arg(
        300,
        bounds=POSITIVE,
        help="seconds before the time limit at which the job saves a checkpoint and queues again",
    )
    requeue: bool = arg(
        True,
        help="queue the job again after a time limit, a preemption or the loss of a node; it "
        "continues from its newest checkpoint",
    )
    exclusive: bool = arg(
        True, help="whole nodes with all their memory; false leaves that to sbatch_args"
    )
    sbatch_args: list[str] = arg(
        factory=list, help="more arguments of sbatch, like --qos=high; not for server_pool's nodes"
    )
    srun_args: list[str] = arg(factory=list, help="more arguments of srun")
    poll_seconds: float = arg(5.0, bounds=POSITIVE, help="seconds between looks at the job's state")


@dataclass(kw_only=True)
class ClusterConfig:
    """Describes the nodes that a cluster's launchers use."""

    n_nodes: int | None = arg(
        None, bounds=POSITIVE, help="nodes of the job; null is as many as its processes need"
    )
    n_gpus_per_node: int = arg(8, bounds=POSITIVE, help="GPUs of a node; without GPUs, processes")
    server_pool: PoolConfig | None = arg(
        None, help="nodes of another kind for the servers; null puts them on nodes like the others"
    )
    reward_pool: RewardPoolConfig | None = arg(
        None, help="nodes without GPUs for rewards; null computes them beside rank 0"
    )
    interface: str = arg(
        "",
        help="network interface of the nodes that processes meet on; empty is that of the node's "
        "host name",
    )
    container: str = arg(
        "",
        help="image that the processes run in, as srun --container-image or a pod takes it; the "
        "configuration's paths are those inside it",
    )
    container_mounts: list[str] = arg(
        factory=list, help="directories that the container sees, each as /here or /here:/there"
    )
    python: str = arg("", help="interpreter on the nodes; empty is this one's path")
    forward_env: list[str] = arg(
        factory=list,
        help="further environment variables that processes get from the launcher's environment, "
        "by name; AWS_* stands for all that begin so",
    )
    rendezvous_timeout: float = arg(
        900.0, bounds=TIMEOUT, help="seconds the nodes wait for each other at the start"
    )
    ray_resources: dict[str, float] = arg(
        factory=dict,
        help="what Ray is asked for on each node besides GPUs and CPUs, by name, like "
        "{accelerator_type:H100: 0.001}",
    )
    slurm: SlurmConfig = arg(factory=SlurmConfig, help="Slurm")
