"""Adds up the operations of a Chrome trace of torch's profiler by kind of work.

An operation's time is its own, without that of the operations it calls. What follows a collective
up to the next operation is waiting for the other processes; what else lies between operations is
Python and autograd's engine.
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
COLLECTIVES = "collectives, and waiting in them"
# kind -> parts of the names of its ranges and operations; whatever an operation or range of one of
# INSIDE calls is of the same kind
INSIDE = {
    "attention": ("scaled_dot_product", "attention"),
    "output layer": ("_TokenOutputs",),
    "sampling": ("sampling",),
    "optimizer": ("Optimizer.step",),
    COLLECTIVES: ("gloo:", "c10d::", "nccl:"),
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


@dataclass
class Open:
    """Holds an operation or range that has begun, and what it called last."""

    name: str
    kind: str
    part: str
    end: float
    called: str = ""  # the kind of that
    since: float = 0.0  # when that ended

    def waited(self, until: float) -> float:
        """Returns the microseconds from the end of a collective to what is called next."""
        return until - self.since if self.called == COLLECTIVES != self.kind else 0.0


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
    stack = [Open("", BETWEEN, "", float("inf"))]
    for e in sorted(timed, key=lambda e: (e["ts"], -e["dur"])):
        name, start, micros = e["name"], e["ts"], e["dur"]
        while start >= stack[-1].end:
            stack.pop()
        caller = stack[-1]
        part = name if name in wanted else caller.part
        here = Open(name, kind_of(name, caller.kind), part, start + micros)
        spent = found[part]
        if part != caller.part:
            spent.whole += micros
        else:
            spent.take(caller.name, caller.kind, -micros)
            if waited := caller.waited(start):
                spent.kinds[caller.kind] -= waited  # type: ignore[assignment]
                spent.kinds[COLLECTIVES] += waited  # type: ignore[assignment]
        spent.take(name, here.kind, micros)
        spent.calls[name] += 1
        caller.called, caller.since = here.kind, here.end
        stack.append(here)
    return {part: found[part] for part in wanted}


def events_of(path: Path) -> list[Event]:
    """Returns the events of a trace, *.json.gz."""
    found: list[Event] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [e for e in found if e.get("ph") == "X"]
