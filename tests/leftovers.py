"""Which processes of a run are left, found by a mark in their environment (Linux)."""

from __future__ import annotations

import os
import signal
import time
import uuid
from pathlib import Path

VARIABLE = "MEGARL_TEST_RUN"


class Mark:
    """Start a run with `env`; all it starts inherits the mark, in whatever session."""

    def __init__(self) -> None:
        self.value = uuid.uuid4().hex
        self.env = {VARIABLE: self.value}

    def left(self) -> dict[int, str]:
        """pid -> command line of every marked process that has not ended."""
        entry = f"{VARIABLE}={self.value}".encode()
        found = {}
        for place in Path("/proc").glob("[0-9]*"):
            try:
                if entry in (place / "environ").read_bytes().split(b"\0"):  # a zombie has none
                    command = (place / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(place.name)] = command.decode(errors="replace")[:200]
            except OSError:  # it has just ended, or is somebody else's
                continue
        return found

    def assert_none_left(self, *, within: float = 10.0) -> None:
        """`within`: seconds for those that notice only now that the others are gone."""
        deadline = time.monotonic() + within
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, "left behind:\n" + "\n".join(f"{p}: {c}" for p, c in left.items())

    def kill(self) -> None:
        """At the end of a failed test."""
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)
