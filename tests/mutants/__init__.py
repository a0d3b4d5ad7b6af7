"""Faults of one line, and the tests that catch them (see __main__.py)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "megarl"


@dataclass(frozen=True)
class Mutant:
    """Replaces a line of a file of megarl. old, new: without indentation; `old` is there once.
    tests: pytest's names of those that catch it."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def room(self) -> str:
        """Returns the package that the file is in."""
        return self.file.partition("/")[0]

    def applied(self, text: str) -> str | None:
        """Returns the file's text with the fault; None where `old` is not there exactly once."""
        lines = text.splitlines(keepends=True)
        places = [i for i, line in enumerate(lines) if line.strip() == self.old]
        if len(places) != 1:
            return None
        (at,) = places
        lines[at] = lines[at].replace(self.old, self.new)
        return "".join(lines)
