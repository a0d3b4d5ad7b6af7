"""Keeps the episodes of a run on disk, in two files that are only appended to.

<run>/episodes/index.jsonl is a RunLog with a line for each group: {"step", "episode", "at", "size",
...}. The record is the `size` bytes at `at` in <run>/episodes/records.bin: zlib, and in it a line
of JSON and then arrays of numbers. A line is written after its record, so what a killed process
leaves behind is at worst bytes that no line names, and one line cut short.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.observability.run_log import RunLog, append

FOLDER = "episodes"
INDEX = "index.jsonl"
RECORDS = "records.bin"
LEVEL = 1  # of zlib: numbers of a model hardly get smaller with more

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Record:
    """Holds one record: `about` is plain data, `arrays` are flat, by name."""

    about: dict[str, Any]
    arrays: dict[str, NDArray[Any]]


def pack(about: Mapping[str, Any], arrays: Arrays) -> bytes:
    """Returns a record as bytes. Of each array come first the lowest bytes of all numbers, then the
    next ones: they are more alike, and pack better."""
    named = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    fields = [[name, array.dtype.str, len(array)] for name, array in named.items()]
    head = json.dumps({**about, "arrays": fields}, allow_nan=False, separators=(",", ":"))
    planes = (a.view(np.uint8).reshape(len(a), a.itemsize).T.tobytes() for a in named.values())
    return zlib.compress(head.encode() + b"\n" + b"".join(planes), LEVEL)


def unpack(data: bytes) -> Record:
    """Returns the record that `pack` made. Raises ValueError for bytes that are no record."""
    try:
        head, _, body = zlib.decompress(data).partition(b"\n")
        about, arrays, at = json.loads(head), {}, 0
        for name, kind, count in about.pop("arrays"):
            dtype = np.dtype(kind)
            planes = np.frombuffer(body, np.uint8, count * dtype.itemsize, at)
            at += len(planes)
            numbers = np.ascontiguousarray(planes.reshape(dtype.itemsize, count).T)
            arrays[name] = numbers.reshape(-1).view(dtype)
    except (zlib.error, KeyError, TypeError) as e:
        raise ValueError(f"a damaged record of episodes: {e}") from e
    return Record(about=about, arrays=arrays)


def append_record(run_dir: Path, step: int, line: Mapping[str, Any], data: bytes) -> None:
    """Appends a record of a step. `line` is what the index says of it beside the place: episode,
    and what lists show. One process writes. Raises OSError where there is no room, and leaves no
    half."""
    path = run_dir / FOLDER / RECORDS
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        at = append(file, data)
    RunLog(run_dir / FOLDER / INDEX).append(step, {**line, "at": at, "size": len(data)})


def read_index(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the lines of the records that count, in order of step and episode; none where nothing
    was recorded. A line that was cut short is left out."""
    index = RunLog(run_dir / FOLDER / INDEX)
    lines = {(line["step"], line["episode"]): line for line in index.read()}
    return [lines[key] for key in sorted(lines)]


def read_bytes(run_dir: Path, line: Mapping[str, Any]) -> bytes:
    """Returns the bytes of the record that a line of the index names; see `unpack`. Raises
    ValueError where the file of records is a link to another, or does not have them all."""
    path = run_dir / FOLDER / RECORDS
    if path.is_symlink():
        raise ValueError(f"{path} is a link, no file of records")
    with path.open("rb") as file:
        file.seek(line["at"])
        data = file.read(line["size"])
    if len(data) < line["size"]:
        raise ValueError(f"{path} ends before byte {line['at'] + line['size']}")
    return data
