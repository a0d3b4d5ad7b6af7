"""The command `megarl`: one word for each thing to do, `megarl NAME --help` for how.

A command is a module with `main(argv) -> exit status`; it is imported when it is asked for, so that
`megarl --help` is instant.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from megarl.config.errors import EXIT_CODE, ConfigError
from megarl.utils.stacks import dump_on_signal

# they read files that somebody else may have written, or a full disk cut short
READERS = ("report", "status", "view", "trace", "diff")
# the module of each command, and what it does
COMMANDS = {
    "run": ("megarl.run", "run a recipe: one trainer process of a job"),
    "launch": ("megarl.launcher.local", "start servers and trainers on this machine"),
    "eval": ("megarl.cli.evaluate", "measure a model on data sets"),
    "rehearse": ("megarl.cli.rehearse", "run a cluster's recipe small, on this machine"),
    "doctor": ("megarl.cli.doctor", "look whether hosts are ready for a recipe"),
    "status": ("megarl.cli.status", "say how a run is doing"),
    "view": ("megarl.cli.view", "show the episodes of a run, in one HTML file"),
    "gap": ("megarl.cli.gap", "name the layer where trainer and server part"),
    "report": ("megarl.observability.report.__main__", "write the report of runs"),
    "diff": ("megarl.cli.diff", "name the first step and tensor in which two runs differ"),
    "replay": ("megarl.cli.replay", "run a step of a run again, and compare the bits"),
    "trace": ("megarl.cli.trace", "make one Chrome trace of a run"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (None: this process's) and returns the exit status: the
    command's, 2 for a wrong command line or configuration."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0 if words else EXIT_CODE
    name, *rest = words
    if name not in COMMANDS:
        print(f"megarl: {_unknown(name)}", file=sys.stderr)
        return EXIT_CODE
    sys.argv[0] = f"megarl {name}"
    dump_on_signal()
    try:
        with contextlib.suppress(BrokenPipeError):  # megarl ... | head
            return importlib.import_module(COMMANDS[name][0]).main(rest) or 0
        return 0
    except ConfigError as e:
        print(e.report(), file=sys.stderr)
        return EXIT_CODE
    except Exception as e:
        if name not in READERS:
            raise
        print(f"megarl {name}: {_damaged(e)}", file=sys.stderr)
        return EXIT_CODE


def _damaged(error: Exception) -> str:
    """Returns what reading a run directory met, and where megarl read it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if f"{Path(__file__).parents[1]}" in f.filename]
    where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
    what = " ".join(str(error).split())
    return f"the run directory cannot be read ({where}): {type(error).__name__}: {what}"


def help_text() -> str:
    """Returns the text of `megarl --help`."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:{width}}{about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(["usage: megarl COMMAND ...   (megarl COMMAND --help says how)", "", *lines])


def _unknown(name: str) -> str:
    if name.startswith("--"):
        return f"{name}: a command comes first; to train, megarl run {name} ..."
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
    return f"{name}: no such command; {hint}"
