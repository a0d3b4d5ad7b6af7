"""Starts, watches and ends helper processes, none of which outlives this one.

Every helper leads a process group. Nobody writes to a pipe whose writing end this process holds and
whose reading end it shares with the group's leader; the kernel is asked to kill the group when the
writing end is gone, however this process ended (Linux). Unlike a parent-death signal this reaches
the whole group, also where its leader has ended before, and does not depend on the thread that
started it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import multiprocessing as mp
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

from megarl.utils import stopping
from megarl.utils.env import JOB_TOKEN, job_token

POLL_INTERVAL = 0.1  # seconds
TERM_TIMEOUT = 30.0  # seconds a process may take to end after a signal, as torchrun gives
ORPHAN_GRACE = 1.0  # for what an ended process left running
KILL_TIMEOUT = 10.0
MOST_FILES = 8192  # that a process is taken to have open
LOG_TAIL = 40  # lines of a log that are shown of a process that died
# runs a command once its group is tied: who starts it may be killed just before that; what Python
# changes as it starts, signals and the environment's LC_CTYPE, the command has as it was
_TIED = """
import os, signal, sys
if os.read(0, 1):
    for number in signal.SIGPIPE, signal.SIGXFSZ:
        signal.signal(number, signal.SIG_DFL)
    with open("/proc/self/environ", "rb") as f:
        given = f.read().split(b"\\0")[:-1]
    os.execvpe(sys.argv[1], sys.argv[1:], dict(entry.split(b"=", 1) for entry in given))
"""


class Child:
    """Starts a process that leads its own process group, so that all it starts can be ended with
    it. The group ends with this process, however that ends."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log_path: str | Path = "",
        private_log: bool = False,
    ) -> None:
        """Starts the command. log_path: gets its output, in place of this process's own.
        private_log: nobody else may read the log. Raises FileNotFoundError for no such program,
        PermissionError for a file that cannot be run."""
        self.name, self.log_path = name, log_path and Path(log_path)
        if shutil.which(command[0], path=env.get("PATH", os.defpath)) is None:
            why = errno.EACCES if os.path.exists(command[0]) else errno.ENOENT
            raise OSError(why, os.strerror(why), command[0])
        with _tether(self) as fd, _output(self.log_path, private_log) as out:
            self._process = subprocess.Popen(
                [sys.executable, "-ISc", _TIED, *command],
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT if out else None,
                start_new_session=True,
                pass_fds=(fd,),
            )
            _tie(fd, self.pid)
            assert self._process.stdin is not None
            # of a process that has ended already, poll tells
            with contextlib.suppress(BrokenPipeError), self._process.stdin as go:
                go.write(b"\n")

    @property
    def pid(self) -> int:
        """Returns the process id, which is the id of its group, too."""
        return self._process.pid

    def poll(self) -> int | None:
        """Returns the exit status as a shell gives it (128 + n after signal n), None while
        it runs."""
        status = self._process.poll()
        return 128 - status if status is not None and status < 0 else status

    def signal(self, number: int) -> None:
        """Sends a signal to the leader only, which ends what it started."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def wait(self, timeout: float) -> None:
        """Waits for the end. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        self._process.wait(timeout)

    def tail(self) -> str:
        """Returns the end of the log behind a line that names it, "" where there is none."""
        return log_tail(self.log_path)


@contextlib.contextmanager
def _output(log_path: str | Path, private: bool) -> Iterator[IO[bytes] | None]:
    if not log_path:
        yield None
        return
    Path(log_path).parent.mkdir(parents=True, exist_ok=True)
    with open(log_path, "ab") as log:
        if private:
            os.fchmod(log.fileno(), 0o600)
        yield log


# the pipe whose writing end this process holds until its own end


_pipe: list[int] = []  # its reading and its writing end
_making = threading.Lock()


def _let_go() -> None:
    """Closes the ends that a fork has copied: the groups are its parent's."""
    global _making
    _making = threading.Lock()
    for fd in _pipe:
        os.close(fd)
    _pipe.clear()


os.register_at_fork(after_in_child=_let_go)


@contextlib.contextmanager
def _tether(child: Child) -> Iterator[int]:
    """Yields a reading end that a process to start inside gets, to be tied. This process has it as
    long as it has `child`."""
    with _making:
        if not _pipe:
            reading, writing = os.pipe()
            # of a process that ends Linux releases the highest number first
            high = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], MOST_FILES) - 64
            _pipe.extend((reading, fcntl.fcntl(writing, fcntl.F_DUPFD_CLOEXEC, high)))
            os.close(writing)
    # opened anew: whom to signal is a property of the open file, and every group has its own
    fd = os.open(f"/proc/self/fd/{_pipe[0]}", os.O_RDONLY | os.O_NONBLOCK)
    try:
        yield fd
    except BaseException:
        os.close(fd)
        raise
    weakref.finalize(child, os.close, fd).atexit = False


def _tie(fd: int, pgid: int) -> None:
    """Has the kernel kill the group once nobody holds the writing end; its leader has `fd`, too."""
    fcntl.fcntl(fd, fcntl.F_SETOWN, -pgid)
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)


