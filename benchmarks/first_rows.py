"""Results of the probes of first_day.py: text on stdout, and lines of JSON in a file."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROUNDS = 5


class Results:
    """The rows of a probe. Several processes may append to one file.

    file: lines `{"probe": ..., "at": seconds since 1970, ...}`; None: no file is written.
    """

    def __init__(self) -> None:
        self.probe = ""
        self.file: Path | None = None
        self.names: tuple[str, ...] = ()

    def append(self, fields: dict[str, Any]) -> None:
        """Appends a line to the file."""
        if self.file:
            line = {"probe": self.probe, "at": round(time.time(), 1)} | fields
            with self.file.open("a") as file:
                file.write(json.dumps(line, default=str) + "\n")


RESULTS = Results()


def columns(*names: str) -> None:
    """Starts a Markdown table."""
    RESULTS.names = names
    print_row(*names)
    print("|" + "---|" * len(names), flush=True)


def row(*cells: Any) -> None:
    """Prints and stores a row of the table as soon as it is known."""
    print_row(*cells)
    RESULTS.append(dict(zip(RESULTS.names, cells, strict=True)))


def print_row(*cells: Any) -> None:
    """Prints a row of a Markdown table."""
    print("|", " | ".join(str(c).replace("|", "/") for c in cells), "|", flush=True)


def put(**fields: Any) -> None:
    """Prints and stores named numbers, which the summary repeats."""
    print(", ".join(f"{name}={value}" for name, value in fields.items()), flush=True)
    RESULTS.append(fields)


def put_detail(**fields: Any) -> None:
    """Stores named numbers that the summary leaves out."""
    RESULTS.append({"detail": True} | fields)


def place(small: bool) -> tuple[torch.device, torch.dtype]:
    """Returns the device and the dtype in which probes compute."""
    if small:
        return torch.device("cpu"), torch.float32
    return torch.device("cuda"), torch.bfloat16


def synchronize() -> None:
    """Waits for the GPU if this process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def seconds(fn: Callable[[], Any]) -> float:
    """Measures one call, from an idle device to an idle device."""
    synchronize()
    start = time.perf_counter()
    fn()
    synchronize()
    return time.perf_counter() - start


def ms(fn: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Measures milliseconds of a call: the median of `rounds`, after one that does not count."""
    fn()
    return 1e3 * statistics.median(seconds(fn) for _ in range(rounds))
