"""Appends to files of a run that every start goes on with, and reads the lines of JSON that count.

A line is of one "step", or begins a start: {..., "after": k} says that it goes on from step k, so
that what earlier lines say of later steps is superseded. What a killed process leaves behind is at
worst one line cut short.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO


def append(file: BinaryIO, data: bytes) -> int:
    """Writes `data` at the end of an unbuffered file and returns where. Raises OSError where there
    is no room, and takes back what was written."""
    at = file.seek(0, os.SEEK_END)
    left = memoryview(data)
    try:
        while left:  # a disk takes what it has room for, and says so at the next write
            left = left[file.write(left) :]
    except OSError:
        file.truncate(at)
        raise
    return at


def append_line(file: BinaryIO, line: Mapping[str, Any], *, allow_nan: bool = True) -> None:
    """Appends `line` as `append` does. Raises OSError where there is no room, without `allow_nan`
    ValueError for a number that JSON does not have."""
    begin = "\n" if "after" in line else ""  # a crash may have cut the line before short
    text = json.dumps(line, allow_nan=allow_nan, separators=(",", ":"))
    append(file, f"{begin}{text}\n".encode())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the lines that count, those of starts among them. Raises FileNotFoundError."""
    lines: list[dict[str, Any]] = []
    with path.open("rb") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:  # a crash cut it short, perhaps within a character
                continue
            if (after := line.get("after")) is not None:
                lines = [each for each in lines if each.get("step", after) <= after]
            lines.append(line)
    return lines
