"""Reads what stands behind `megarl NAME`, with argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from megarl.config.errors import ConfigError

RUN = "the run's directory, <fileroot>/<experiment_name>/<trial_name>"


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
        raise ConfigError([f"{message}; {' '.join(self.format_usage().split())}"])

    def path(self, name: str, text: str) -> None:
        """Adds a path that has to be given, `name` in upper case."""
        self.add_argument(name.lower(), metavar=name, type=Path, help=text)

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
        """Returns the values in `argv` (None: this process's); options may stand anywhere."""
        return self.parse_intermixed_args(argv)


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
