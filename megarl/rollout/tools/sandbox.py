"""Runs a Python program that nobody has read, such as a model's answer, in a process that can
compute, write a few files of its own, and nothing else. docs/security.md says what is protected.

`confine.py` is the inner side: it takes the process's rights away before the program begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
import sysconfig
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from megarl.rollout.tools import confine

PREFIX = "megarl-sandbox-"  # of the names of the programs' directories
KILL_TIMEOUT = 10.0  # seconds for the kernel to end a killed process
START_TIMEOUT = 120.0  # seconds for a process to be confined, on a machine that is very busy
LOOK_INTERVAL = 0.05  # seconds between two looks at the files that the program makes
MAX_FILES, MAX_THREADS = 256, 64
_MIB = 1 << 20
# what an interpreter reads beside its own directories
_SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib", "/usr/share/zoneinfo")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/random", "/dev/zero")


class SandboxError(RuntimeError):
    """Says that the sandbox itself failed: the machine cannot confine a process, there was no
    process to be had, or somebody killed it. It says nothing about the program."""


class SandboxLost(SandboxError):
    """Says that one process was lost, by a kill from outside or on a machine that is too busy to
    start it: another one may do."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds a program: wall time and CPU time in seconds, memory (address space), each file and
    all files in bytes, bytes of each of stdout and stderr. Raises ValueError for one that is not
    positive."""

    wall: float = 10.0
    cpu: int = 10
    memory: int = 1024 * _MIB
    file_size: int = 16 * _MIB
    files: int = 64 * _MIB
    output: int = 64 * 1024

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"sandbox limit {name}={value}: use a positive number")


@dataclass(frozen=True, kw_only=True)
class Ran:
    """Describes a program's end. `ended` is "ok" (exit 0), "error" (another exit, `stderr` says
    why), "time", "output", "files", "threads" (the limit it was killed for) or "signal" (`code` is
    minus its number). stdout and stderr are cut at the limit."""

    ended: str
    code: int
    stdout: str
    stderr: str


async def run_program(
    source: str,
    *,
    stdin: str = "",
    limits: Limits | None = None,
    show_last: bool = False,
    files: Sequence[IO[bytes]] = (),
) -> Ran:
    """Runs the Python program `source` to its end, or to the first limit it meets; nothing of it is
    left. A cancellation kills it. show_last: print the value of a last line that is an expression.
    files: open ones that it gets under their numbers; they are closed here. Raises SandboxError."""
    limits = limits or Limits()
    try:
        with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as directory:
            program = Path(directory) / "program.py"
            program.write_text(source, encoding="utf-8", errors="replace")
            return await _run(program, stdin.encode(errors="replace"), limits, show_last, files)
    except OSError as e:
        raise SandboxError(f"no process for the sandbox: {e}") from e
    finally:
        for file in files:
            file.close()


async def _run(
    program: Path, stdin: bytes, limits: Limits, show_last: bool, files: Sequence[IO[bytes]]
) -> Ran:
    ours, theirs = os.pipe()
    others = _cpu_of_children()
    try:
        try:
            passed = (theirs, *(file.fileno() for file in files))
            process = await _start(program, limits, passed, show_last)
        finally:
            os.close(theirs)
            for file in files:
                file.close()
        watch = _Watch(process, limits, program.parent, ours, others)
        ended, out, err = await watch.run(stdin)
        code = process.returncode or 0
        # a program cannot do it to itself, and the kernel does not before its time is over
        if not ended and -code == signal.SIGKILL and watch.cpu_at_most() < limits.cpu:
            raise SandboxLost("somebody killed the sandbox's process, for want of memory perhaps")
        watch.check_confined()
    finally:
        os.close(ours)
    if not ended:
        ended = "ok" if code == 0 else "error" if code > 0 else "signal"
        if -code in (signal.SIGXCPU, signal.SIGKILL):
            ended = "time"
    return Ran(ended=ended, code=code, stdout=out, stderr=err)


async def _start(
    program: Path, limits: Limits, passed: tuple[int, ...], show_last: bool
) -> Process:
    job = {
        "program": str(program),
        "directory": str(program.parent),
        "readable": readable_paths(),
        "status": passed[0],
        "parent": os.getpid(),
        "show_last": show_last,
        "cpu": limits.cpu,
        "memory": limits.memory,
        "file_size": limits.file_size,
    }
    home = str(program.parent)
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-B", "-X", "utf8", confine.__file__, json.dumps(job)),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        cwd=home,
        env={"HOME": home, "TMPDIR": home, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        pass_fds=passed,
        start_new_session=True,
    )


def _cpu_of_children() -> float:
    """Returns the seconds of CPU time that processes have used which we started and which ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@cache
