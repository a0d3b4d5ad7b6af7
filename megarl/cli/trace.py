"""Makes one Chrome trace of a run: phases, weight syncs and episodes on one time axis.

The run may still be running. Open the file in ui.perfetto.dev or chrome://tracing. Each trainer
process has its phases and its part of syncs; rank 0 has the episodes below, in as many lanes as ran
at once, and the calls of a dataflow graph, a lane for each mesh. Times are those of each host's own
clock.
"""

from __future__ import annotations

import gzip
import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megarl.cli import RUN, CommandParser, step_range
from megarl.config.errors import ConfigError
from megarl.observability import timeline

Span = dict[str, Any]
_STEP = "step"


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the trace of the run that `argv` names and returns 0. Raises ConfigError for a wrong
    command line or a run without a timeline."""
    parser = CommandParser("trace", __doc__)
    parser.path("RUN", RUN)
    parser.option("out", Path, "file to write (RUN/trace.json.gz); .gz is packed")
    parser.option("steps", step_range, "only these steps, such as 10-12 or 7")
    args = parser.read(argv)
    run, out = args.run, args.out or args.run / "trace.json.gz"
    spans = read_timeline(run)
    if not any(spans.values()):
        raise ConfigError(f"{run / timeline.FOLDER}: no timeline; the run has not begun")
    if args.steps:
        spans = within(spans, args.steps)
    present = timeline.read_presence(run)
    names = {p["rank"]: f"{p.get('name', '')} {p['host']}".strip() for p in present}
    events = list(trace_events(spans, names))
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    out.write_bytes(gzip.compress(text.encode()) if out.suffix == ".gz" else text.encode())
    print(f"{out}: {sum(map(len, spans.values()))} spans of {len(spans)} process(es)")
    return 0


def read_timeline(run: Path) -> dict[int, list[Span]]:
    """Returns what each process recorded, by rank, in order of time."""
    spans = {}
    for path in sorted((run / timeline.FOLDER).glob("rank_*.jsonl")):
        number = path.stem.removeprefix("rank_")
        if number.isdecimal():
            spans[int(number)] = sorted(timeline.read_spans(path), key=lambda s: float(s["start"]))
    return dict(sorted(spans.items()))


def within(spans: dict[int, list[Span]], steps: tuple[int, int]) -> dict[int, list[Span]]:
    """Returns the spans that touch the time of steps A to B, counted from 1, of the first process.
    Raises ConfigError where there are not so many."""
    first = next(iter(spans.values()))
    taken = [s for s in first if s["track"] == timeline.PHASES and s["name"] == _STEP]
    a, b = steps
    if b > len(taken):
        raise ConfigError(f"--steps {a}-{b}: the timeline has {len(taken)} steps")
    begin, end = taken[a - 1]["start"], taken[b - 1]["start"] + taken[b - 1]["seconds"]
    return {
        rank: [s for s in own if s["start"] < end and s["start"] + s["seconds"] > begin]
        for rank, own in spans.items()
    }


def trace_events(spans: dict[int, list[Span]], names: dict[int, str]) -> Iterator[dict[str, Any]]:
    """Yields the events of Chrome's trace format. names: of the processes, where they are known.
    Times are microseconds since the first span."""
    zero = min(s["start"] for own in spans.values() for s in own)
    for rank, own in spans.items():
        yield _name(rank, "process_name", names.get(rank, f"trainer {rank}"))
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for number, (title, shown) in enumerate(_rows(own).items()):
            yield _name(rank, "thread_name", title, number)
            yield from (_event(span, rank, number, zero) for span in shown)


def _rows(own: Iterable[Span]) -> dict[str, list[Span]]:
    """Returns a process's spans by the title of the row that shows them, in the order of rows."""
    rows: dict[str, list[Span]] = {timeline.PHASES: [], timeline.SYNCS: []}
    others = timeline.EPISODES, timeline.CALLS, timeline.MEMORY
    of = {track: [s for s in own if s["track"] == track] for track in (*rows, *others)}
    rows |= {track: of[track] for track in (*rows, timeline.MEMORY) if track in rows or of[track]}
    for span, lane in sorted(lanes(of[timeline.EPISODES]), key=lambda placed: placed[1]):
        rows.setdefault(f"episodes {lane}", []).append(span)
    for span in sorted(of[timeline.CALLS], key=lambda span: str(span["about"]["mesh"])):
        rows.setdefault(f"calls on {span['about']['mesh']}", []).append(span)
    return rows


def _event(span: Span, rank: int, row: int, zero: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span["name"],
        "cat": span["track"],
        "pid": rank,
        "tid": row,
        "ts": round(1e6 * (span["start"] - zero), 1),
        "dur": round(1e6 * span["seconds"], 1),
        "args": span.get("about", {}),
    }


def lanes(spans: Iterable[Span]) -> list[tuple[Span, int]]:
    """Returns each span with the number of a lane in which nothing overlaps, few lanes in all.
    `spans` are in order of time."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []  # (end, lane)
    placed = []
    for span in spans:
        while busy and busy[0][0] <= span["start"]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (span["start"] + span["seconds"], lane))
        placed.append((span, lane))
    return placed


def _name(pid: int, kind: str, name: str, tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
