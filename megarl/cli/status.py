"""Says how a run is doing, from the files that it writes; it may run elsewhere, or be over.

Steps, reward, throughput and staleness are those of stats.jsonl. A trainer process is alive while
it says so every few seconds, silent where it has not for half a minute; where it ran on this host,
stopped (SIGSTOP) or dead. A run is restarting while its launcher, on this host, starts it again.
Servers are asked for their health. The exit status is 0 for a run that goes on or has finished, 1
for one that failed or died, 2 where there is none.
"""

from __future__ import annotations

import json
import socket
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megarl.cli import RUN, CommandParser
from megarl.config.errors import ConfigError
from megarl.observability.report.runs import load_run
from megarl.observability.stats_logger import duration
from megarl.observability.timeline import BEAT, ENDED, FAILED, RUNNING, read_launcher, read_presence
from megarl.utils.env import is_loopback
from megarl.utils.http import HttpError, call_json
from megarl.utils.stacks import state as letter_of

Record = Mapping[str, Any]
SILENT = 6 * BEAT  # seconds without a word
SHOWN = 16  # processes with a line
RECENT = 20  # steps that the pace is taken from
HEALTH_TIMEOUT = 3.0  # seconds a server may take to answer
POLL = 2.0  # seconds between two looks with --follow
OVER = ("finished", "stopped", "failed", "dead")
BAD = ("failed", "dead")
_GOING = {"alive", "silent", "stopped"}  # health of a process that may go on
_LETTERS = {"": "dead", "Z": "dead", "T": "stopped", "t": "stopped"}  # of states in /proc
_METRICS = {
    "reward": "reward/mean",
    "loss": "loss",
    "staleness": "staleness/max",
    "eval": "eval/accuracy",
    "eval_failed": "eval/failed",
    "tflops_per_gpu": "perf/tflops_per_gpu",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Says how the run that `argv` names is doing and returns the exit status. Raises ConfigError
    for a wrong command line or a directory that holds no run."""
    parser = CommandParser("status", __doc__)
    parser.path("RUN", RUN)
    parser.switch("json", "one object instead of lines")
    parser.switch("follow", "say it again at every change, until the run ends")
    args = parser.read(argv)
    shown: list[Any] = []
    while True:
        now = status(args.run)
        news = [now["state"], now["step"], now["last_error"], now["servers"]]
        news += [process["health"] for process in now["processes"]]
        if news != shown:
            shown = news
            print(json.dumps(now) if args.json else "\n".join(_lines(now)), flush=True)
        if not args.follow or now["state"] in OVER:
            return int(now["state"] in BAD)
        time.sleep(POLL)


def status(directory: Path) -> dict[str, Any]:
    """Returns how the run in `directory` is doing, as plain data. Raises ConfigError where there is
    no run."""
    records = read_presence(directory)
    try:
        run = load_run(directory)
    except FileNotFoundError:
        why = "no run has begun there; name <fileroot>/.../<trial_name>"
        raise ConfigError(f"{directory}: {why}") from None
    rows = [row for row in run.rows if row["step"] > 0]
    last = rows[-1] if rows else {}
    processes = [_process(record) for record in records]
    started = records[0]["started"] if records else 0.0  # an older file is of an earlier start
    summary = directory / "summary.json"
    end = str(run.summary.get("status", ""))
    if records and not (summary.exists() and summary.stat().st_mtime >= started):
        end = ""
    state = _state(end, processes)
    restarting, reason = _launcher(directory, records, bad=state in BAD)
    errors = [f"{p['name']}: {p['error']}" for p in processes if p["error"]]
    if end.startswith("failed"):
        errors.append(end.removeprefix("failed: "))
    if dead := [p for p in processes if p["health"] == "dead"]:
        names = ", ".join(f"{p['name']} (pid {p['pid']} on {p['host']})" for p in dead)
        errors.append(f"ended without a word: {names}")
    return {
        "run": "/".join(directory.resolve().parts[-2:]),
        "state": "restarting" if restarting else state,
        "step": int(last.get("step", 0)),
        "total_steps": (records[0] if records else run.summary).get("total_steps"),
        "elapsed_s": run.elapsed,
        "last_step_s_ago": round(time.time() - last["time"], 1) if "time" in last else None,
        **{name: _last(rows, key) for name, key in _METRICS.items()},
        "eval_by_dataset": {
            name: _last(run.rows, f"eval/{name}/accuracy") for name in run.datasets
        },
        **_pace(rows[-RECENT:]),
        "processes": processes,
        "servers": _servers(records[0]) if records and state not in OVER else [],
        "last_error": "; ".join(filter(None, [reason, *errors[:1]])) or None,
    }


def _process(record: Record) -> dict[str, Any]:
    """Returns a trainer process by what it last said, and whether it is still there."""
    silent_s, since = time.time() - record["beat"], record["phase_since"]
    health = record["state"] if record["state"] in (ENDED, FAILED) else _health(record)
    if health == "alive" and silent_s > SILENT:
        health = "silent"
    return {
        "name": record.get("name") or f"trainer {record['rank']}",
        "host": record["host"],
        "pid": record["pid"],
        "health": health,
        "phase": record["phase"],
        "phase_s": round(record["beat"] - since, 1) if since else None,
        "said_s_ago": round(silent_s, 1),
        "error": record["error"],
    }


def _health(record: Record) -> str:
    """Returns alive, stopped or dead, as the system sees a process; alive on another host."""
    return _LETTERS.get(letter_of(record["pid"]), "alive") if _is_here(record) else "alive"


def _is_here(record: Record) -> bool:
    return record["host"] == socket.gethostname()


def _state(end: str, processes: Sequence[Record]) -> str:
    """Returns running, finished, stopped (early), failed or dead, as the processes are. end: what
    summary.json says."""
    health = {p["health"] for p in processes}
    if "dead" in health:
        return "dead"
    if end and not health & _GOING:
        return end.split(":")[0].split()[0]
    if "failed" in health:
        return "failed"
    return "running" if health & _GOING else "stopped"


def _launcher(directory: Path, trainers: Sequence[Record], *, bad: bool) -> tuple[bool, str | None]:
    """Returns whether a launcher on this host starts the run again, which is `bad` now, and why a
    start failed: the launcher saw which process ended first."""
    record = read_launcher(directory)
    if record is None:
        return False, None
    if _is_here(record) and _health(record) != "dead":
        return bad, record["error"] or record["before"]
    first = trainers[0] if trainers else {"started": 0.0}
    # of another way of starting, after this launcher's
    if record["beat"] < first["started"] and record["pid"] != first.get("parent"):
        return False, None
    reason: str | None = record["error"]
    if bad and reason is None and _is_here(record) and record["state"] == RUNNING:
        reason = f"the launcher (pid {record['pid']} on {record['host']}) was killed"
    return False, reason


def _last(rows: Sequence[Record], key: str) -> float | None:
    return next((float(row[key]) for row in reversed(rows) if row.get(key) is not None), None)


def _pace(rows: Sequence[Record]) -> dict[str, float | None]:
    """Returns the seconds of a step, the median of `rows`, and their trained tokens/s."""
    timed = [row for row in rows if row.get("timing/step_s")]
    if not timed:
        return {"seconds_per_step": None, "tokens_per_s": None}
    seconds = [float(row["timing/step_s"]) for row in timed]
    tokens = sum(float(row.get("tokens/trained") or 0) for row in timed)
    return {
        "seconds_per_step": round(statistics.median(seconds), 3),
        "tokens_per_s": round(tokens / sum(seconds), 1),
    }


def _servers(record: Record) -> list[dict[str, str]]:
    """Returns the health of every server that the first process generates with. One that listens on
    another machine's loopback cannot be asked from here."""

    def health(address: str) -> str:
        if is_loopback(address) and not _is_here(record):
            return f"not asked: on {record['host']}'s loopback"
        try:
            call_json("GET", address, "/health", timeout=HEALTH_TIMEOUT)
        except (HttpError, OSError, ValueError) as e:
            return f"no answer: {e}"
        return "alive"

    with ThreadPoolExecutor(max_workers=16) as pool:
        answers = pool.map(health, record["servers"])
        return [{"address": a, "health": h} for a, h in zip(record["servers"], answers)]


def _lines(now: Record) -> Iterator[str]:
    """Yields what people read."""
    step = f"{now['step']}"
    if now["total_steps"]:
        step += f" of {now['total_steps']}"
    if now["elapsed_s"]:
        step += f" in {duration(now['elapsed_s'])}"
    if now["last_step_s_ago"] is not None:
        step += f", {now['last_step_s_ago']:.0f} s ago"
    lines = [("run", f"{now['run']}: {now['state']}"), ("step", step)]
    numbers = {name: now[name] for name in _METRICS}
    for title, values in ("numbers", numbers), ("eval", now["eval_by_dataset"]):
        texts = [f"{name} {v:.4g}" for name, v in values.items() if v is not None]
        lines.append((title, ", ".join(texts)))
    if now["seconds_per_step"] is not None:
        pace = f"{now['seconds_per_step']:.3g} s a step, {now['tokens_per_s']:,.0f} tokens/s"
        lines.append(("pace", f"{pace} trained"))
    # ranks and servers with a problem come first
    processes = sorted(now["processes"], key=lambda p: p["health"] in ("alive", ENDED))
    for p in processes[:SHOWN]:
        text = f"{p['health']}, on {p['host']}, pid {p['pid']}"
        if p["phase"] and p["health"] not in (ENDED, FAILED):
            text += f", in {p['phase']} for {p['phase_s'] or 0:.0f} s"
        lines.append((p["name"], text))
    if rest := {p["health"] for p in processes[SHOWN:]}:
        lines.append(("", f"and {len(processes) - SHOWN} more: {', '.join(sorted(rest))}"))
    lines += [("server", f"{s['address']}: {s['health']}") for s in now["servers"]]
    lines.append(("last error", now["last_error"]))
    yield from (f"{name:14}{text}" for name, text in lines if text)
