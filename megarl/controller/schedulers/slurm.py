"""Starts workers in the allocation of Slurm that this process runs in, a step for each group."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from megarl.api.scheduler import GroupSpec, WorkerSpec
from megarl.config.errors import ConfigError
from megarl.rpc.errors import WorkerDied
from megarl.rpc.gathering import Gathering
from megarl.rpc.group import WatchedGroup, node_env
from megarl.rpc.nodes import PACKAGE, node_address, write_environment
from megarl.rpc.worker import KEEP
from megarl.utils.child import KILL_TIMEOUT, Child, Signals, log_tail, stop_all, wait_until
from megarl.utils.job_token import ENV as TOKEN
from megarl.utils.job_token import ensure_job_token

ASK_TIMEOUT = 30.0  # seconds that squeue or scancel may take
FAILED = 1  # status of a worker of which srun says no number
# what srun says of tasks that have ended, like "srun: error: n1: tasks 0,2-3: Killed"
_SAID = re.compile(r"^srun: error: \S+ tasks? ([\d,-]+): (.*)$", re.MULTILINE)
_SIGNALS = {signal.strsignal(number): int(number) for number in signal.Signals}


class SlurmScheduler:
    """Starts each group by one `srun --overlap`, in the job that this process belongs to.

    Nodes share the log directory with this machine, and have this package and the workers' Python
    at the same path. interface: the network interface of this machine that nodes reach; empty is
    that of its name.
    """

    def __init__(self, *, interface: str = "") -> None:
        """Raises ConfigError outside of an allocation, or without an address."""
        self._job = os.environ.get("SLURM_JOB_ID", "")
        if not self._job:
            raise ConfigError(
                ["SLURM_JOB_ID is not set: start this in an allocation, by sbatch or salloc"]
            )
        ensure_job_token()
        self._host = node_address(interface)
        self._stack = contextlib.ExitStack()  # ends what is left, whatever one end raises

    def start(self, spec: GroupSpec) -> WatchedGroup:
        """Returns a group whose workers serve. Raises ValueError without a log directory,
        WorkerDied where a worker ends before, TimeoutError after spec.start_timeout; both with what
        srun says."""
        if not spec.log_dir:
            raise ValueError(
                f"{spec.name}: log_dir is empty; name a directory that the nodes share"
            )
        gathering = Gathering(spec, self._host)
        try:
            folder = Path(spec.log_dir).resolve()
            environment = folder / f"{spec.name}.environment.json"
            write_environment(environment, node_env(spec, gathering.address))
            step = f"{spec.name}-{secrets.token_hex(4)}"
            log = folder / f"{spec.name}.srun.log"
            log.unlink(missing_ok=True)  # what it says of tasks is of this step
            srun = Child(
                step,
                srun_command(spec, step, environment),
                env={k: v for k, v in os.environ.items() if k != TOKEN}
                | {"PYTHONPATH": str(PACKAGE.parent)},
                log_path=str(log),
            )
        except BaseException:
            gathering.close()
            raise
        try:
            group = WatchedGroup(spec, _Step(self._job, step, spec.count, srun, log), gathering)
        except (WorkerDied, TimeoutError) as e:
            raise type(e)(f"{e}\n--- end of {log} ---\n{log_tail(log)}") from e
        self._stack.callback(group.stop)
        return group

    def close(self) -> None:
        """Ends the groups that are left."""
        self._stack.close()


def srun_command(spec: GroupSpec, step: str, environment: Path) -> list[str]:
    """Returns the command that starts a group as the step of this name. Groups with GPUs do not
    share them: their steps take what they ask for, the others lie over all."""
    log = environment.with_name(f"{spec.name}_%t.log")
    worker = [spec.python, "-m", "megarl.rpc.worker", KEEP, "--environment", str(environment)]
    return [
        *("srun", f"--job-name={step}", f"--ntasks={spec.count}", f"--output={log}"),
        *("--open-mode=append", "--export=PATH,HOME,USER,LANG,PYTHONPATH,SLURM_CONF"),
        *("--kill-on-bad-exit=0", "--wait=0", *_asks(spec.worker)),
        *(*worker, "--index-variable", "SLURM_PROCID"),
    ]


def _asks(worker: WorkerSpec) -> Iterator[str]:
    cpus = worker.cpus or 1
    yield f"--cpus-per-task={cpus}"
    if worker.gpus:
        yield from ("--exact", f"--gpus-per-task={worker.gpus}")
    else:
        yield "--overlap"
    if worker.memory:  # Slurm has no bound for a task, but one for each of its cores
        yield f"--mem-per-cpu={-(-worker.memory // (cpus << 20))}M"
    elif worker.gpus:
        yield "--mem=0"


def ended_tasks(said: str) -> dict[int, int]:
    """Returns the exit statuses, as a shell gives them, of the tasks that srun says have ended."""
    found: dict[int, int] = {}
    for tasks, how in _SAID.findall(said):
        if code := re.search(r"xited with exit code (\d+)", how):
            status = int(code[1])
        else:
            number = _SIGNALS.get(how.removesuffix(" (core dumped)"))
            status = 128 + number if number is not None else FAILED
        found |= dict.fromkeys(_numbers(tasks), status)
    return found


def _numbers(ranges: str) -> Iterator[int]:
    """Yields the numbers of a list like 0,2-3."""
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


class _Step:
    """Holds the srun of a group and what it says."""

    def __init__(self, job: str, name: str, count: int, srun: Child, log: Path) -> None:
        self._job, self._name, self._count, self._srun, self._log = job, name, count, srun, log

    def poll(self) -> Mapping[int, int]:
        status = self._srun.poll()  # before what it said is read, which is then all
        said = self._log.read_text(errors="replace") if self._log.exists() else ""
        ended = ended_tasks(said)
        if status is None:
            return ended
        # of those that ended well it says nothing; where it could not start them, nothing of any
        rest = 0 if ended or status == 0 else status
        return dict.fromkeys(range(self._count), rest) | ended

    def close(self) -> None:
        """Kills the step, by its number: srun's own end would leave it."""
        if self._srun.poll() is None:
            named = ["squeue", "--steps", "--noheader", f"--jobs={self._job}", "--format=%i %j"]
            for line in _ask(named).splitlines():
                number, _, name = line.strip().partition(" ")
                if name.strip() == self._name:
                    _ask(["scancel", "--signal=KILL", number])
            wait_until(lambda: self._srun.poll() is not None, timeout=KILL_TIMEOUT)
        stop_all([self._srun], Signals(), timeout=0)


def _ask(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT).stdout