def end_with_parent() -> None:
    """Has a process of multiprocessing lead a process group that is killed when its parent ends,
    even while a C extension holds the GIL (Linux). Ends it where the parent has ended already."""
    os.setpgid(0, 0)
    parent = mp.parent_process()
    assert parent is not None
    _tie(parent.sentinel, os.getpid())
    if not parent.is_alive():  # it was too early for the signal
        raise SystemExit(1)


def signal_group(pgid: int, number: int) -> bool:
    """Sends a signal to a process group; returns False when the whole group has ended."""
    try:
        os.killpg(pgid, number)
    except ProcessLookupError:
        return False
    return True


def stop_all(
    children: Sequence[Child],
    signals: Signals,
    *,
    first: int = signal.SIGTERM,
    whole: bool = False,
    timeout: float = TERM_TIMEOUT,
) -> None:
    """Sends `first` to each, or where `whole` to its group, waits `timeout` s for all, then kills
    what is left of the groups.

    One more signal from the user cuts the waiting short, and so does a second one before.
    """
    for child in children:
        if whole:
            signal_group(child.pid, first)
        else:
            child.signal(first)
    patience = min(len(signals.received), 1)

    def ended() -> bool:
        return all(child.poll() is not None for child in children)

    wait_until(lambda: len(signals.received) > patience or ended(), timeout=timeout)
    if ended():  # what they started gets a moment, too
        left = [c for c in children if signal_group(c.pid, signal.SIGTERM)]
        wait_until(lambda: not any(signal_group(c.pid, 0) for c in left), timeout=ORPHAN_GRACE)
    for child in children:
        signal_group(child.pid, signal.SIGKILL)
    for child in children:
        child.wait(KILL_TIMEOUT)


def wait_until(done: Callable[[], bool], *, timeout: float) -> bool:
    """Waits until `done` is true, at most `timeout` seconds; returns whether it came true."""
    deadline = time.monotonic() + timeout
    while not (ended := done()) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL)
    return ended


class Signals:
    """Remembers SIGINT, SIGTERM and SIGHUP (but for nohup), and those `also` given, instead of
    dying of them. settle: seconds after one in which the same signal again counts as the same wish,
    and so does SIGUSR1 before or after another: a batch script passes a signal on by it that all
    processes get as well, and either may come first."""

    def __init__(self, *also: signal.Signals, settle: float = 0.0) -> None:
        self.received: list[int] = []
        self._also, self._settle, self._settled = also, settle, 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (*stopping.heard(), *self._also):
            self._before[number] = signal.signal(number, self._note)
        return self

    @property
    def status(self) -> int:
        """Returns the exit status of a process that the first signal ends; SIGUSR1 is a scheduler's
        word for SIGTERM."""
        number = self.received[0]
        return 128 + (signal.SIGTERM if number == signal.SIGUSR1 else number)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        last = self.received[-1] if self.received else None
        again = number == last or signal.SIGUSR1 in (number, last)
        if not again or time.monotonic() >= self._settled:
            self._settled = time.monotonic() + self._settle
            self.received.append(number)


@contextlib.contextmanager
def deaf_to(number: signal.Signals) -> Iterator[None]:
    """Has processes that start in the block not hear of a signal. Some schedulers send theirs to
    all processes of a node, and the default is to die of it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def spelled(status: int) -> str:
    """Returns an exit status as a shell gives it, with the signal that it stands for."""
    try:
        name = signal.Signals(status - 128).name
    except ValueError:
        return str(status)
    cause = ": by hand, or by the system for want of memory" if name == "SIGKILL" else ""
    return f"{status} ({name}{cause})"


def log_tail(path: str | Path) -> str:
    """Returns the end of a process's log, without the job's token, after a line that names the
    file; "" if there is no such file."""
    if not os.path.isfile(path):
        return ""
    lines = Path(path).read_text(errors="replace").splitlines()[-LOG_TAIL:]
    end = "\n".join(lines).replace(job_token() or "\0", f"<{JOB_TOKEN}>")
    return f"\n--- end of {path} ---\n{end}"


class LogTail:
    """Prints what a log file gets, each line behind `label`. stderr: there, not to stdout. whole:
    what is there already, too."""

    def __init__(
        self, path: Path, label: str = "", *, stderr: bool = False, whole: bool = True
    ) -> None:
        self._path, self._label, self._stderr = path, label, stderr
        self._at = 0 if whole or not path.exists() else path.stat().st_size

    def show(self, *, rest: bool = False) -> None:
        """Prints the lines that came since the last call. rest: a line without an end, too."""
        if not self._path.exists():
            return
        with self._path.open("rb") as f:
            f.seek(self._at)
            more = f.read()
        if not rest:
            more = more[: more.rfind(b"\n") + 1]
        self._at += len(more)
        out = sys.stderr if self._stderr else sys.stdout
        for line in more.decode(errors="replace").splitlines():
            print(f"{self._label}{line}", file=out)
        out.flush()
