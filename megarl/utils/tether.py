"""Binds process groups to other processes, so that the kernel ends them together (Linux).

Nobody writes to a pipe. Its writing end is held by those a group must not outlive, its reading end
by the group's leader, and the kernel is asked to signal the group when the last holder of the
writing end is gone, however it went. Unlike a parent-death signal this reaches the whole group, and
does not depend on the thread that started it.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class Tether:
    """Holds the pipe. `held` is the writing end; hand it (`pass_fds`) to whatever else must not be
    outlived."""

    def __init__(self) -> None:
        self._read, self.held = os.pipe()
        self._closed = False

    @contextmanager
    def end(self) -> Iterator[tuple[int, ...]]:
        """Yields the `pass_fds` of a process to start inside, whose group `tie` then binds."""
        if sys.platform != "linux":
            yield ()
            return
        # opened anew: whom to signal is a property of the open file, and every group has its own
        fd = os.open(f"/proc/self/fd/{self._read}", os.O_RDONLY | os.O_NONBLOCK)
        try:
            yield (fd,)
        finally:
            os.close(fd)

    @staticmethod
    def tie(fds: tuple[int, ...], pgid: int) -> None:
        """Has the group killed once nobody holds `held`. `fds` are those that `end` gave its
        leader."""
        for fd in fds:
            fcntl.fcntl(fd, fcntl.F_SETOWN, -pgid)
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)

    def close(self) -> None:
        """Closes both ends, once, which ends the groups if nobody else holds them."""
        if not self._closed:
            self._closed = True
            os.close(self._read)
            os.close(self.held)
