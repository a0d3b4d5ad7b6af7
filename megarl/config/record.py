"""Configures the records of a run: of episodes, which `megarl view` shows, and of steps, which
`megarl diff` compares and `megarl replay` runs again."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from megarl.config.base import OFF_AT_ZERO, POSITIVE, Choices

RECORD_DIR = "record"
TRAIN, ROLLOUT, WHOLE = "train", "rollout", "whole"  # what a replay runs


@dataclass(kw_only=True)
class EpisodesConfig:
    """Says which episodes of training are kept in <run>/episodes."""

    keep: Annotated[int, OFF_AT_ZERO] | None = 16
    """record the first n groups of every step, token by token, and as many that were rejected
    because something failed; 0 is off, null all"""
    entropy: bool = False
    """record the entropy of every token, too: actor.recompute_logprob's pass computes it"""


@dataclass(kw_only=True)
class RecordConfig:
    """Says what is kept of every step in <run>/record."""

    fingerprints: bool = True
    """record a hash and a norm of every tensor of each phase of a step, for megarl diff"""
    servers: bool = False
    """with fingerprints: also of the servers' weights, which costs each server a pass over its
    weights"""
    keep: Annotated[int, OFF_AT_ZERO] | None = 0
    """keep the batches of the newest n steps, for megarl replay; 0 is off, null all"""
    steps: list[int] = field(default_factory=list)
    """keep the batches of these steps, counted from 1, in any case"""


@dataclass(kw_only=True)
class ReplayConfig:
    """Says which step of an earlier run is run again."""

    run: str = ""
    """directory of the recorded run"""
    step: Annotated[int, POSITIVE] = 1
    """the last step to run, counted from 1"""
    what: Annotated[str, Choices(TRAIN, ROLLOUT, WHOLE)] = WHOLE
    """train: on the recorded batches, without servers; rollout: generate the batch of the step
    and stop; whole: both, for every step"""


def batch_path(run_dir: Path, step: int) -> Path:
    """Returns the file of a step's batch."""
    return run_dir / RECORD_DIR / "batches" / f"step_{step:06d}.safetensors"


def recorded_steps(run_dir: Path) -> list[int]:
    """Returns the steps whose batches are on disk, ascending."""
    files = batch_path(run_dir, 0).parent.glob("step_*.safetensors")
    names = (path.stem.removeprefix("step_") for path in files)
    return sorted(int(name) for name in names if name.isdecimal())
