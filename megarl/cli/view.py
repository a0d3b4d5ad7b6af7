"""Writes one HTML file that shows the episodes of a run; it may be running, over, or killed.

    megarl view RUN [--out FILE] [--steps A-B] [--groups N] [--mib N]

    RUN        the run's directory, <fileroot>/<experiment_name>/<trial_name>
    --out      the file to write (RUN/episodes.html)
    --steps    only these steps, such as 10-12 or 7
    --groups   details of so many groups of a step: those with failures, then those whose rewards
               differ most (all that are recorded)
    --mib      the most MiB of details in the file (32); those of the newest steps come first

The file needs no network and no server. Lists cover all groups that were recorded (episodes.keep),
whether their details fit or not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megarl.cli import main as command_line
from megarl.config.command_line import help_or_command_line, step_range
from megarl.config.errors import ConfigError
from megarl.utils.disk import human

MIB = 1 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page about the run that `argv` names and returns 0. Raises ConfigError for a wrong
    command line or a run without episodes."""
    options = ("out", "steps", "groups", "mib")
    command = help_or_command_line(argv, __doc__ or "", options=options)
    if command is None:
        return 0
    if len(command.words) != 1 or command.overrides:
        raise ConfigError(["give one run directory: megarl view RUN"])
    run, given = Path(command.words[0]), command.options
    groups, mib = _number(given, "groups"), _number(given, "mib") or 32
    steps = step_range(given["steps"]) if "steps" in given else None
    out = Path(given.get("out", run / "episodes.html"))
    from megarl.observability.viewer import write_viewer  # here, so that --help is instant

    found = write_viewer(run, out, steps=steps, groups=groups, max_bytes=mib * MIB)
    if found is None:
        which = "" if steps is None else f" of steps {given['steps']}"
        why = "no step has begun, it ran with episodes.keep=0, or it is no RL run"
        raise ConfigError([f"{run / 'episodes'}: no episodes{which}; {why}"])
    print(
        f"{out}: {found.groups} groups of {found.steps} steps, {found.detailed} with details, "
        f"{human(found.size)}"
    )
    per_token = found.recorded_bytes / max(1, found.recorded_tokens)
    print(f"on disk: {human(found.recorded_bytes)}, {per_token:.1f} bytes a token", end="")
    if found.step_seconds:
        share = 100 * found.seconds / found.step_seconds
        print(f"; packing took {share:.2g} % of the steps' time, in a thread beside them", end="")
    print()
    return 0


def _number(options: dict[str, str], name: str) -> int | None:
    value = options.get(name)
    if value is not None and not (value.isdecimal() and int(value)):
        raise ConfigError([f"--{name} {value}: use a whole number of at least 1"])
    return None if value is None else int(value)


if __name__ == "__main__":
    sys.exit(command_line(["view", *sys.argv[1:]]))
