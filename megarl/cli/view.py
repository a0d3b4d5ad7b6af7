"""Writes one HTML file that shows the episodes of a run; it may be running, over, or killed.

The file needs no network and no server. Lists cover all groups that were recorded (episodes.keep),
whether their details fit or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.cli import RUN, CommandParser, positive, step_range
from megarl.config.errors import ConfigError
from megarl.utils.files import human

MIB = 1 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page about the run that `argv` names and returns 0. Raises ConfigError for a wrong
    command line or a run without episodes."""
    parser = CommandParser("view", __doc__)
    parser.path("RUN", RUN)
    parser.option("out", Path, "the file to write (RUN/episodes.html)")
    parser.option("steps", step_range, "only these steps, such as 10-12 or 7")
    parser.option("groups", positive, "groups of a step with details; failures first (all)")
    parser.option("mib", positive, "most MiB of details, newest steps first (32)", 32)
    args = parser.read(argv)
    out = args.out or args.run / "episodes.html"
    from megarl.observability.viewer import write_viewer  # here, so that --help is instant

    page = write_viewer(
        args.run, out, steps=args.steps, groups=args.groups, max_bytes=args.mib * MIB
    )
    if page is None:
        which = f" of steps {args.steps[0]}-{args.steps[1]}" if args.steps else ""
        why = "no step has begun, it ran with episodes.keep=0, or it is no RL run"
        raise ConfigError(f"{args.run / 'episodes'}: no episodes{which}; {why}")
    print(
        f"{out}: {page.groups} groups of {page.steps} steps, {page.detailed} with details, "
        f"{human(page.size)}"
    )
    return 0
