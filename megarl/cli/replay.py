"""Runs a step of a run again, and says whether it does the same, bit by bit.

The replay begins at the newest whole checkpoint before the step, or at step 1 where there is none,
makes the steps from there, and compares the fingerprints of each (megarl diff). RUN is only read.
Keys change the configuration, to see what a change does. The exit status is 0 where all is equal, 1
where something differs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from megarl.cli import RUN, CommandParser, free_path, positive
from megarl.cli.diff import SHOWN, diff, recorded
from megarl.config.earlier_run import CONFIG_FILE, RECOVER_DIR, Checkpoint, checkpoints
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.config.recipes import GRPOConfig
from megarl.config.run import TRAIN, batch_path, recorded_steps

GRAPH_TRAINER = "megarl.graph_trainer:GraphTrainer"
# of a replay, which leaves nothing behind but fingerprints
QUIET = (
    "recover.mode=auto",
    "recover.restarts=0",
    "record.fingerprints=true",
    "record.keep=0",
    "stats_logger.wandb.mode=disabled",
    "stats_logger.tensorboard=false",
    "stats_logger.tracker.type=",
    "stats_logger.metrics_port=null",
    "stats_logger.report=false",
    "stats_logger.table=false",
    "profiler.start_step=null",
    "rollout.addresses=[]",
    "trainer.mode=spmd",  # which computes the same
    "trainer.workers=null",
    "trainer.scheduler=local",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Replays the step that `argv` names; returns 0 where all is equal, 1 where something differs,
    the launcher's status where it fails. Raises ConfigError for what cannot be replayed."""
    parser = CommandParser("replay", __doc__)
    parser.path("RUN", RUN)
    parser.add_argument("--step", type=positive, required=True, help="the step, counted from 1")
    parser.switch("train-only", "train on the recorded batches (record.keep), without servers")
    parser.switch("rollout-only", "generate the batch of the step, and do not train on it")
    parser.option("nproc", positive, "trainer processes (as many as RUN had)")
    parser.option("out", Path, "directory of the replay (RUN/replay/step_000123, or the next)")
    parser.switch("print", "make that directory and print the arguments for another launcher")
    parser.keys()
    args = parser.read(argv)
    run, step = args.run, args.step
    if args.train_only and args.rollout_only:
        parser.error("--train-only, --rollout-only: give one of them, or none for both")
    what = TRAIN if args.train_only else "rollout" if args.rollout_only else "whole"
    if not (run / CONFIG_FILE).is_file():
        raise ConfigError(f"{run}: no {CONFIG_FILE}, so it is no run directory")
    cfg = load_config(run / CONFIG_FILE, args.keys)
    begin = last_checkpoint(run, step)
    first = 1 + (begin.step if begin else 0)
    if what == TRAIN:
        check_batches(run, first, step)
    nproc = args.nproc or recorded(run).start.get("world_size", 1)
    out = (args.out or free_path(run / "replay" / f"step_{step:06d}", "_")).absolute()
    if out.exists():
        raise ConfigError(f"--out {args.out}: it exists; name another, or remove it")
    if begin is not None:
        link_tree(begin.path, out / RECOVER_DIR / begin.path.name)
    arguments = [
        *("--config", str(run / CONFIG_FILE), "--nproc", str(nproc)),
        *QUIET,
        # GraphTrainer needs a controller; the recipe's own trainer computes the same
        *(["trainer.type="] if cfg.trainer.type == GRAPH_TRAINER else []),
        f"fileroot={out.parent.parent}",
        f"experiment_name={out.parent.name}",
        f"trial_name={out.name}",
        f"replay.run={run}",
        f"replay.step={step}",
        f"replay.what={what}",
        *args.keys,
    ]
    if args.print:
        print(*arguments)
        return 0
    gconfig = cfg.gconfig if isinstance(cfg, GRPOConfig) and what != TRAIN else None
    if gconfig is not None and gconfig.seed is None and not gconfig.greedy:
        print("gconfig.seed=null: rollouts will differ; --train-only takes the recorded batches")
    from megarl.launcher.local import main as launch  # here, so that --help is instant

    if (status := launch(arguments)) != 0:
        return status
    return diff(run, out, steps=(first, step), shown=SHOWN)


def last_checkpoint(run: Path, step: int) -> Checkpoint | None:
    """Returns the newest whole checkpoint before `step`; None where there is none."""
    whole, _ = checkpoints(run)
    return next((c for c in reversed(whole) if c.step < step), None)


def check_batches(run: Path, first: int, step: int) -> None:
    """Raises ConfigError where a batch of the steps from `first` to `step` is not on disk."""
    have = recorded_steps(run)
    missing = [s for s in range(first, step + 1) if s not in have]
    if missing:
        there = f"steps {', '.join(map(str, have))} are recorded" if have else "none is recorded"
        why = f"the batch of step {missing[0]} is not in {batch_path(run, step).parent} ({there})"
        fix = "set record.keep to at least the steps between two checkpoints"
        raise ConfigError(f"--step {step}: the replay begins at step {first}, and {why}; {fix}")


def link_tree(source: Path, target: Path) -> None:
    """Makes a copy of a checkpoint that takes no room: its files are the same, where links can be
    made."""
    try:
        shutil.copytree(source, target, copy_function=os.link)
    except (OSError, shutil.Error):  # another file system
        shutil.copytree(source, target, dirs_exist_ok=True)
