"""The command `megarl`: one word for each thing to do, `megarl NAME --help` for how.

A command is a module with `main(argv) -> exit status`; it is imported when it is asked for, so that
`megarl --help` is instant.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megarl.config.errors import EXIT_CODE, ConfigError
from megarl.utils.stacks import prepare_signals

if TYPE_CHECKING:
    from megarl.config.recipes import BaseConfig

RUN = "the run's directory, <fileroot>/<experiment_name>/<trial_name>"
# they read files that somebody else may have written, or a full disk cut short
READERS = ("report", "status", "view", "trace", "diff")
# the module of each command, and what it does
COMMANDS = {
    "init": ("megarl.cli.init", "write a configuration for your model, data and reward"),
    "from-verl": ("megarl.cli.from_verl", "write a configuration for a recipe of verl's"),
    "from-areal": ("megarl.cli.from_areal", "write a configuration for one of AReaL's"),
    "run": ("megarl.run", "run a recipe: one trainer process of a job"),
    "launch": ("megarl.launcher.local", "start servers and trainers on this machine"),
    "data": ("megarl.cli.data", "show rows of data as the model reads them"),
    "eval": ("megarl.cli.evaluate", "measure a model on data sets"),
    "rehearse": ("megarl.cli.rehearse", "run a cluster's recipe small, on this machine"),
    "doctor": ("megarl.cli.doctor", "look whether hosts are ready for a recipe"),
    "status": ("megarl.cli.status", "say how a run is doing"),
    "view": ("megarl.cli.view", "show the episodes of a run, in one HTML file"),
    "gap": ("megarl.cli.gap", "name the layer where trainer and server part"),
    "report": ("megarl.cli.report", "write the report of runs, or serve it while they go on"),
    "diff": ("megarl.cli.diff", "name the first step and tensor in which two runs differ"),
    "replay": ("megarl.cli.replay", "run a step of a run again, and compare the bits"),
    "trace": ("megarl.cli.trace", "make one Chrome trace of a run"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (None: this process's) and returns the exit status: the
    command's, 2 for a wrong command line or configuration."""
    name, *rest = list(sys.argv[1:] if argv is None else argv) or [""]
    if name in ("", "-h", "--help", "help"):
        print("usage: megarl COMMAND ...   (megarl COMMAND --help says how)\n")
        print("\n".join(f"  {name:12}{about}" for name, (_, about) in COMMANDS.items()))
        return 0 if name else EXIT_CODE
    if name not in COMMANDS:
        from megarl.utils.importing import meant  # here and below: `megarl --help` is instant

        run = f"a command comes first; to train, megarl run {name} ..."
        hint = run if name.startswith("--") else meant(name, list(COMMANDS))
        print(f"megarl: {name}: no such command; {hint}", file=sys.stderr)
        return EXIT_CODE
    sys.argv[0] = f"megarl {name}"
    prepare_signals()
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
        frames = traceback.extract_tb(e.__traceback__)
        ours = [f for f in frames if f.filename.startswith(str(Path(__file__).parents[1]))]
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
        what = f"{type(e).__name__}: {' '.join(str(e).split())}"
        print(f"megarl {name}: the run directory cannot be read ({where}): {what}", file=sys.stderr)
        return EXIT_CODE


class CommandParser(argparse.ArgumentParser):
    """Parses the words of a command. --help shows `text`, the docstring of the command's module; a
    wrong command line raises ConfigError."""

    def __init__(self, name: str, text: str | None) -> None:
        super().__init__(
            prog=f"megarl {name}",
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError with `message` and the usage."""
        raise ConfigError(f"{message}; {' '.join(self.format_usage().split())}")

    def path(self, name: str, text: str, **how: Any) -> None:
        """Adds a path that has to be given, `name` in upper case. how: more of add_argument."""
        self.add_argument(name.lower(), metavar=name, type=Path, help=text, **how)

    def keys(self) -> None:
        """Adds `keys`, words of the form key=value."""
        text = "changes of the configuration"
        self.add_argument("keys", metavar="key=value", type=_key, nargs="*", default=[], help=text)

    def option(self, name: str, kind: Callable[[str], Any], text: str, default: Any = None) -> None:
        """Adds --name VALUE, of which `kind` makes the value."""
        self.add_argument(f"--{name}", type=kind, help=text, default=default)

    def switch(self, name: str, text: str) -> None:
        """Adds --name, which is True where it is given."""
        self.add_argument(f"--{name}", action="store_true", help=text)

    def read(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Returns the values in `argv` (None: this process's); options may stand anywhere. Modules
        of the working directory can be imported from then on."""
        args = self.parse_intermixed_args(argv)
        from megarl.utils.importing import add_working_directory  # `megarl --help` is instant

        add_working_directory()
        return args

    def recipe(self, argv: Sequence[str] | None) -> tuple[argparse.Namespace, BaseConfig]:
        """Adds CONFIG and `keys`; returns the values in `argv`, and the configuration that they
        name."""
        from megarl.config.loader import load_config  # here, so that `megarl --help` is instant

        self.path("CONFIG", "the recipe's YAML file")
        self.keys()
        args = self.read(argv)
        return args, load_config(args.config, args.keys)


def positive(text: str) -> int:
    """Returns the whole number of an option, at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: use a whole number of at least 1")
    return int(text)


def step_range(text: str) -> tuple[int, int]:
    """Returns the first and the last step that "10-12" or "7" names, counted from 1."""
    first, dash, last = text.partition("-")
    last = last if dash else first
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
        why = f"{text}: give the first and the last step, such as 10-12"
        raise argparse.ArgumentTypeError(why)
    return int(first), int(last)


def free_path(base: Path, sign: str) -> Path:
    """Returns `base`, or where it exists the first of BASE-2, BASE-3, ... that does not, with
    `sign` for the dash."""
    if not base.exists():
        return base
    others = (base.with_name(f"{base.name}{sign}{n}") for n in count(2))
    return next(path for path in others if not path.exists())


def _key(text: str) -> str:
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"{text}: give key=value")
    return text
