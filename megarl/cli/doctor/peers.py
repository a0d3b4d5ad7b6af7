"""Holds what the doctor's checks found, and brings together what was found on the hosts of a job,
under torchrun or srun: each host writes below the file root, and the first one reads it all."""

from __future__ import annotations

import json
import re
import shutil
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

OK, WARN, FAIL = "OK", "WARN", "FAIL"
_STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red"}


@dataclass(frozen=True)
class Finding:
    """Says how one thing is: `status` OK, WARN or FAIL, what was looked at, what was found, and how
    to mend it."""

    status: str
    name: str
    text: str
    fix: str = ""


def to_json(findings: Iterable[Finding]) -> str:
    """Returns findings as text that `from_json` reads."""
    return json.dumps([asdict(f) for f in findings])


def from_json(text: str) -> list[Finding]:
    """Returns the findings of `to_json`'s text."""
    return [Finding(**f) for f in json.loads(text)]


def merged(by_host: Sequence[tuple[str, Sequence[Finding]]]) -> list[Finding]:
    """Returns the findings of all hosts in the order of the first, equal ones once; one that not
    all hosts share names its hosts."""
    hosts: dict[Finding, list[str]] = {}
    for host, findings in by_host:
        for finding in findings:
            hosts.setdefault(finding, []).append(host)
    order = {name: i for i, name in enumerate(dict.fromkeys(f.name for f in hosts))}
    shown = []
    for finding, found in hosts.items():
        where = "" if len(found) == len(by_host) else f"{', '.join(dict.fromkeys(found))}: "
        shown.append(Finding(finding.status, finding.name, where + finding.text, finding.fix))
    return sorted(shown, key=lambda f: order[f.name])


def print_findings(findings: Sequence[Finding], console: Console | None = None) -> None:
    """Prints a line for each finding, its fix below, and how many there are of each status."""
    console = console or Console(highlight=False)
    width = max(len(f.name) for f in findings) + 2
    for f in findings:
        line = Text.assemble((f"{f.status:5}", _STYLES[f.status]), f"{f.name:{width}}{f.text}")
        console.print(line, soft_wrap=True)
        if f.fix and f.status != OK:
            console.print(Text(f"{'':{width + 5}}fix: {f.fix}"), soft_wrap=True)
    counts = [f"{sum(f.status == s for f in findings)} {s}" for s in (OK, WARN, FAIL)]
    console.print(Text(", ".join(counts), style="bold"))


STALE = 600.0  # seconds: an older file is an earlier doctor's


@dataclass(frozen=True, kw_only=True)
class Place:
    """Says which host of a job this process is on. job: what tells the job from others. node: the
    host's number of `names`. speaks: true of one process of each host."""

    job: str
    node: int
    names: tuple[str, ...]
    speaks: bool


def this_place(env: Mapping[str, str]) -> Place | None:
    """Returns this process's place among several hosts, from torchrun's variables or srun's; None
    where it is alone. Raises ValueError for variables that are incomplete."""
    if int(env.get("WORLD_SIZE", "1")) > 1:
        needed = ("LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if missing := [k for k in needed if k not in env]:
            raise ValueError(f"WORLD_SIZE is set and {', '.join(missing)} is not: use torchrun")
        node, own = int(env["GROUP_RANK"]), socket.gethostname()
        names = (own if i == node else f"host {i}" for i in range(int(env["GROUP_WORLD_SIZE"])))
        return Place(
            job=f"{env['MASTER_ADDR']}-{env['MASTER_PORT']}",
            node=node,
            names=tuple(names),
            speaks=env["LOCAL_RANK"] == "0",
        )
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return Place(
            job=f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}",
            node=int(env["SLURM_NODEID"]),
            names=node_names(env["SLURM_STEP_NODELIST"]),
            speaks=env["SLURM_LOCALID"] == "0",
        )
    return None


def node_names(nodes: str) -> tuple[str, ...]:
    """Returns the names of Slurm's list of nodes: n[08-10],x is n08, n09, n10 and x."""
    names: list[str] = []
    for entry in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        prefix, _, rest = entry.partition("[")
        ranges, _, suffix = rest.partition("]")
        for numbers in ranges.split(","):
            first, _, last = numbers.partition("-")
            for number in range(int(first or 0), int(last or first or 0) + 1):
                digits = f"{number:0{len(first)}}" if first else ""
                names.append(f"{prefix}{digits}{suffix}")
    return tuple(names)


def tell(place: Place, root: Path, findings: Sequence[Finding]) -> None:
    """Writes this host's findings where the first host reads them. Raises OSError."""
    folder = _folder(place, root)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{place.node}.unfinished"
    unfinished.write_text(f"{place.names[place.node]}\n{to_json(findings)}", encoding="utf-8")
    unfinished.replace(folder / f"{place.node}.json")


def gather(place: Place, root: Path, wait: float) -> list[tuple[str, list[Finding]]]:
    """Returns the findings of all hosts by their names, and removes the files. Waits `wait` seconds
    at most; a finding of the first host names the hosts that did not come. Raises OSError."""
    folder, deadline = _folder(place, root), time.monotonic() + wait
    files = [folder / f"{node}.json" for node in range(len(place.names))]
    own_time = files[place.node].stat().st_mtime
    while (absent := [i for i, f in enumerate(files) if not _is_new(f, own_time)]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.2)
    by_host: list[tuple[str, list[Finding]]] = []
    for file in (f for i, f in enumerate(files) if i not in absent):
        name, _, text = file.read_text(encoding="utf-8").partition("\n")
        by_host.append((name, from_json(text)))
    shutil.rmtree(folder, ignore_errors=True)
    by_host[0][1].append(_shared(place, root, absent, wait))
    return by_host


def _folder(place: Place, root: Path) -> Path:
    return root / f".megarl_doctor_{re.sub(r'[^a-zA-Z0-9.]+', '-', place.job)}"


def _is_new(file: Path, own_time: float) -> bool:
    """Returns whether the file is there and no earlier doctor's; both times are the storage's."""
    try:
        return file.stat().st_mtime > own_time - STALE
    except OSError:
        return False


def _shared(place: Place, root: Path, absent: Sequence[int], wait: float) -> Finding:
    if absent:
        names = ", ".join(place.names[i] for i in absent)
        text = f"{root} on {place.names[0]} got no findings of {names} within {wait:g} s"
        fix = "set fileroot to a directory that every host mounts at this path, see whether the "
        return Finding(FAIL, "shared storage", text, fix + "doctor started there, or raise --wait")
    return Finding(OK, "shared storage", f"{root}: {len(place.names)} hosts wrote their findings")
