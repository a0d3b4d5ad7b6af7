"""Says how a run is doing, from the files that it writes; it may run elsewhere, or be over.

    megarl status RUN [--json] [--follow]

    RUN        the run's directory, <fileroot>/<experiment_name>/<trial_name>
    --json     one object instead of lines
    --follow   say it again whenever something changes, until the run ends

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
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from megarl.config.command_line import help_or_command_line
from megarl.config.errors import ConfigError
from megarl.observability.console import duration
from megarl.observability.presence import BEAT, ENDED, FAILED, RUNNING, read_launcher, read_presence
from megarl.observability.report.runs import Run, load_run
from megarl.utils.env import is_loopback
from megarl.utils.http import HttpError, call_json
from megarl.utils.stacks import state as state_of

SILENT = 6 * BEAT  # seconds without a word
RECENT = 20  # steps that the pace is taken from
HEALTH_TIMEOUT = 3.0  # seconds a server may take to answer
POLL = 2.0  # seconds between two looks with --follow
OVER = ("finished", "stopped", "failed", "dead")
BAD = ("failed", "dead")
_GOING = {"alive", "silent", "stopped"}  # health of a process that may go on
_METRICS = {
    "reward": ("reward/mean",),
    "loss": ("loss",),
    "staleness": ("staleness/max",),
    "eval": ("eval/accuracy",),
    "eval_failed": ("eval/failed",),
    "tflops_per_gpu": ("perf/tflops_per_gpu",),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Says how the run that `argv` names is doing and returns the exit status. Raises ConfigError
    for a wrong command line or a directory that holds no run."""
    command = help_or_command_line(argv, __doc__ or "", switches=("json", "follow"))
    if command is None:
        return 0
    if len(command.words) != 1 or command.overrides:
        raise ConfigError(["give one run directory: megarl status RUN"])
    directory = Path(command.words[0])
    said: dict[str, Any] = {}
    while True:
        found = status(directory)
        if _told(found) != said:
            said = _told(found)
            _print(found, as_json="json" in command.switches)
        if "follow" not in command.switches or found["state"] in OVER:
            return int(found["state"] in BAD)
        time.sleep(POLL)


def status(directory: Path) -> dict[str, Any]:
    """Returns how the run in `directory` is doing, as plain data. Raises ConfigError where there is
    no run."""
    people = read_presence(directory)
    if not people and not (directory / "stats.jsonl").exists():
        raise ConfigError(
            [f"{directory}: no run has begun there; name <fileroot>/.../<trial_name>"]
        )
    run = _run(directory)
    processes = [_process(p) for p in people]
    rows = [row for row in run.rows if row["step"] > 0]
    last = rows[-1] if rows else {}
    summary = run.summary if _is_current(directory, people) else {}
    launcher = _launcher(directory, people)
    state = _state(summary, processes)
    if state in BAD and _there(launcher):
        state = "restarting"
    return {
        "run": "/".join(directory.resolve().parts[-2:]),
        "state": state,
        "step": int(last.get("step", 0)),
        "total_steps": people[0].get("total_steps") if people else run.summary.get("total_steps"),
        "elapsed_s": run.elapsed,
        "last_step_s_ago": round(time.time() - last["time"], 1) if "time" in last else None,
        **{name: _last(rows, keys) for name, keys in _METRICS.items()},
        "eval_by_dataset": {
            name: _last(run.rows, (f"eval/{name}/accuracy",)) for name in run.datasets
        },
        **_pace(rows),
        "processes": processes,
        "servers": _servers(people) if state not in OVER else [],
        "last_error": _last_error(summary, processes, launcher, bad=state in BAD),
    }


def _run(directory: Path) -> Run:
    try:
        return load_run(directory)
    except FileNotFoundError:  # before the first step
        return Run(label="", rows=[])


