"""Code that a policy could write: it tries to leave the namespaces of examples/cli_agent.py, and to
work in them. It runs under any Python, alone or imported by tests: run(OUTSIDE, REPORT) writes what
each attempt came to, an errno or 0, as JSON to REPORT. OUTSIDE is a directory of its user."""

from __future__ import annotations

import ctypes
import errno
import json
import multiprocessing
import os
import platform
import pty
import socket
import stat
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
MACHINE = platform.machine()
IO_URING, MOUNT_SETATTR, KEYCTL = 425, 442, {"x86_64": 250, "aarch64": 219}[MACHINE]
NEW_USER, NEW_MOUNTS = 0x10000000, 0x20000
REMOUNT_BIND = 32 | 4096
SHM_KEY = 0x6D656761
IN_FAMILY = {"vsock": 40, "unix": socket.AF_UNIX, "packet": 17, "alg": 38}


def call(name: str, *arguments: Any) -> int:
    return ctypes.get_errno() if getattr(LIBC, name)(*arguments) < 0 else 0


def tried(attempt: Callable[[], Any]) -> int:
    try:
        attempt()
    except OSError as e:
        return e.errno or -1
    return 0


def remounts() -> dict[str, int]:
    writable = struct.pack("4Q", 0, 1, 0, 0)
    return {
        "remount": call("mount", None, b"/", None, REMOUNT_BIND, None),
        "mount_setattr": call("syscall", MOUNT_SETATTR, -100, b"/", 0, writable, 32),
        "tmpfs": call("mount", b"tmpfs", b"/usr", b"tmpfs", 0, None),
        **{f"umount2 {at}": call("umount2", at.encode(), 2) for at in ("/run", "/dev", "/proc")},
    }


def nested() -> dict[str, int]:
    """The same with all capabilities, in another user namespace."""
    ours, theirs = os.pipe()
    if (pid := os.fork()) == 0:
        if call("unshare", NEW_USER | NEW_MOUNTS) == 0:
            found = remounts()
            del found["tmpfs"]  # which hides something from this process alone
            os.write(theirs, json.dumps(found).encode())
        os._exit(0)
    os.close(theirs)
    os.waitpid(pid, 0)
    with open(ours, "rb") as file:
        return json.loads(file.read() or b"{}")


def works() -> dict[str, Any]:
    """What programs need."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()
    for end in socket.socketpair():
        end.close()
    Path("/dev/shm/x").write_text("")
    Path("/dev/null").write_text("x")
    with multiprocessing.get_context("fork").Pool(1) as pool:
        (square,) = pool.map(abs, [-4])
    os.close(pty.openpty()[1])
    return {"random": len(Path("/dev/urandom").open("rb").read(3)), "pool": square}


def run(outside: Path, report: Path) -> None:
    status = Path("/proc/self/status").read_text().splitlines()
    block = Path("/srv/repository/block")
    found: dict[str, Any] = {
        "capabilities": {line.split()[1] for line in status if line.startswith("Cap")},
        "remounts": remounts(),
        "nested": nested(),
        "write": tried(lambda: (outside / ".bashrc").open("a").write("x")),
        "mknod": tried(lambda: os.mknod(block, stat.S_IFBLK | 0o600, os.makedev(7, 0))),
        "devices": sorted(os.listdir("/dev")),
        "device outside": tried(lambda: (outside / "null").open("w")),
        "sockets": {k: tried(lambda f=f: socket.socket(f)) for k, f in IN_FAMILY.items()},  # type: ignore[misc]
        "datagrams": tried(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)),
        "io_uring": call("syscall", IO_URING, 1, bytes(120)),
        "keyring": call("syscall", KEYCTL, 0, -4, 0),
        "first process": tried(lambda: Path("/proc/1/mem").read_bytes()),
        "shm": LIBC.shmget(SHM_KEY, 4096, 0o1600) >= 0,
        "works": works(),
    }
    found["capabilities"] = sorted(found["capabilities"])
    report.write_text(json.dumps(found))


def refused(found: Any) -> bool:
    """Whether every attempt in `found` failed because the kernel does not permit it."""
    wanted = {errno.EPERM, errno.EACCES, errno.EROFS, errno.EINVAL}
    return bool(found) and all(e in wanted for e in found.values())


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]))
