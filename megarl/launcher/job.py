"""Says what a job is: its nodes, and every process with its command, environment, ports and log.

`make.py` builds the records from a plan alone, so that launchers differ only in how processes
start: the local one runs them itself, on a cluster one agent a node does (node.py). A value that is
known only when a node has started stands as a mark, which `fill` replaces:

    @{address:server.0}  host:port of that endpoint; @{host:...} and @{port:...} are its halves
    @{gpus:0,1}          names of those of the node's GPUs
    @{cores:4}           the node's cores divided by 4, at least 1

Nodes read the records, and the variables that processes get, from files (`JobFiles`).
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

PACKAGE = Path(__file__).resolve().parents[1]

SERVER, TRAINER, REWARDS, JUDGE = "server", "trainer", "rewards", "judge"
CONTROLLER, DRIVER = "controller", "driver"  # of trainers that are its workers, and a driver
SERVERS = (SERVER, JUDGE, REWARDS)  # trainers wait until these answer
MASTER = "master"  # the endpoint that the ranks meet at
MASTER_MARKS = f"@{{host:{MASTER}}}", f"@{{port:{MASTER}}}"
Resources = dict[str, float]  # of Ray, by name
# what processes of a cluster get of the environment that a job is started from
FORWARDED = """
PATH LD_LIBRARY_PATH PYTHONPATH VIRTUAL_ENV HOME USER LANG LC_* TMPDIR MEGARL_* OMP_* MKL_*
CUDA_HOME CUDA_DEVICE_* CUDA_LAUNCH_* NCCL_* GLOO_* NVTE_* TORCH_* PYTORCH_* TRITON_* SGLANG_*
HF_* HUGGING_FACE_* TRANSFORMERS_* TOKENIZERS_* WANDB_* UCX_* FI_* *_proxy *_PROXY SSL_CERT_*
REQUESTS_CA_BUNDLE
"""
# what a process keeps of its scheduler's environment
_KEPT = (
    "SLURM*", "PMI*", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "NVIDIA_*", "PATH", "HOME",
    "USER", "TMPDIR", "RAY_*", "KUBERNETES_*",
)  # fmt: skip
_MARK = re.compile(r"@\{(address|host|port|gpus|cores):([^{}]+)\}")


@dataclass(frozen=True, kw_only=True)
class Task:
    """Describes one process. index: a server's number, or a rank. part: which of a server's nodes.
    ports: endpoints that its node chooses. log: a file, empty for the launcher's own output.
    restarts: times it is started again alone, while the run goes on."""

    role: str
    index: int
    part: int = 0
    node: int
    gpus: str | None = None
    command: tuple[str, ...]
    env: dict[str, str]
    ports: tuple[str, ...] = ()
    log: str = ""
    restarts: int = 0

    @property
    def name(self) -> str:
        """Returns how messages call the process."""
        if self.role in (CONTROLLER, DRIVER):
            return self.role
        return f"{self.role} {self.index}" + (f" (node {self.part} of it)" if self.part else "")

    @property
    def linked(self) -> bool:
        """Returns whether the process answers over a link of the job, and not over HTTP."""
        return self.role == REWARDS

    @property
    def endpoint(self) -> str:
        """Returns the name of the endpoint of a server, a judge or a reward worker."""
        return endpoint(self.role, self.index, self.part)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Describes a whole job. pools, gpus_per_node: of each node, 0 where nothing uses GPUs.
    interface: the nodes' own, empty for that of the host name. forwarded: variables that every
    process gets as they are; the values of `hidden` ones are not shown. config: the configuration
    as it was checked, which trainers read in place of a file; empty where they read and check it
    themselves. Times are in seconds."""

    name: str
    config: str = ""
    directory: str
    working_directory: str
    pools: tuple[str, ...]
    gpus_per_node: tuple[int, ...]
    interface: str = ""
    tasks: tuple[Task, ...]
    forwarded: tuple[str, ...]
    hidden: tuple[str, ...] = ()
    python: str
    start_timeout: float
    rendezvous_timeout: float
    grace: float
    restarts: int = 0

    def of(self, role: str, node: int | None = None) -> list[Task]:
        """Returns the tasks of a role, on one node or (None) on all."""
        return [t for t in self.tasks if t.role == role and node in (None, t.node)]

    @property
    def leaders(self) -> list[Task]:
        """Returns the processes whose end is that of the run: the controller, else the trainers."""
        return self.of(CONTROLLER) or self.of(TRAINER)

    @property
    def workers(self) -> list[Task]:
        """Returns the processes that the controller calls, and ends."""
        return [*self.of(TRAINER), *self.of(DRIVER)] if self.of(CONTROLLER) else []

    def to_json(self) -> str:
        """Returns text that `from_json` reads back."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Returns the job that `to_json` wrote, or a dry run showed. Raises ValueError, TypeError
        or LookupError for other text."""
        from pydantic import TypeAdapter  # here, since launchers only write

        read = json.loads(text)
        read["forwarded"] = [*read["forwarded"]]  # of a dry run with their values
        return TypeAdapter(cls).validate_python(read)


