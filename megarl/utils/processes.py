"""Runs child processes in groups of their own, takes signals as flags, and has a reaper for the
worst case."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

from megarl.utils import stopping
from megarl.utils.job_token import ENV, job_token
from megarl.utils.tether import Tether

POLL_INTERVAL = 0.1  # seconds
TERM_TIMEOUT = 30.0  # seconds a process may take to end after a signal, as torchrun gives
ORPHAN_GRACE = 1.0  # for what an ended process left running
KILL_TIMEOUT = 10.0
LOG_TAIL = 40  # lines of a log that are shown of a process that died


class Child:
    """Starts a process that leads its own process group, so that all it starts can be ended with
    it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        tether: Tether,
        log_path: str = "",
    ) -> None:
        """Starts the command. log_path: gets its output, in place of this process's own."""
        self.name, self.log_path = name, log_path
        with tether.end() as fds, _output(log_path) as out:
            self._process = subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT if out else None,
                start_new_session=True,
                pass_fds=fds,
            )
            tether.tie(fds, self._process.pid)

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


def _output(log_path: str) -> contextlib.AbstractContextManager[IO[bytes] | None]:
    if not log_path:
        return contextlib.nullcontext()
    Path(log_path).parent.mkdir(parents=True, exist_ok=True)
    return open(log_path, "ab")


def spelled(status: int) -> str:
    """Returns an exit status as a shell gives it, with the signal that it stands for."""
    try:
        name = signal.Signals(status - 128).name
    except ValueError:
        return str(status)
    cause = ": by hand, or by the system for want of memory" if name == "SIGKILL" else ""
    return f"{status} ({name}{cause})"


def free_port(host: str = "127.0.0.1", port: int = 0) -> int:
    """Returns a TCP port that was free a moment ago: `port`, or any for 0. Raises RuntimeError
    where it is taken: another server at our port would pass for ours."""
    # a server listens only when it has imported everything; until then the system would give a port
    # of its own range, which begins here, to any socket
    candidates = [port] if port else random.SystemRandom().sample(range(20000, 32768), k=20)
    for candidate in candidates:
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            try:
                s.bind((host, candidate))
            except OSError as e:
                error = e
                continue
            return candidate
    raise RuntimeError(f"port {candidate} of {host} cannot be listened at: {error}") from error


def log_tail(path: Path) -> str:
    """Returns the end of a process's log, without the job's token."""
    lines = path.read_text(errors="replace").splitlines()[-LOG_TAIL:]
    return "\n".join(lines).replace(job_token() or "\0", f"<{ENV}>")


class LogEcho:
    """Writes what is appended to a log from now on to this process's stderr, too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = path.stat().st_size if path.exists() else 0

    def show(self) -> None:
        """Writes the whole lines that have come since the last call."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as log:
            log.seek(self._at)
            new = log.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._at += len(whole)
            sys.stderr.write(whole.decode(errors="replace"))
            sys.stderr.flush()


def signal_group(pgid: int, number: int) -> bool:
    """Sends a signal to a process group; returns False when the whole group has ended."""
    try:
        os.killpg(pgid, number)
    except ProcessLookupError:
        return False
    return True


class Signals:
    """Remembers SIGINT, SIGTERM and SIGHUP (but for nohup), and those `also` given, instead of
    dying of them."""

    def __init__(self, *also: signal.Signals) -> None:
        self.received: list[int] = []
        self._also = also
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (*stopping.heard(), *self._also):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
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


def stop_all(
    children: Sequence[Child],
    signals: Signals,
    *,
    first: int = signal.SIGTERM,
    timeout: float = TERM_TIMEOUT,
) -> None:
    """Sends `first` to each, waits `timeout` s for all, then kills what is left of the groups.

    One more signal from the user cuts the waiting short.
    """
    for child in children:
        child.signal(first)
    seen = len(signals.received)
    wait_until(
        lambda: len(signals.received) > seen or all(c.poll() is not None for c in children),
        timeout=timeout,
    )
    if all(c.poll() is not None for c in children):  # what they started gets a moment, too
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


class Reaper:
    """Ends process groups if this process dies without a chance to do so (SIGKILL, OOM).

    It is a process of its own that holds the read end of a pipe: end of file means we are gone.
    What is tied to `tether` ends even if the reaper is killed with us, then without a warning.
    """

    def __init__(self) -> None:
        self.tether = Tether()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _REAPER],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
            pass_fds=(self.tether.held,),
        )
        assert self._process.stdin is not None
        self._orders = self._process.stdin

    def watch(self, pgid: int) -> None:
        """Has the group ended with this process."""
        self._tell(f"+{pgid}")

    def forget(self, pgid: int) -> None:
        """Stops watching a group. Call it once the group has ended: its number may be given to
        others."""
        self._tell(f"-{pgid}")

    def close(self) -> None:
        """Ends the reaper, which then ends the groups it still watches."""
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()
        self._process.wait(KILL_TIMEOUT)
        self.tether.close()

    def _tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # somebody ended it; we still clean up ourselves
            self._orders.write(line + "\n")
            self._orders.flush()


_REAPER = """
import os, signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for number, patience in ((signal.SIGTERM, 5), (signal.SIGKILL, 0)):
    for group in groups:
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            pass
    if groups:
        time.sleep(patience)
"""
