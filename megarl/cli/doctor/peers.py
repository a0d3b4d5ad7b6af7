"""Meets the other hosts of a job, where the doctor runs on several: under torchrun or srun."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.cli.doctor.finding import FAIL, OK, WARN, Finding, from_json, to_json

MEET_TIMEOUT = 300.0  # seconds until all processes are there
SKEW = 1.0  # seconds that clocks may differ
_ASKS = 5  # the quickest answer says most about a clock
_FIRST_PORT, _PORTS = 20000, 10000  # where processes of srun meet


@dataclass(frozen=True, kw_only=True)
class Job:
    """Says which process of the doctor this is: `rank` of `size`; `speaks` is true of one process
    of each host. They meet at host:port. name: this host's, as others call it."""

    rank: int
    size: int
    speaks: bool
    host: str
    port: int
    name: str = field(default_factory=socket.gethostname)


def this_job(env: Mapping[str, str]) -> Job | None:
    """Returns this process's place among several, from torchrun's variables or srun's; None where
    it is alone. Raises ValueError for variables that are incomplete."""
    if int(env.get("WORLD_SIZE", "1")) > 1:
        missing = [k for k in ("RANK", "MASTER_ADDR", "MASTER_PORT") if k not in env]
        if missing:
            raise ValueError(f"WORLD_SIZE is set and {', '.join(missing)} is not: use torchrun")
        return Job(
            rank=int(env["RANK"]),
            size=int(env["WORLD_SIZE"]),
            speaks=env.get("LOCAL_RANK") == "0",
            host=env["MASTER_ADDR"],
            port=int(env["MASTER_PORT"]),
        )
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        number = int(env.get("SLURM_JOB_ID", "0"))
        return Job(
            rank=int(env["SLURM_PROCID"]),
            size=int(env["SLURM_STEP_NUM_TASKS"]),
            speaks=env.get("SLURM_LOCALID") == "0",
            host=env.get("MASTER_ADDR") or first_host(env["SLURM_STEP_NODELIST"]),
            port=int(env.get("MASTER_PORT") or _FIRST_PORT + number % _PORTS),
            name=env.get("SLURMD_NODENAME") or socket.gethostname(),
        )
    return None


def first_host(nodes: str) -> str:
    """Returns the first of Slurm's list of nodes: node[03-07,9],other is node03."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes!r}: no node")
    return "".join(part or "" for part in match.groups())


class Meeting:
    """Holds a store that all processes of the doctor reach."""

    def __init__(self, job: Job) -> None:
        """Waits for all of them, MEET_TIMEOUT seconds at most. Raises ValueError where the first
        host's name has no address."""
        from megarl.utils.rendezvous import meet

        try:
            socket.getaddrinfo(job.host, job.port)
        except OSError as e:
            said = f"{job.host}: this name of the first host has no address here ({e.strerror})"
            raise ValueError(f"{said}; set MASTER_ADDR to one that all hosts reach") from e

        self.job = job
        self._store: Any = meet(
            job.host, job.port, rank=job.rank, world_size=job.size, timeout=MEET_TIMEOUT
        )
        self._store.set(f"name_{job.rank}", f"{int(job.speaks)}{job.name}")
        names = [self._get(f"name_{rank}") for rank in range(job.size)]
        self.hosts = {r: name[1:] for r, name in enumerate(names) if name[0] == "1"}

    def _get(self, key: str) -> str:
        text: bytes = self._store.get(key)
        return text.decode()

    def shared(self, root: Path, wait: float) -> Finding:
        """Writes a file under `root` and looks for those of the other hosts, for `wait` seconds.
        Every speaker calls it."""
        rank, token = self.job.rank, os.urandom(8).hex()
        mine = root / f".megarl_doctor_{token}"
        mine.write_text(token, encoding="utf-8")
        self._store.set(f"token_{rank}", token)
        others = {r: self._get(f"token_{r}") for r in self.hosts if r != rank}
        deadline = time.monotonic() + wait
        while (unseen := _unseen(root, others)) and time.monotonic() < deadline:
            time.sleep(0.5)
        self._all(f"looked_{rank}", "looked")
        mine.unlink()
        if unseen:
            names = ", ".join(f"{self.hosts[r]} (rank {r})" for r in unseen)
            text = f"{root} here lacks the files that were written there by {names}"
            fix = "set fileroot to a directory that every host mounts at this path"
            return Finding(FAIL, "shared storage", text, fix)
        text = f"{root}: {len(self.hosts)} hosts read each other's files"
        return Finding(OK, "shared storage", text)

    def clock(self) -> Finding:
        """Compares this host's clock with that of the first. Every speaker calls it."""
        rank = self.job.rank
        first = min(self.hosts)
        if rank == first:
            for other in (r for r in self.hosts if r != first):
                self._answer(other)
            return Finding(OK, "clock", "differs by less than a second from the first host's")
        offset, doubt = min((self._ask(i) for i in range(_ASKS)), key=lambda pair: pair[1])
        if abs(offset) <= SKEW + doubt:
            return Finding(OK, "clock", "differs by less than a second from the first host's")
        text = f"{offset:+.1f} s (± {doubt:.1f} s) from that of {self.hosts[first]}"
        return Finding(
            WARN, "clock", text, "start chrony or ntpd: logs and traces will not line up"
        )

    def gather(self, findings: Sequence[Finding]) -> list[tuple[str, list[Finding]]]:
        """Returns every host's findings by the host's name, on every process."""
        if self.job.speaks:
            self._store.set(f"found_{self.job.rank}", to_json(findings))
        return [(host, from_json(self._get(f"found_{r}"))) for r, host in self.hosts.items()]

    def part(self) -> None:
        """Waits until everybody has read everything: rank 0's process holds the store."""
        self._store.set(f"done_{self.job.rank}", "")
        if self.job.rank == 0:
            for rank in range(self.job.size):
                self._get(f"done_{rank}")

    def _all(self, mine: str, what: str) -> None:
        self._store.set(mine, "")
        for rank in self.hosts:
            self._get(f"{what}_{rank}")

    def _ask(self, number: int) -> tuple[float, float]:
        """Returns (seconds that this clock is ahead, by how much that may be wrong)."""
        rank, before = self.job.rank, time.time()
        self._store.set(f"ask_{rank}_{number}", "")
        theirs = float(self._get(f"tell_{rank}_{number}"))
        after = time.time()
        return (before + after) / 2 - theirs, (after - before) / 2

    def _answer(self, rank: int) -> None:
        for number in range(_ASKS):
            self._get(f"ask_{rank}_{number}")
            self._store.set(f"tell_{rank}_{number}", repr(time.time()))


def _unseen(root: Path, tokens: Mapping[int, str]) -> list[int]:
    """Returns the ranks whose file is not there with its token in it."""
    return [r for r, token in tokens.items() if token not in _read(root, token)]


def _read(root: Path, token: str) -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield (root / f".megarl_doctor_{token}").read_text(encoding="utf-8")