def endpoint(role: str, index: int, part: int = 0) -> str:
    """Returns the name of the endpoint of a server, or of a further node of it; of a judge or a
    reward worker alike."""
    return f"{role}.{index}.{part}" if part else f"{role}.{index}"


def fill(
    text: str, *, address: Callable[[str], str], gpus: Callable[[str], str], cores: int
) -> str:
    """Returns `text` with its marks replaced. address: the host:port of an endpoint's name. gpus:
    the names of GPUs by their numbers on the node."""

    def value(mark: re.Match[str]) -> str:
        kind, name = mark.groups()
        if kind == "cores":
            return str(max(1, cores // int(name)))
        if kind == "gpus":
            return gpus(name)
        place = address(name)
        host, _, port = place.rpartition(":")
        return {"address": place, "host": host, "port": port}[kind]

    return _MARK.sub(value, text)


def endpoints(texts: Iterable[str]) -> list[str]:
    """Returns the names of the endpoints that `texts` have marks of."""
    kinds = ("address", "host", "port")
    marks = (m for text in texts for m in _MARK.finditer(text))
    return list(dict.fromkeys(m[2] for m in marks if m[1] in kinds))


def described(resources: Resources) -> str:
    """Returns resources as text, like GPU 8, CPU 1."""
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())


def forwarded(env: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """Returns the variables of `env` that processes on a cluster get; `more` are further names or
    patterns."""
    patterns = (*FORWARDED.split(), *more)
    return {k: env[k] for k in sorted(env) if any(fnmatch.fnmatchcase(k, p) for p in patterns)}


class JobFiles:
    """Names the files of a job: all in <run>/launch, which only the user may read. python: the
    interpreter of its nodes. job: the file of the records. environment: the file of the variables
    that processes get."""

    def __init__(self, directory: Path, python: str = sys.executable) -> None:
        self.directory, self.python = directory, python
        self.job, self.environment = directory / "job.json", directory / "environment.json"

    @classmethod
    def of(cls, job: Job) -> Self:
        """Returns those of a job, as absolute paths."""
        return cls(Path(job.working_directory, job.directory, "launch"), job.python)

    def agent(self, attempt: str, *number: str) -> list[str]:
        """Returns the command of a node's agent. number: the options that say which node it is."""
        words = ["-m", "megarl.launcher.node", "--job", str(self.job), "--environment"]
        return [self.python, *words, str(self.environment), "--attempt", attempt, *number]

    def write(self, job: Job, env: Mapping[str, str]) -> None:
        """Writes the records, and the variables that processes get, the job's token among them, for
        the user's eyes only."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.job.write_text(job.to_json(), encoding="utf-8")
        self.environment.unlink(missing_ok=True)
        fd = os.open(self.environment, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as f:
            json.dump({name: env[name] for name in job.forwarded if name in env}, f, indent=1)


def take_environment(path: Path) -> None:
    """Makes the variables of the JSON file `path` this process's environment, with those that its
    scheduler set."""
    given = json.loads(path.read_text(encoding="utf-8"))
    for name in list(os.environ):
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in _KEPT):
            del os.environ[name]
    os.environ.update(given)
