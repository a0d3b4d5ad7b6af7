"""Runs a step of a run again, and says whether it does the same, bit by bit.

    megarl replay RUN --step N [--train-only | --rollout-only] [key=value ...]

    RUN             a run directory, <fileroot>/<experiment_name>/<trial_name>
    --step          the step, counted from 1
    --train-only    train on the recorded batches (record.keep, record.steps); starts no servers
    --rollout-only  generate the batch of the step, and do not train on it
    --nproc         trainer processes (as many as RUN had)
    --out           the directory of the replay (RUN/replay/step_000123, or the next that is free)
    --print         make that directory, print the configuration of the replay and stop: another
                    launcher, on several nodes, can run it

The replay begins at the newest whole checkpoint before the step, or at step 1 where there is none,
makes the steps from there, and compares the fingerprints of each (megarl diff). RUN is only read.
Keys change the configuration, to see what a change does. The exit status is 0 where all is equal, 1
where something differs.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megarl.cli import main as command_line
from megarl.cli.diff import SHOWN, diff, recorded
from megarl.config.command_line import CommandLine, help_or_command_line
from megarl.config.earlier_run import CONFIG_FILE, RECOVER_DIR, Checkpoint, checkpoints
from megarl.config.errors import ConfigError
from megarl.config.record import ROLLOUT, TRAIN, WHOLE, batch_path, recorded_steps

USAGE = "megarl replay RUN --step N"
SWITCHES = {"train-only": TRAIN, "rollout-only": ROLLOUT}
# of a replay, which leaves nothing behind but fingerprints
GRAPH_TRAINER = "megarl.graph_trainer:GraphTrainer"
QUIET = (
    "recover.mode=auto",
    "recover.restarts=0",
    "record.fingerprints=true",
    "record.keep=0",
    "record.steps=[]",
    "stats_logger.wandb.mode=disabled",
    "stats_logger.tensorboard=false",
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
    options, switches = ("step", "nproc", "out"), (*SWITCHES, "print")
    command = help_or_command_line(argv, __doc__ or "", options=options, switches=switches)
    if command is None:
        return 0
    if len(command.words) != 1 or "step" not in command.options:
        raise ConfigError([f"give one run directory and a step: {USAGE}"])
    run, step, what = Path(command.words[0]), _number(command, "step"), _what(command)
    if not (run / CONFIG_FILE).is_file():
        raise ConfigError([f"{run}: no {CONFIG_FILE}, so it is no run directory"])
    nproc = _number(command, "nproc") or recorded(run).start.get("world_size", 1)
    begin = last_checkpoint(run, step)
    check_batches(run, 1 + (begin.step if begin else 0), step, what)
    out = out_directory(run, step, command.options.get("out"))
    if begin is not None:
        link_tree(begin.path, out / RECOVER_DIR / begin.path.name)
    where = [f"fileroot={out.parent.parent}", f"experiment_name={out.parent.name}"]
    where += [f"trial_name={out.name}"]
    which = [f"replay.run={run}", f"replay.step={step}", f"replay.what={what}"]
    arguments = ["--config", str(run / CONFIG_FILE), "--nproc", str(nproc)]
    arguments += [*QUIET, *_trainer(run), *where, *which, *command.overrides]
    if "print" in command.switches:
        print(*arguments)
        return 0
    if what != TRAIN and _unseeded(run):
        print(
            "gconfig.seed is null: rollouts will differ from the run's; --train-only takes the "
            "recorded batches"
        )
    from megarl.launcher.local import main as launch  # here, so that --help is instant

    if (status := launch(arguments)) != 0:
        return status
    first = 1 + (begin.step if begin else 0)
    status = diff(run, out, steps=(first, step), shown=SHOWN)
    if status and what != TRAIN:
        print(
            "if the rollouts differ: docs/troubleshooting.md says when sampling can be repeated; "
            "--train-only takes the recorded batches"
        )
    return status


def _section(run: Path, name: str) -> dict[str, Any]:
    """Returns a section of the run's configuration, {} where it has none."""
    tree = yaml.safe_load((run / CONFIG_FILE).read_text(encoding="utf-8"))
    section = tree.get(name) if isinstance(tree, dict) else None
    return section if isinstance(section, dict) else {}


def _unseeded(run: Path) -> bool:
    """Returns whether the run's answers were sampled without a seed."""
    gconfig = _section(run, "gconfig")
    return bool(gconfig) and gconfig.get("seed") is None and not gconfig.get("greedy")


def _trainer(run: Path) -> list[str]:
    """Returns what puts the recipe's own trainer in the place of GraphTrainer, which runs under a
    controller alone and computes the same."""
    return ["trainer.type="] if _section(run, "trainer").get("type") == GRAPH_TRAINER else []


def last_checkpoint(run: Path, step: int) -> Checkpoint | None:
    """Returns the newest whole checkpoint before `step`; None where there is none."""
    whole, _ = checkpoints(run)
    return next((c for c in reversed(whole) if c.step < step), None)


def check_batches(run: Path, first: int, step: int, what: str) -> None:
    """Raises ConfigError where a batch that the replay trains on is not on disk."""
    have = recorded_steps(run)
    missing = [s for s in range(first, step + 1) if s not in have]
    if what == TRAIN and missing:
        known = f"steps {', '.join(map(str, have))} are recorded" if have else "none is recorded"
        raise ConfigError(
            [
                f"--step {step}: the replay begins at step {first}, and the batch of step "
                f"{missing[0]} is not in {batch_path(run, step).parent} ({known}); set record.keep "
                "to at least the steps between two checkpoints"
            ]
        )


def out_directory(run: Path, step: int, given: str | None) -> Path:
    """Returns a directory that does not exist yet. Raises ConfigError where `given` does."""
    if given is not None:
        if Path(given).exists():
            raise ConfigError([f"--out {given}: it exists; name another, or remove it"])
        return Path(given).absolute()
    base, n = run.absolute() / "replay" / f"step_{step:06d}", 2
    out = base
    while out.exists():
        out, n = base.with_name(f"{base.name}_{n}"), n + 1
    return out


def link_tree(source: Path, target: Path) -> None:
    """Makes a copy of a checkpoint that takes no room: its files are the same, where links can be
    made."""
    try:
        shutil.copytree(source, target, copy_function=os.link)
    except (OSError, shutil.Error):  # another file system
        shutil.copytree(source, target, dirs_exist_ok=True)


def _what(command: CommandLine) -> str:
    chosen = [what for switch, what in SWITCHES.items() if switch in command.switches]
    if len(chosen) > 1:
        raise ConfigError(["--train-only, --rollout-only: give one of them, or none for both"])
    return chosen[0] if chosen else WHOLE


def _number(command: CommandLine, name: str) -> int:
    """Returns the number of an option, 0 where it is not given. Raises ConfigError for others."""
    value = command.options.get(name, "0")
    if name in command.options and not (value.isdecimal() and int(value)):
        raise ConfigError([f"--{name} {value}: use a whole number of at least 1"])
    return int(value)


if __name__ == "__main__":
    sys.exit(command_line(["replay", *sys.argv[1:]]))
