"""Configures the work around the training loop: saving, evaluating, checking, logging, recording;
and the machines of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from megarl.config.base import (
    FRACTION,
    LARGEST_FLOAT,
    NOT_NEGATIVE,
    POSITIVE,
    TIMEOUT,
    Bounds,
    Choices,
    Options,
    OptionsOf,
    SeamConfig,
    free,
)
from megarl.config.errors import raise_if_any
from megarl.utils.importing import load_object, option_problems

RECORD_DIR = "record"
Positive = Annotated[int, Gt(0)]
NotNegative = Annotated[int, Ge(0)]
TRAIN = "train"  # what a replay without servers runs


@dataclass(kw_only=True)
class TrainerConfig(SeamConfig):
    """Names the training loop, and says which process runs it."""

    mode: Annotated[str, Choices("spmd", "controller")] = "spmd"
    """spmd: every trainer process runs the loop; controller: one process runs it, and calls the
    trainer processes, which it starts"""
    workers: Annotated[int, POSITIVE] | None = None
    """trainer processes that a controller starts; null is the fewest that fit the layout"""
    scheduler: Annotated[str, Choices("local", "ray", "slurm")] = "local"
    """where a controller starts its workers: local: on its machine; ray: on a Ray cluster; slurm:
    in the Slurm allocation around it"""


@dataclass(kw_only=True)
class FrequencyConfig:
    """Says when something happens; each of the three that is set makes it happen."""

    freq_epochs: Annotated[int, POSITIVE] | None = None
    """every n epochs"""
    freq_steps: Annotated[int, POSITIVE] | None = None
    """every n steps"""
    freq_secs: Annotated[float, POSITIVE] | None = None
    """every n seconds"""


@dataclass(kw_only=True)
class SaverConfig(FrequencyConfig):
    """Configures which HF saves are made and kept."""

    keep_last: Annotated[int, Bounds(ge=0, note="0 keeps all")] = 0
    """newest HF saves to keep; 0 keeps all"""
    keep_best: Annotated[int, NOT_NEGATIVE] = 0
    """more saves to keep: the best by `metric`"""
    metric: str = "eval/accuracy"
    """the metric of stats.jsonl for keep_best; with a minus before it, as in -eval/loss, a smaller
    one is better"""
    final: bool = True
    """save the final model as <run>/final"""


@dataclass(kw_only=True)
class RecoverConfig(FrequencyConfig):
    """Configures checkpoints, and how a run continues after an end or a failure."""

    mode: Annotated[str, Choices("auto", "disabled")] = "auto"
    """auto: save checkpoints, and continue from the newest at a start; disabled: neither, and
    refuse a run directory that holds a run"""
    freq_secs: Annotated[float, POSITIVE] | None = 1800.0
    keep_last: Annotated[int, Bounds(gt=0, note="mode=disabled keeps none")] = 2
    """checkpoints to keep (at least 1); keep 2 to survive a damaged one"""
    async_save: bool = True
    """a step waits only for the copy of the state to host memory; a thread writes it during the
    next steps"""
    answers_secs: Annotated[float, POSITIVE] | None = 600.0
    """save unfinished answers every n seconds while the run waits for a batch; null saves only
    those of checkpoints"""
    grace: Annotated[float, TIMEOUT] = 30.0
    """seconds a launcher gives the trainers after SIGINT or SIGTERM to finish the step, save a
    checkpoint and end"""
    restarts: Annotated[int, Bounds(ge=0, note="0 never starts again")] = 0
    """times that a launcher starts a failed run again, to continue"""


@dataclass(kw_only=True)
class SelfCheckConfig:
    """Says what follows when one of the run's self checks fails (`self_check`).

    on_failure: if a check of the first step after a start fails (ratio not 1, KL not 0, actor and
        reference differ): "stop", or only "warn"; "off" (or False) checks nothing.
    on_nonfinite: if loss or gradient is NaN or Inf: "stop" the run, or "skip" the update; saves the
        batch.
    max_skips: with on_nonfinite="skip", stops after this many skips in a row.
    """

    # YAML reads off as False
    on_failure: Literal["stop", "warn", "off", False] = "stop"
    on_nonfinite: Literal["stop", "skip"] = "skip"
    max_skips: Positive = 5


@dataclass(kw_only=True)
class ProfilerConfig:
    """Configures traces of some steps, and the peak of hardware utilisation (`profiler`).

    start_step: first step of the run to trace with torch's profiler; a start beyond it traces its
        own first steps; None is never.
    steps: traces so many steps.
    ranks: traces these trainer processes.
    phases: traces only these phases of a step, each in its own file: logp, ref, values, train, ...
        (as in timing/<phase>_s); [] is whole steps.
    options: more options of torch.profiler.profile: profile_memory (allocations, too), with_stack
        (Python call stacks, which make files several times larger), ...
    peak_tflops: peak TFLOP/s of a device, for perf/mfu; None takes that of common GPUs at 16 bits;
        other devices have no perf/mfu.
    """

    start_step: Annotated[int, Ge(1)] | None = None
    steps: Positive = 1
    ranks: Sequence[NotNegative] = (0,)
    phases: Sequence[str] = ()
    options: Mapping[str, Any] = free()
    peak_tflops: Annotated[float, Gt(0), Le(LARGEST_FLOAT)] | None = None
    GONE: ClassVar = dict.fromkeys(("memory", "stacks"), "set profile_memory/with_stack in options")

    def __post_init__(self) -> None:
        if self.options:
            profile = load_object("torch.profiler:profile", what="profiler.options")
            raise_if_any(option_problems(profile, self.options, key="profiler.options"))


@dataclass(kw_only=True)
class EvaluatorConfig(FrequencyConfig):
    """Says when the model is evaluated, and on how many rows."""

    at_start: bool = True
    """evaluate before the first step"""
    at_end: bool = True
    """evaluate after the last step"""
    max_failed: Annotated[float, FRACTION] = 0.1
    """largest share of an evaluation's answers that may fail (eval/failed); with more, its other
    metrics are NaN"""
    overlap: Annotated[str, Choices("drop", "refuse", "keep")] = "drop"
    """validation rows whose prompt is also in the training data: leave them out and log how
    many, refuse to start, or keep them"""


@dataclass(kw_only=True)
class WandbConfig:
    """Configures logging to Weights & Biases (`stats_logger.wandb`).

    mode: wandb's mode.
    options: more options of wandb.init: entity, group, tags, ..., and project, else
        experiment_name.
    completions: shows so many completions of every training batch and every evaluation, one for a
        prompt, as tables completions/train and completions/eval.
    """

    mode: Literal["disabled", "offline", "online"] = "disabled"
    options: Mapping[str, Any] = free()
    completions: NotNegative = 0
    GONE: ClassVar = dict.fromkeys(("project", "entity"), "set it in stats_logger.wandb.options")


@dataclass(kw_only=True)
class StatsLoggerConfig:
    """Says where metrics go besides stats.jsonl, which is always written."""

    wandb: Annotated[Options, OptionsOf("megarl.config.run:WandbConfig")] = free()
    """Weights & Biases: mode (disabled, offline, online), options of wandb.init (entity, group,
    tags, ..., and project, else experiment_name), completions (show so many of every training batch
    and every evaluation)"""
    tensorboard: bool = False
    """write tensorboard events into <run>/tensorboard"""
    tracker: SeamConfig = field(default_factory=SeamConfig)
    """a tracker of your own, which gets the configuration once and the metrics of every step"""
    metrics_port: Annotated[int, Bounds(ge=1, le=65535)] | None = None
    """serve the metrics in Prometheus' text form at http://127.0.0.1:<port>/metrics of the process
    that logs, to callers who have the job's token"""
    table: bool = False
    """print a table of every step's metrics"""
    report: bool = True
    """write <run>/report.html at the end"""


