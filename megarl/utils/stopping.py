"""Takes SIGINT, SIGTERM and SIGHUP as a wish to end the run, not as a blow.

`listening()` takes the signals; loops ask `wish()` where it is safe to stop. Before the first step
(`work_begins`) there is nothing to lose, and the first signal ends the process; afterwards the
second does. Python runs its own handlers between two bytecodes only, which a collective can hold up
for minutes: here a thread reads the signals as they come. MEGARL_SIGNAL_SETTLE is the number of
seconds after the first in which others are the same wish: a scheduler may send its signal to every
process, and a launcher passes it on.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SETTLE = "MEGARL_SIGNAL_SETTLE"
_END = 0  # no signal's number: tells the thread to end


class StopRequested(Exception):
    """Ends a loop at a safe point because of a `wish`."""


_received: list[int] = []
_working = False
_honoured = 0
_before: dict[signal.Signals, Any] = {}  # handlers that `listening` replaced, while it lasts


def wish() -> int:
    """Returns the number of the signal that asks this process to stop, 0 if none has come."""
    return _received[0] if _received else 0


def note(number: int) -> None:
    """Notes that signal `number` came to the process that this one works for."""
    _received.append(number)


def work_begins() -> None:
    """Notes that there is work to lose: from here on one signal is a wish that the loop fulfils."""
    global _working
    _working = True


def honour(number: int) -> None:
    """Notes that the loop has stopped because signal `number` came, here or on another rank."""
    global _honoured
    _honoured = number


def status() -> int:
    """Returns the exit status: 128 + the signal's number where a wish was honoured, else 0."""
    return 128 + _honoured if _honoured else 0


def heard() -> list[signal.Signals]:
    """Returns the SIGNALS that are to be listened to: all, but no hang-up that nohup turned off."""
    off = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in SIGNALS if not (off and number == signal.SIGHUP)]


@contextmanager
def listening(*, spokesman: bool = True) -> Iterator[None]:
    """Takes the signals in the block, where it is entered in the main thread. `spokesman` says on
    stderr what follows from one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    global _working, _honoured
    _received.clear()
    _working, _honoured = False, 0
    read, write = os.pipe()
    os.set_blocking(write, False)
    _before.update({number: signal.signal(number, lambda *_: None) for number in heard()})
    previous = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    thread = threading.Thread(
        target=_listen, args=(read, spokesman), name="megarl-signals", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        _restore()
        os.write(write, bytes([_END]))  # closing it would not do: a forked child may hold it
        thread.join()
        os.close(write)
        os.close(read)


def _restore() -> None:
    for number, handler in _before.items():
        signal.signal(number, handler)
    _before.clear()


def _forked() -> None:
    """Gives a forked child its own signals back: one to it is no wish to end this run."""
    if _before:
        signal.set_wakeup_fd(-1)
        _restore()


os.register_at_fork(after_in_child=_forked)


def _listen(read: int, spokesman: bool) -> None:
    settle, settled = float(os.environ.get(SETTLE, "0")), 0.0
    while (number := os.read(read, 1)[0]) != _END:
        if number not in SIGNALS or time.monotonic() < settled:
            continue
        settled = time.monotonic() + settle
        name = signal.Signals(number).name
        _received.append(number)
        if not _working or len(_received) > 1:
            _say(spokesman, f"{name}: ending at once")
            os._exit(128 + number)
        what = "this step, or the wait for its rollouts, ends with a checkpoint"
        _say(spokesman, f"{name}: {what}; a second signal ends the run immediately")


def _say(spokesman: bool, text: str) -> None:
    if spokesman:
        os.write(2, f"{text}\n".encode())
