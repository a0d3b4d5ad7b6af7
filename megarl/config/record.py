"""Configures the record of steps, which `megarl diff` compares and `megarl replay` runs again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megarl.config.base import arg
from megarl.config.bounds import OFF_AT_ZERO, POSITIVE

RECORD_DIR = "record"
TRAIN, ROLLOUT, WHOLE = "train", "rollout", "whole"  # what a replay runs


@dataclass(kw_only=True)
class RecordConfig:
    """Says what is kept of every step in <run>/record."""

    fingerprints: bool = arg(
        True,
        help="record a hash and a norm of every tensor of each phase of a step, for megarl diff",
    )
    weights_every: int = arg(
        1, bounds=POSITIVE, help="with fingerprints: those of the weights after every n-th step"
    )
    servers: bool = arg(
        False,
        help="with fingerprints: those of the weights that servers hold, too, which costs each of "
        "them a pass over its weights",
    )
    keep: int | None = arg(
        0,
        bounds=OFF_AT_ZERO,
        help="keep the batches of the newest n steps, for megarl replay; 0 is off, null all",
    )
    steps: list[int] = arg(
        factory=list, help="keep the batches of these steps, counted from 1, in any case"
    )


@dataclass(kw_only=True)
class ReplayConfig:
    """Says which step of an earlier run is run again."""

    run: str = arg("", help="the directory of that run")
    step: int = arg(1, bounds=POSITIVE, help="the last step to run, counted from 1")
    what: str = arg(
        WHOLE,
        help="train: on the recorded batches, without servers; rollout: generate the batch of the "
        "step and stop; whole: both, for every step",
        choices=(TRAIN, ROLLOUT, WHOLE),
    )


def batch_path(run_dir: Path, step: int) -> Path:
    """Returns the file of a step's batch."""
    return run_dir / RECORD_DIR / "batches" / f"step_{step:06d}.safetensors"


def recorded_steps(run_dir: Path) -> list[int]:
    """Returns the steps whose batches are on disk, ascending."""
    files = batch_path(run_dir, 0).parent.glob("step_*.safetensors")
    names = (path.stem.removeprefix("step_") for path in files)
    return sorted(int(name) for name in names if name.isdecimal())
