"""Shows what a process is doing: SIGUSR2 has it write the stacks of all its threads."""

from __future__ import annotations

import faulthandler
import signal

STDERR = 2


def dump_on_signal() -> None:
    """Has SIGUSR2 write the Python stacks of all threads to stderr, whatever they wait for. The
    process goes on, and its forks do the same."""
    faulthandler.register(signal.SIGUSR2, file=STDERR, all_threads=True)
