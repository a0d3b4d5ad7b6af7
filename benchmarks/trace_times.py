"""Adds up the operations of a Chrome trace of torch's profiler by kind of work.

An operation's time is its own, without that of the operations it calls. What lies between
operations is Python, autograd's engine and waiting for other processes.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BETWEEN, OTHERS = "between operations", "elementwise, reductions"
# kind -> parts of the names of its ranges and operations; whatever an operation or range of one of
# INSIDE calls is of the same kind
INSIDE = {
    "attention": ("scaled_dot_product", "attention"),
    "output layer": ("_TokenOutputs",),
    "sampling": ("sampling",),
    "optimizer": ("Optimizer.step",),
    "collectives": ("gloo:", "c10d::", "nccl:"),
}
KINDS = INSIDE | {
    "products with weights": (
        *("aten::linear", "aten::matmul", "aten::mm", "aten::addmm", "aten::bmm", "mkldnn"),
    ),
    "copies": ("aten::copy_", "aten::cat", "aten::clone", "aten::index", "aten::gather"),
}
Event = dict[str, Any]


@dataclass
class Spent:
    """Holds the microseconds of a part of a trace: whole, by kind of work, by operation."""

    whole: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    def take(self, name: str, kind: str, micros: float) -> None:
        """Adds what an operation of that kind took, or takes off what it called."""
        self.kinds[kind] += micros  # type: ignore[assignment]
        self.operations[name] += micros  # type: ignore[assignment]


def kind_of(name: str, above: str) -> str:
    """Returns the kind of an operation or range that one of kind `above` has called."""
    if above in INSIDE:
        return above
    known = (kind for kind, parts in KINDS.items() if any(part in name for part in parts))
    return next(known, OTHERS if name.startswith("aten::") else BETWEEN)


def by_part(events: Iterable[Event], parts: Iterable[str]) -> dict[str, Spent]:
    """Returns what was spent inside of the ranges `parts`, in the thread that has the first."""
    wanted, found = set(parts), defaultdict[str, Spent](Spent)
    timed = [e for e in events if e.get("cat") in ("cpu_op", "user_annotation")]
    thread = next(e["tid"] for e in timed if e["name"] in wanted)
    timed = [e for e in timed if e["tid"] == thread]
    open_: list[tuple[Event, str, str]] = []  # with the kind of each, and the part it is in
    for e in sorted(timed, key=lambda e: (e["ts"], -e["dur"])):
        while open_ and e["ts"] >= open_[-1][0]["ts"] + open_[-1][0]["dur"]:
            open_.pop()
        caller, above, part = open_[-1] if open_ else (None, BETWEEN, "")
        kind = kind_of(e["name"], above)
        if e["name"] in wanted:
            part = e["name"]
            found[part].whole += e["dur"]
        elif caller is not None and part:
            found[part].take(caller["name"], above, -e["dur"])
        if part:
            found[part].take(e["name"], kind, e["dur"])
            found[part].calls[e["name"]] += 1
        open_.append((e, kind, part))
    return found


def events_of(path: Path) -> list[Event]:
    """Returns the events of a trace, *.json.gz."""
    found: list[Event] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [e for e in found if e.get("ph") == "X"]
