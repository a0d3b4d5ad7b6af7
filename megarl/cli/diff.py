"""Names the first step, phase and tensor in which two runs differ, by their recorded fingerprints.

Steps and phases that both runs recorded (record.fingerprints) are compared, bit by bit, in the
order of a step: rollout, batch (what a filter or a reward model changed of it), logp, ref, values,
advantages, the updates, weights, servers. The exit status is 0 where nothing differs, 1 where
something does, 2 where there is nothing to compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.cli import RUN, CommandParser, step_range
from megarl.config.earlier_run import configs_apart, differences
from megarl.config.errors import ConfigError
from megarl.observability.run_log import Fingerprints, compare, read_fingerprints

DIFFERENT = 1  # exit status
SHOWN = 10  # tensors, and keys of the configuration


def main(argv: Sequence[str] | None = None) -> int:
    """Compares the two runs that `argv` names; returns 0 where nothing differs, else 1. Raises
    ConfigError for a wrong command line, or runs with nothing to compare."""
    parser = CommandParser("diff", __doc__)
    parser.path("RUN_A", RUN)
    parser.path("RUN_B", RUN)
    parser.option("steps", step_range, "compare only these steps, such as 10-12 or 7")
    parser.switch("all", "show every tensor that differs in that phase, not only the first ten")
    args = parser.read(argv)
    return diff(args.run_a, args.run_b, steps=args.steps, shown=None if args.all else SHOWN)


def diff(a: Path, b: Path, *, steps: tuple[int, int] | None, shown: int | None) -> int:
    """Prints how two runs compare, and returns the exit status. Raises ConfigError where they have
    no step in common."""
    first, second = recorded(a), recorded(b)
    wanted = None if steps is None else range(steps[0], steps[1] + 1)
    comparison = compare(first, second, wanted)
    if not comparison.steps:
        only = "" if steps is None else f" of {steps[0]}-{steps[1]}"
        have = " and ".join(_steps([*run.steps]) for run in (first, second))
        raise ConfigError(f"no step{only} that both runs recorded: they have {have}")
    for name, of_first, of_second in differences(first.start, second.start):
        print(f"not the same: {name}: {of_first} | {of_second}")
    for line in _at_most(configs_apart(a, b), shown):
        print(f"configuration: {line}")
    if comparison.phase is None:
        print(f"no difference in {_steps(comparison.steps)}: {comparison.count} tensors are equal")
        return 0
    tensors = [f"{name}: {why}" for name, why in comparison.differing.items()]
    *before, step = comparison.steps
    print(f"step {step}, {comparison.phase}: {tensors[0]}")
    for line in _at_most(tensors[1:], shown):
        print(f"  also {line}")
    if comparison.equal:
        print(f"  equal in that step: {', '.join(comparison.equal)}")
    if before:
        print(f"no difference before it, in {_steps(before)}")
    return DIFFERENT


def recorded(run: Path) -> Fingerprints:
    """Returns the fingerprints of a run. Raises ConfigError where it has none."""
    try:
        return read_fingerprints(run)
    except FileNotFoundError as e:
        why = "no step has begun, it ran with record.fingerprints=false, or it is no RL run"
        raise ConfigError(f"{e.filename}: no fingerprints; {why}") from e


def _at_most(lines: list[str], shown: int | None) -> list[str]:
    more = 0 if shown is None else len(lines) - shown
    return lines if more <= 0 else [*lines[:shown], f"{more} more (--all)"]


def _steps(steps: Sequence[int]) -> str:
    if not steps:
        return "no step"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {min(steps)}-{max(steps)}"
