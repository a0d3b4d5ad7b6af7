"""Finds a TCP port that is free, and the processes that listen at one, where there is /proc."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

_LISTEN = "0A"  # a socket's state in /proc/net/tcp


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


def strangers_at(port: int, session: int) -> list[str]:
    """Returns the processes that listen at `port`, as "PID (command)", where none of the session
    (a process id) does; [] where one does, or nothing is known of the port."""
    sockets = set(_sockets(port))
    if not sockets:
        return []
    pids = [pid for pid in _pids() if _holds(pid, sockets)]
    if any(_session(pid) == session for pid in pids):
        return []
    return [f"{pid} ({_command(pid)})" for pid in pids] or ["a process of another user"]


def _sockets(port: int) -> Iterator[str]:
    """Yields what the descriptors of the sockets that listen at `port` are links to."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                yield f"socket:[{fields[9]}]"


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _holds(pid: int, sockets: set[str]) -> bool:
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            return any(_link(entry.path) in sockets for entry in entries)
    except OSError:  # it has ended, or is another user's
        return False


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        return words.decode(errors="replace").strip()[:200]
    except OSError:
        return "has ended"
