"""Configures the work around the training loop: saving, evaluating, checking, logging."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.base import SeamConfig, arg
from megarl.config.bounds import FRACTION, NOT_NEGATIVE, POSITIVE, TIMEOUT, Bounds


@dataclass(kw_only=True)
class TrainerConfig(SeamConfig):
    """Names the training loop, and says which process runs it."""

    mode: str = arg(
        "spmd",
        help="spmd: every trainer process runs the loop; controller: one process runs it, and "
        "calls the trainer processes, which it starts",
        choices=("spmd", "controller"),
    )
    workers: int | None = arg(
        None,
        bounds=POSITIVE,
        help="trainer processes that a controller starts; null is as few as the layout fits",
    )
    scheduler: str = arg(
        "local",
        help="where a controller starts them: on its own machine, on a Ray cluster, or in the "
        "Slurm allocation that it runs in",
        choices=("local", "ray", "slurm"),
    )


@dataclass(kw_only=True)
class FrequencyConfig:
    """Says when something happens; each of the three that is set makes it happen."""

    freq_epochs: int | None = arg(None, bounds=POSITIVE, help="every n epochs")
    freq_steps: int | None = arg(None, bounds=POSITIVE, help="every n steps")
    freq_secs: float | None = arg(None, bounds=POSITIVE, help="every n seconds")


@dataclass(kw_only=True)
class SaverConfig(FrequencyConfig):
    """Configures which HF saves are made and kept."""

    keep_last: int = arg(
        0,
        bounds=Bounds(ge=0, note="0 keeps all"),
        help="keep this many newest HF saves; 0 keeps all",
    )
    keep_best: int = arg(
        0,
        bounds=NOT_NEGATIVE,
        help="besides those, keep this many that did best by `metric` at their step",
    )
    metric: str = arg("eval/accuracy", help="the metric of stats.jsonl that keep_best goes by")
    mode: str = arg(
        "max", help="whether more or less of `metric` is better", choices=("max", "min")
    )
    final: bool = arg(True, help="save the final model as <run>/final")


@dataclass(kw_only=True)
class RecoverConfig(FrequencyConfig):
    """Configures checkpoints, and how a run continues after an end or a failure."""

    mode: str = arg(
        "auto",
        help="auto: save checkpoints and continue from the newest whole one when started again; "
        "disabled: neither, and refuse a run directory that holds a run",
        choices=("auto", "disabled"),
    )
    freq_secs: float | None = arg(1800.0, bounds=POSITIVE, help="checkpoint every n seconds")
    keep_last: int = arg(
        2,
        bounds=Bounds(gt=0, note="mode=disabled keeps none"),
        help="keep this many newest checkpoints, at least 1; with 2 a damaged one costs the steps "
        "since the one before",
    )
    async_save: bool = arg(
        True,
        help="a step waits only for the copy of the state to host memory; a thread writes it while "
        "the next steps run",
    )
    answers_secs: float | None = arg(
        600.0,
        bounds=POSITIVE,
        help="save the answers of a step under way every n seconds of waiting for them; null saves "
        "those of checkpoints only",
    )
    grace: float = arg(
        30.0,
        bounds=TIMEOUT,
        help="seconds a launcher gives the trainers after SIGINT or SIGTERM to finish the "
        "step, save a checkpoint and end",
    )
    restarts: int = arg(
        0,
        bounds=Bounds(ge=0, note="0 never starts again"),
        help="a launcher starts a run that failed again this many times, to continue",
    )


@dataclass(kw_only=True)
class SelfCheckConfig:
    """Says what follows when one of the run's self checks fails."""

    on_failure: str = arg(
        "stop",
        help="if a check of the first step after a start fails (ratio not 1, KL not 0, actor and "
        "reference apart while equal): stop, or only warn; off checks nothing",
        choices=("stop", "warn", "off"),
    )
    on_nonfinite: str = arg(
        "skip",
        help="if loss or gradient is NaN or Inf: stop the run, or skip the update; saves the batch",
        choices=("stop", "skip"),
    )
    max_skips: int = arg(
        5, bounds=POSITIVE, help="with on_nonfinite=skip: stop after this many skips in a row"
    )


@dataclass(kw_only=True)
class ProfilerConfig:
    """Configures traces of some steps, and the peak of hardware utilisation."""

    start_step: int | None = arg(
        None,
        bounds=Bounds(ge=1, note="steps count from 1"),
        help="first step of the run to trace with torch's profiler; a start beyond it traces its "
        "own first steps; null is never",
    )
    steps: int = arg(1, bounds=POSITIVE, help="trace so many steps")
    ranks: list[int] = arg(factory=lambda: [0], help="trace these trainer processes")
    phases: list[str] = arg(
        factory=list,
        help="trace only these phases of the steps, as metrics timing/<phase>_s name them, each in "
        "a file of its own: logp, ref, values, train, ...; [] is whole steps",
    )
    output_dir: str = arg(
        "profile", help="where traces go; a relative path is in the run directory"
    )
    memory: bool = arg(False, help="trace allocations too")
    timeline: bool = arg(
        True,
        help="record when phases, syncs and episodes began and ended, in <run>/timeline, for "
        "`megarl trace`; 64 MiB a process at most",
    )
    stacks: bool = arg(False, help="trace Python call stacks too; makes files several times larger")
    peak_tflops: float | None = arg(
        None,
        bounds=POSITIVE,
        help="peak TFLOP/s of a device, for perf/mfu; null takes that of common GPUs at 16 bits; "
        "other devices have no perf/mfu",
    )


@dataclass(kw_only=True)
class EvaluatorConfig(FrequencyConfig):
    """Says when the model is evaluated, and on how many rows."""

    at_start: bool = arg(True, help="evaluate before the first step")
    at_end: bool = arg(True, help="evaluate after the last step")
    max_samples: int | None = arg(
        None, bounds=POSITIVE, help="evaluate the first n rows of each validation set; null is all"
    )
    max_failed: float = arg(
        0.1,
        bounds=FRACTION,
        help="the largest part of an evaluation's answers that may fail (eval/failed); with more, "
        "its other figures are NaN, for those that are left say little of the model",
    )
    overlap: str = arg(
        "drop",
        help="validation rows whose prompt is also in the training data: leave them out and log "
        "how many, refuse to start, or keep them",
        choices=("drop", "refuse", "keep"),
    )


@dataclass(kw_only=True)
class WandbConfig:
    """Configures logging to Weights & Biases."""

    mode: str = arg("disabled", help="wandb mode", choices=("disabled", "offline", "online"))
    project: str | None = arg(None, help="project; null is experiment_name")
    entity: str | None = arg(None, help="wandb entity")
    completions: int = arg(
        0,
        bounds=NOT_NEGATIVE,
        help="show so many completions of every training batch and every evaluation, one for a "
        "prompt, as tables completions/train and completions/eval",
    )


@dataclass(kw_only=True)
class StatsLoggerConfig:
    """Says where metrics go besides stats.jsonl, which is always written."""

    wandb: WandbConfig = arg(factory=WandbConfig, help="Weights & Biases")
    tensorboard: bool = arg(False, help="write tensorboard events into <run>/tensorboard")
    table: bool = arg(True, help="print a table of every step's metrics")
    report: bool = arg(True, help="write <run>/report.html at the end")
