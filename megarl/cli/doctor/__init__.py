"""Looks whether a host, or a whole cluster, is ready for a recipe.

    megarl doctor X.yaml                                        (this host)
    srun --ntasks-per-node=1 megarl doctor X.yaml               (every host of a Slurm allocation)
    torchrun --nnodes N ... -m megarl.cli doctor X.yaml         (every host)

A line for each thing: OK, WARN or FAIL, with the fix. It looks at the configuration, models and
tokenizer, versions, GPUs and NCCL's environment, the file root (room, speed, and on several hosts
whether they really share it), ports, credentials. It writes 128 MiB into the file root and removes
them. On several hosts each writes its findings there, too, and the first host prints them all. The
exit status is 1 where something FAILs, 2 where the configuration cannot be read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megarl.cli.command import CommandParser
from megarl.cli.doctor.checks import FAIL, OK, WARN, Finding, findings, this_host
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.utils.files import write_whole
from megarl.utils.importing import add_working_directory

STALE = 600.0  # seconds: an older file is an earlier doctor's
# the tasks of a job, this one's node, the nodes, its number on the node, and what names the job
_TORCHRUN = ("WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK")
_SRUN = ("SLURM_STEP_NUM_TASKS", "SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_LOCALID")
_JOBS = {_TORCHRUN: ("MASTER_ADDR", "MASTER_PORT"), _SRUN: ("SLURM_JOB_ID", "SLURM_STEP_ID")}


def main(argv: Sequence[str] | None = None) -> int:
    """Examines what `argv` names and returns the exit status. Raises ConfigError where the
    configuration cannot be read."""
    parser = CommandParser("doctor", __doc__)
    parser.path("CONFIG", "the recipe's YAML file")
    parser.option("wait", float, "seconds to wait for the other hosts' findings (120)", 120.0)
    parser.keys()
    args = parser.read(argv)
    add_working_directory()
    cfg = load_config(args.config, args.keys)
    try:
        place = this_place(os.environ)
    except ValueError as e:
        raise ConfigError([str(e)]) from e
    if place is not None and not place.speaks:
        return 0
    shown = list(findings(this_host(cfg, args.config.parent / "models")))
    root = Path(cfg.fileroot).absolute()
    if place is None:
        why = "not looked at: this is one host; under srun or torchrun every host writes there"
        shown.append(Finding(OK, "shared storage", why))
    else:
        try:
            tell(place, root, shown)
            if place.node:
                return int(any(f.status == FAIL for f in shown))
            shown = merged(gather(place, root, args.wait))
        except OSError as e:
            fix = "set fileroot to a directory that every host can write to"
            shown.append(Finding(FAIL, "shared storage", f"{root}: {e.strerror}", fix))
    print_findings(shown)
    return int(any(f.status == FAIL for f in shown))


def print_findings(shown: Sequence[Finding]) -> None:
    """Prints a line for each finding, its fix below, and how many there are of each status."""
    width = max(len(f.name) for f in shown) + 2
    for f in shown:
        print(f"{f.status:5}{f.name:{width}}{f.text}")
        if f.fix and f.status != OK:
            print(f"{'':{width + 5}}fix: {f.fix}")
    print(", ".join(f"{sum(f.status == s for f in shown)} {s}" for s in (OK, WARN, FAIL)))


# several hosts: each writes below the file root, and the first one reads it all


@dataclass(frozen=True, kw_only=True)
class Place:
    """Says which of a job's `hosts` hosts this process is on. job: what tells the job from others.
    speaks: true of one process of each host."""

    job: str
    node: int
    hosts: int
    speaks: bool


def this_place(env: Mapping[str, str]) -> Place | None:
    """Returns this process's place among several hosts, from torchrun's variables or srun's; None
    where it is alone. Raises ValueError for variables that are incomplete."""
    for names, job in _JOBS.items():
        if int(env.get(names[0], "1")) == 1:
            continue
        if missing := [name for name in (*names, *job) if name not in env]:
            why = f"{names[0]} is set and {', '.join(missing)} is not"
            raise ValueError(f"{why}: use torchrun or srun")
        _, node, hosts, local = (int(env[name]) for name in names)
        about = "-".join(env[name] for name in job)
        return Place(job=about, node=node, hosts=hosts, speaks=local == 0)
    return None


def tell(place: Place, root: Path, own: Sequence[Finding]) -> None:
    """Writes this host's findings where the first host reads them. Raises OSError."""
    folder = _folder(place, root)
    folder.mkdir(parents=True, exist_ok=True)
    about = {"host": socket.gethostname(), "findings": [asdict(f) for f in own]}
    write_whole(folder / f"{place.node}.json", json.dumps(about))


def gather(place: Place, root: Path, wait: float) -> list[tuple[str, list[Finding]]]:
    """Returns the findings of all hosts by their names, and removes the files. Waits `wait` seconds
    at most; a finding of the first host says which hosts did not come. Raises OSError."""
    folder, deadline = _folder(place, root), time.monotonic() + wait
    files = [folder / f"{node}.json" for node in range(place.hosts)]
    own_time = files[place.node].stat().st_mtime
    while (absent := [i for i, f in enumerate(files) if not _is_new(f, own_time)]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.2)
    by_host: list[tuple[str, list[Finding]]] = []
    for file in (f for i, f in enumerate(files) if i not in absent):
        about = json.loads(file.read_text(encoding="utf-8"))
        by_host.append((about["host"], [Finding(**f) for f in about["findings"]]))
    shutil.rmtree(folder, ignore_errors=True)
    if absent:
        names = ", ".join(f"host {i}" for i in absent)
        text = f"{root} on {by_host[0][0]}, host 0, got no findings of {names} within {wait:g} s"
        fix = "set fileroot to a directory that every host mounts at this path, see whether the "
        shared = Finding(
            FAIL, "shared storage", text, fix + "doctor started there, or raise --wait"
        )
    else:
        text = f"{root}: {place.hosts} hosts wrote their findings"
        shared = Finding(OK, "shared storage", text)
    by_host[0][1].append(shared)
    return by_host


def _folder(place: Place, root: Path) -> Path:
    return root / f".megarl_doctor_{re.sub(r'[^a-zA-Z0-9.]+', '-', place.job)}"


def _is_new(file: Path, own_time: float) -> bool:
    """Returns whether the file is there and no earlier doctor's; both times are the storage's."""
    try:
        return file.stat().st_mtime > own_time - STALE
    except OSError:
        return False


def merged(by_host: Sequence[tuple[str, Sequence[Finding]]]) -> list[Finding]:
    """Returns the findings of all hosts in the order of the first, equal ones once; one that not
    all hosts share names its hosts."""
    hosts: dict[Finding, list[str]] = {}
    for host, own in by_host:
        for finding in own:
            hosts.setdefault(finding, []).append(host)
    order = {name: i for i, name in enumerate(dict.fromkeys(f.name for f in hosts))}
    shown = []
    for finding, names in hosts.items():
        where = "" if len(names) == len(by_host) else f"{', '.join(dict.fromkeys(names))}: "
        shown.append(replace(finding, text=where + finding.text))
    return sorted(shown, key=lambda f: order[f.name])