def readable_paths() -> list[str]:
    """Returns what a program may read: the interpreter, the packages beside it, and the machine's
    shared libraries."""
    paths = sysconfig.get_paths()
    found = {*(paths[k] for k in ("stdlib", "platstdlib", "purelib", "platlib")), *_SYSTEM}
    found |= {os.path.join(sys.base_prefix, "lib"), os.path.join(sys.prefix, "pyvenv.cfg")}
    found |= {p for p in sys.path if os.path.basename(p) == "site-packages"}  # of .pth files, too
    found |= {sys.executable, os.path.realpath(sys.executable), *_SYSTEM_FILES}
    return sorted(path for path in found if os.path.exists(path))


class _Watch:
    """Watches a process to its end, or to a limit. asyncio reaps it and tells nobody what CPU time
    it used. On a pipe it says before the program begins "1" where it is confined, "!" and why where
    it is not."""

    def __init__(
        self, process: Process, limits: Limits, directory: Path, pipe: int, others: float
    ) -> None:
        """others: `_cpu_of_children()` from before the process began."""
        os.set_blocking(pipe, False)
        self._process, self._limits, self._directory = process, limits, directory
        self._pipe, self._said, self._others = pipe, "", others
        self._used, self._looked, self._threads = 0.0, time.monotonic(), 1
        self._full = asyncio.Event()

    async def run(self, stdin: bytes) -> tuple[str, str, str]:
        """Returns for which limit the process was killed, "" where it ended by itself, and its
        output. It has ended then, also on a cancellation."""
        process = self._process
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise SandboxError("the sandbox's process has no pipes")
        out, err = bytearray(), bytearray()
        tasks: list[asyncio.Task[Any]] = [
            asyncio.ensure_future(_feed(process.stdin, stdin)),
            asyncio.ensure_future(self._collect(process.stdout, out)),
            asyncio.ensure_future(self._collect(process.stderr, err)),
            asyncio.ensure_future(process.wait()),
        ]
        try:
            ended = await self._first_limit(tasks)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            # the pipes are read to their ends, for until then asyncio says of no process that it
            # ended
            _, pending = await asyncio.wait(tasks, timeout=KILL_TIMEOUT)
            for task in pending:
                task.cancel()
        if pending:
            raise SandboxError(f"a killed process did not end within {KILL_TIMEOUT:g} s")
        return ended, out.decode(errors="replace"), err.decode(errors="replace")

    async def _first_limit(self, tasks: list[asyncio.Task[Any]]) -> str:
        """Waits for the process's end or a limit. The wall clock begins when it is confined: a
        machine that is slow to start it takes nothing of the program's time. Raises SandboxLost
        where that takes START_TIMEOUT."""
        confined, deadline = False, time.monotonic() + START_TIMEOUT
        while True:
            self._look()
            _, pending = await asyncio.wait(tasks, timeout=LOOK_INTERVAL)
            if not confined and self._is_confined():
                confined, deadline = True, time.monotonic() + self._limits.wall
            if self._full.is_set():
                return "output"
            if _too_many_files(self._directory, self._limits.files):
                return "files"
            if self._threads > MAX_THREADS:
                return "threads"
            if not pending:
                return ""
            if time.monotonic() > deadline:
                if confined:
                    return "time"
                raise SandboxLost(f"no process was confined within {START_TIMEOUT:g} s")

    async def _collect(self, pipe: asyncio.StreamReader, into: bytearray) -> None:
        most = self._limits.output
        while chunk := await pipe.read(65536):
            into += chunk[: most - len(into)]
            if len(into) >= most:
                self._full.set()

    def _look(self) -> None:
        """Reads what the process has used until now, and its threads, where it is not reaped
        yet."""
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
            fields = stat.rpartition(")")[2].split()
            self._used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            self._looked, self._threads = time.monotonic(), int(fields[17])

    def cpu_at_most(self) -> float:
        """Returns the most seconds that the process, which has ended, can have used: all cores
        since the last look, and no more than all our children together."""
        since = len(os.sched_getaffinity(0)) * (time.monotonic() - self._looked)
        return min(self._used + since, _cpu_of_children() - self._others)

    def _is_confined(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._said += os.read(self._pipe, 65536).decode(errors="replace")
        return self._said == "1"

    def check_confined(self) -> None:
        """Raises SandboxError where the process has ended unconfined."""
        if self._is_confined():
            return
        why = self._said.removeprefix("!") or "its process ended before it was confined"
        raise SandboxError(
            f"this machine cannot confine a program, so it was not run: {why}; the sandbox needs "
            "Linux with seccomp and Landlock"
        )


async def _feed(pipe: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # the program may not want to read it
        pipe.write(data)
        await pipe.drain()
        pipe.close()
        await pipe.wait_closed()


def _too_many_files(directory: Path, most: int) -> bool:
    """Returns whether the files of a directory, which has no subdirectories, are too many or too
    large."""
    total = count = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            count += 1
            with contextlib.suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_blocks * 512
            if count > MAX_FILES or total > most:
                return True
    return False
