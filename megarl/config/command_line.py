"""Parses command lines of the form `[word ...] [--option value] [--switch] [key=value ...]`.

Options and overrides may come in any order. A word with a / before its = is no override but a path.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from megarl.config.errors import ConfigError
from megarl.utils.importing import meant

SECTION = re.compile(r"\w+(\.\w+)*")  # the name of a section or key


@dataclass(kw_only=True)
class CommandLine:
    """Holds a parsed command line; `words` are neither options nor key=value."""

    options: dict[str, str] = field(default_factory=dict)
    switches: set[str] = field(default_factory=set)
    overrides: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)  # neither an option nor key=value


def parse_command_line(
    argv: Sequence[str], *, options: Sequence[str] = (), switches: Sequence[str] = ()
) -> CommandLine:
    """Reads `--name value` and `--name=value` for `options`, `--name` for `switches`; -h is --help.
    Raises ConfigError for an option that is not known or lacks its value."""
    line, args = CommandLine(), list(argv)
    while args:
        arg = args.pop(0)
        if arg == "-h" and "help" in switches:
            arg = "--help"
        if not arg.startswith("-"):
            key, equals, _ = arg.partition("=")
            (line.overrides if equals and "/" not in key else line.words).append(arg)
            continue
        name, equals, value = arg.removeprefix("--").partition("=")
        if name in switches and not equals:
            line.switches.add(name)
        elif name in options:
            if not equals and (not args or args[0].startswith("--")):
                raise ConfigError(f"--{name}: needs a value")
            line.options[name] = value if equals else args.pop(0)
        else:
            flags = [f"--{name}" for name in (*options, *switches)]
            fix = meant(arg, flags, "keys are key=value, options are")
            raise ConfigError(f"{arg}: unknown option; {fix}")
    return line


def help_or_command_line(
    argv: Sequence[str] | None,
    text: str,
    *,
    options: Sequence[str] = (),
    switches: Sequence[str] = (),
) -> CommandLine | None:
    """Prints `text`, or for `--help SECTION` that section's keys, and returns None where `argv`
    (None: this process's) asks for help; else returns what `parse_command_line` reads."""
    argv = list(sys.argv[1:] if argv is None else argv)
    for flag in ("--help", "-h"):
        if flag in argv:
            after = argv[argv.index(flag) + 1 :]
            if after and SECTION.fullmatch(after[0]):
                from megarl.config.help import render_section  # here: most need no help

                text = render_section(after[0])
            print(text.strip())
            return None
    return parse_command_line(argv, options=options, switches=(*switches, "help"))