@dataclass(kw_only=True)
class PoolConfig:
    """Describes nodes of one kind."""

    n_gpus_per_node: Annotated[int, POSITIVE] = 8
    """GPUs of a node; without GPUs, processes"""
    sbatch_args: list[str] = field(default_factory=list)
    """arguments of sbatch for these nodes, like [--partition=gpu,--time=240,--qos=high]; pools have
    --time and --no-requeue from cluster.sbatch_args. Without others the job saves 300 seconds
    before its time limit (--signal=B:USR1@300), is queued again (--requeue), and has whole nodes
    (--exclusive, --mem=0)"""
    ray_resources: dict[str, float] = free()
    """what to request from Ray on each node besides GPUs and CPUs, by name, like
    {accelerator_type:H100: 0.001}"""


@dataclass(kw_only=True)
class RewardPoolConfig:
    """Describes nodes without GPUs that compute rewards (`cluster.reward_pool`).

    n_nodes: nodes, each with rollout.reward_workers processes.
    sbatch_args: as cluster.sbatch_args, for these nodes.
    """

    n_nodes: Positive = 1
    sbatch_args: Sequence[str] = ()
    GONE: ClassVar = {"restarts": "leave it out: a reward worker is started again three times"}


@dataclass(kw_only=True)
class ClusterConfig(PoolConfig):
    """Describes the nodes that a cluster's launchers use: those of the trainers, and of the servers
    where these have no pool of their own."""

    n_nodes: Annotated[int, POSITIVE] | None = None
    """nodes of the job; null is as many as its processes need"""
    server_pool: PoolConfig | None = None
    """nodes of another kind for the servers; null puts them on nodes like the others"""
    reward_pool: Annotated[Options | None, OptionsOf("megarl.config.run:RewardPoolConfig")] = None
    """nodes without GPUs for rewards: n_nodes (1, each with rollout.reward_workers processes),
    sbatch_args; null computes them beside rank 0"""
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