def _is_current(directory: Path, people: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether summary.json is of the newest start, not of one before it."""
    summary = directory / "summary.json"
    if not summary.exists():
        return False
    return not people or summary.stat().st_mtime >= people[0]["started"]


def _process(said: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a trainer process by what it last said, and whether it is still there."""
    health = "alive"
    if said["state"] in (ENDED, FAILED):
        health = said["state"]
    elif said["host"] == socket.gethostname() and (found := _found(said["pid"])) != "alive":
        health = found
    elif time.time() - said["beat"] > SILENT:
        health = "silent"
    since = said["phase_since"]
    return {
        "name": said.get("name") or f"trainer {said['rank']}",
        "host": said["host"],
        "pid": said["pid"],
        "health": health,
        "phase": said["phase"],
        "phase_s": round(said["beat"] - since, 1) if since else None,
        "said_s_ago": round(time.time() - said["beat"], 1),
        "error": said["error"],
    }


def _found(pid: int) -> str:
    """Returns alive, stopped or dead, as the system of this host sees the process."""
    return {"": "dead", "Z": "dead", "T": "stopped", "t": "stopped"}.get(state_of(pid), "alive")


def _launcher(directory: Path, people: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Returns what the launcher of the newest start said; None where another way started it."""
    said = read_launcher(directory)
    if said is None or (people and said["beat"] < people[0]["started"] and not _there(said)):
        return None
    return said


def _there(launcher: Mapping[str, Any] | None) -> bool:
    if launcher is None or launcher["host"] != socket.gethostname():
        return False
    return _found(launcher["pid"]) != "dead"


def _is_gone(launcher: Mapping[str, Any]) -> bool:
    """Returns whether a launcher of this host has ended without a word about its start."""
    here = launcher["host"] == socket.gethostname()
    return here and launcher["state"] == RUNNING and not _there(launcher)


def _state(summary: Mapping[str, Any], processes: Sequence[Mapping[str, Any]]) -> str:
    """Returns running, finished, stopped (early), failed or dead, as the processes are."""
    health = {p["health"] for p in processes}
    if "dead" in health:
        return "dead"
    if (said := summary.get("status")) and not health & _GOING:
        return str(said).split(":")[0].split()[0]
    if "failed" in health:
        return "failed"
    return "running" if health & _GOING else "stopped"


def _last(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> float | None:
    for row in reversed(rows):
        for key in keys:
            if row.get(key) is not None:
                return float(row[key])
    return None


def _pace(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Returns the seconds of a step, the median of the last ones, and their trained tokens/s."""
    recent = [row for row in rows[-RECENT:] if row.get("timing/step_s")]
    if not recent:
        return {"seconds_per_step": None, "tokens_per_s": None}
    seconds = [float(row["timing/step_s"]) for row in recent]
    tokens = sum(float(row.get("tokens/trained") or 0) for row in recent)
    return {
        "seconds_per_step": round(statistics.median(seconds), 3),
        "tokens_per_s": round(tokens / sum(seconds), 1),
    }


def _servers(people: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Asks every server that the run generates with for its health. One that listens on another
    machine's loopback cannot be asked from here."""
    if not people or not people[0]["servers"]:
        return []
    here = people[0]["host"] == socket.gethostname()

    def ask(address: str) -> dict[str, Any]:
        if is_loopback(address) and not here:
            return {"address": address, "health": f"not asked: on {people[0]['host']}'s loopback"}
        try:
            call_json("GET", address, "/health", timeout=HEALTH_TIMEOUT)
        except (HttpError, OSError, ValueError) as e:
            return {"address": address, "health": f"no answer: {e}"}
        return {"address": address, "health": "alive"}

    with ThreadPoolExecutor(max_workers=16) as pool:
        return list(pool.map(ask, people[0]["servers"]))


def _last_error(
    summary: Mapping[str, Any],
    processes: Sequence[Mapping[str, Any]],
    launcher: Mapping[str, Any] | None,
    *,
    bad: bool,
) -> str | None:
    """Returns why the run failed, or why it is started again: the launcher's word, which saw the
    first process end, then that of a process."""
    why = launcher and (launcher["error"] or (_there(launcher) and launcher["before"]))
    if bad and not why and launcher and _is_gone(launcher):
        why = f"the launcher (pid {launcher['pid']} on {launcher['host']}) is gone"
    return "; ".join(cause for cause in (why, _said(summary, processes)) if cause) or None


def _said(summary: Mapping[str, Any], processes: Sequence[Mapping[str, Any]]) -> str | None:
    for p in processes:
        if p["error"]:
            return f"{p['name']}: {p['error']}"
    said = str(summary.get("status", ""))
    if said.startswith("failed"):
        return said.removeprefix("failed: ")
    gone = [
        f"{p['name']} (pid {p['pid']} on {p['host']})" for p in processes if p["health"] == "dead"
    ]
    return f"ended without a word: {', '.join(gone)}" if gone else None


# showing it


def _told(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what --follow says again when it changes."""
    health = [(p["name"], p["health"]) for p in found["processes"]]
    health += [(s["address"], s["health"]) for s in found["servers"]]
    return {k: found[k] for k in ("state", "step", "last_error")} | {"health": health}


def _print(found: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found), flush=True)
        return
    console = Console(highlight=False)
    for name, text, style in _lines(found):
        line = Text.assemble((f"{name:11}", "bold cyan"), (text, style))
        console.print(line, soft_wrap=True)
    sys.stdout.flush()


def _lines(found: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yields (name, text, style) for people."""
    bad = found["state"] in BAD
    yield "run", f"{found['run']}: {found['state']}", "bold red" if bad else "bold green"
    of = f" of {found['total_steps']}" if found["total_steps"] else ""
    took = f" in {duration(found['elapsed_s'])}" if found["elapsed_s"] else ""
    ago = found["last_step_s_ago"]
    yield (
        "step",
        f"{found['step']}{of}{took}" + (f", {ago:.0f} s ago" if ago is not None else ""),
        "",
    )
    values = {name: found[name] for name in _METRICS if found[name] is not None}
    if values:
        yield "numbers", ", ".join(f"{n} {v:.4g}" for n, v in values.items()), ""
    if sets := {name: v for name, v in found["eval_by_dataset"].items() if v is not None}:
        yield "eval", ", ".join(f"{name} {value:.4g}" for name, value in sets.items()), ""
    if found["seconds_per_step"] is not None:
        pace = f"{found['seconds_per_step']:.3g} s a step, {found['tokens_per_s']:,.0f} tokens/s"
        yield "pace", f"{pace} trained", ""
    yield from _process_lines(found["processes"])
    for server in found["servers"]:
        yield "server", f"{server['address']}: {server['health']}", _style(server["health"])
    if found["last_error"]:
        yield "last error", found["last_error"], "red"


def _process_lines(processes: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Yields a line for each process that is not as the others are, and one for the others."""
    groups: dict[tuple[str, str, str | None], list[Mapping[str, Any]]] = {}
    for p in processes:
        kind = p["name"].split()[0]
        groups.setdefault((kind, p["health"], p["phase"]), []).append(p)
    for (kind, health, phase), members in groups.items():
        names = [p["name"].split()[-1] for p in members]
        who = (
            f"{names[0]} to {names[-1]}" if len(names) > 1 and _gapless(names) else ", ".join(names)
        )
        where = ", ".join(dict.fromkeys(f"{p['host']}" for p in members[:4]))
        pids = f", pid {members[0]['pid']}" if len(members) == 1 else ""
        text = f"{who}: " if who != kind else ""
        text += f"{health}, on {where}{pids}"
        if phase and health not in (ENDED, FAILED):
            text += f", in {phase} for {max(p['phase_s'] or 0 for p in members):.0f} s"
        yield kind, text, _style(health)


def _gapless(names: Sequence[str]) -> bool:
    numbers = [int(n) for n in names]
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def _style(health: str) -> str:
    return {"alive": "green", ENDED: "", "silent": "yellow", "stopped": "yellow"}.get(health, "red")
