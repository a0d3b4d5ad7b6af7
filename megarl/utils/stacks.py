"""Shows what processes are doing: SIGUSR2 has a process of megarl write the stacks of all its
threads, and `show` says of any process where it stands, also of one that does not answer (Linux).

py-spy reads the stacks of another process from outside, if it is installed (extra `stacks`)
and the system allows it: to root, and where kernel.yama.ptrace_scope is 0. Else the process is
asked by SIGUSR2. `strangers_at` finds who listens at a port, where the system has /proc.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from megarl.utils.extras import install_hint

STDERR = 2
SPY_TIMEOUT = 10.0  # seconds py-spy may take for a process
SETTLE = 0.5  # seconds a process has to write its stacks
_STOPPED = ("T", "t")  # states of a process that does not run until SIGCONT
_LISTEN = "0A"  # a socket's state in /proc/net/tcp


def dump_on_signal() -> None:
    """Has SIGUSR2 write the Python stacks of all threads to stderr, whatever they wait for. The
    process goes on, and its forks do the same."""
    faulthandler.register(signal.SIGUSR2, file=STDERR, all_threads=True)


def prepare_signals() -> None:
    """Prepares a command: SIGUSR2 writes its stacks, and SIGINT ends it. A shell ignores SIGINT in
    the programs that it starts in the background."""
    dump_on_signal()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def state(pid: int) -> str:
    """Returns the letter of a process's state as ps shows it, "" where there is no such process."""
    return _status(pid).get("State", "")[:1]


def session(leader: int) -> list[int]:
    """Returns the ids of the processes that `leader` started and that did not leave its session,
    and its own: it comes first. Not those that have ended; empty where there is no /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            fields = stat.read_text().rsplit(")", 1)[1].split()
            if int(fields[3]) == leader and fields[0] not in "ZX":
                found.append(int(stat.parent.name))
    return sorted(found, key=lambda pid: (pid != leader, pid))


def show(pid: int) -> str:
    """Returns a process's command, state, and the kernel function that it waits in, with its stacks
    as py-spy reads them; without py-spy the process is asked to write them to its own log. One that
    is stopped goes on then: call this for processes that are to end."""
    about = _status(pid)
    if not about:
        return f"process {pid}: ended"
    head = f"process {pid} ({_program(pid)}): state {about['State']}"
    if waits := _read(pid, "wchan").strip("0"):
        head += f", in the kernel's {waits}"
    if (stacks := _spied(pid)) is not None:
        return f"{head}\n{stacks}"
    if not int(about["SigCgt"], 16) >> (signal.SIGUSR2 - 1) & 1:
        return f"{head}; its stacks cannot be read ({install_hint('stacks')})"
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR2)
        if state(pid) in _STOPPED:
            os.kill(pid, signal.SIGCONT)
    time.sleep(SETTLE)
    return f"{head}; its stacks are in its own log"


def strangers_at(port: int, leader: int) -> list[str]:
    """Returns the processes that listen at `port`, as "PID (command)", where none of the session of
    `leader` does; [] where one does, or nothing is known of the port."""
    sockets = set(_sockets(port))
    if not sockets:
        return []
    pids = [int(p.name) for p in Path("/proc").glob("[0-9]*") if _holds(p / "fd", sockets)]
    if set(pids) & set(session(leader)):
        return []
    return [f"{pid} ({_program(pid)})" for pid in pids] or ["a process of another user"]


def _sockets(port: int) -> Iterator[str]:
    """Yields what the descriptors of the sockets that listen at `port` are links to."""
    for table in ("tcp", "tcp6"):
        for fields in map(str.split, _read("net", table).splitlines()[1:]):
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                yield f"socket:[{fields[9]}]"


def _holds(descriptors: Path, sockets: set[str]) -> bool:
    """Returns whether a process has one of the sockets open; False where it has ended, or is
    another user's."""
    with contextlib.suppress(OSError):
        for name in os.listdir(descriptors):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                if os.readlink(descriptors / name) in sockets:
                    return True
    return False


def _spied(pid: int) -> str | None:
    """Returns the stacks that py-spy reads, None where it cannot."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if (spy := shutil.which("py-spy", path=path)) is None:
        return None
    command = [spy, "dump", "--pid", str(pid)]
    if state(pid) in _STOPPED:  # else it waits until it has stopped it itself
        command.append("--nonblocking")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SPY_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # it begins with the command, whose arguments may hold a secret
    return done.stdout.partition("\nPython v")[2].strip() if done.returncode == 0 else None


def _program(pid: int) -> str:
    """Returns the beginning of a command, without its options and overrides: one may be secret."""
    words = [w for w in _read(pid, "cmdline").split("\0")[:4] if w]
    return " ".join(w for w in words if "=" not in w and "\n" not in w)


def _status(pid: int) -> dict[str, str]:
    """Returns the fields of /proc/PID/status, none where there is no such process."""
    lines = (line.partition(":") for line in _read(pid, "status").splitlines())
    return {name: value.strip() for name, _, value in lines}


def _read(pid: int | str, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""