@dataclass(kw_only=True)
class EpisodesConfig:
    """Says which episodes of training are kept in <run>/episodes (`episodes`).

    keep: records the first n groups of every step, token by token, and as many that were rejected
        because something failed; 0 is off, None all.
    entropy: records the entropy of every token, too: actor.recompute_logprob's pass computes it.
    """

    keep: NotNegative | None = 16
    entropy: bool = False


@dataclass(kw_only=True)
class RecordConfig:
    """Says what is kept of every step in <run>/record (`record`).

    fingerprints: records a hash and a norm of every tensor of each phase of a step, for megarl
        diff.
    servers: with fingerprints, also of the servers' weights, which costs each server a pass over
        its weights.
    keep: keeps the batches of the newest n steps, for megarl replay; 0 is off, None all.
    """

    fingerprints: bool = True
    servers: bool = False
    keep: NotNegative | None = 0
    GONE: ClassVar = {"steps": "set keep to the steps that matter, or to null for all batches"}


@dataclass(kw_only=True)
class ReplayConfig:
    """Says which step of an earlier run is run again (`replay`, which megarl replay sets).

    run: directory of the recorded run.
    step: the last step to run, counted from 1.
    what: "train": on the recorded batches, without servers; "rollout": generates the batch of the
        step and stops; "whole": both, for every step.
    """

    run: str
    step: Positive = 1
    what: Literal["train", "rollout", "whole"] = "whole"


def batch_path(run_dir: Path, step: int) -> Path:
    """Returns the file of a step's batch."""
    return run_dir / RECORD_DIR / "batches" / f"step_{step:06d}.safetensors"


def recorded_steps(run_dir: Path) -> list[int]:
    """Returns the steps whose batches are on disk, ascending."""
    files = batch_path(run_dir, 0).parent.glob("step_*.safetensors")
    names = (path.stem.removeprefix("step_") for path in files)
    return sorted(int(name) for name in names if name.isdecimal())
