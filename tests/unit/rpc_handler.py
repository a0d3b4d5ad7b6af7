"""What the workers of test_rpc_workers.py serve."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from megarl.rpc.worker import on_main_thread


class Service:
    """Runs calls on the main thread, but for those of the verb "at_once"."""

    def __init__(self, index: int, count: int, options: Mapping[str, Any]) -> None:
        self.index, self.count, self.options = index, count, options
        self.seen: list[Any] = []
        self.started: list[Any] = []
        if options.get("fails") == index:
            raise ValueError(f"no such option for {index}")
        if options.get("hangs") == index:
            time.sleep(600)

    def handle(self, verb: str, payload: Any) -> Any:
        if verb == "at_once":
            return payload
        return on_main_thread(getattr(self, verb), payload)

    def close(self) -> None:
        print(f"closed after {self.seen}", flush=True)

    def place(self, payload: Any) -> Any:
        return self.index, self.count, dict(self.options), dict(os.environ)

    def note(self, payload: Any) -> Any:
        self.seen.append(payload)
        return threading.current_thread() is threading.main_thread()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        self.seen.append("slept")

    def say(self, text: str) -> None:
        print(text, flush=True)

    def leave(self, status: int) -> None:
        print("it was the disk", flush=True)
        os._exit(status)

    def child(self, payload: Any) -> int:
        """Starts a process that does not end by itself, nor at SIGTERM."""
        code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE)
        self.started.append(child)
        assert child.stdout is not None
        child.stdout.readline()  # from here on it ignores it
        return child.pid

    def next_of_none(self, payload: Any) -> Any:
        return next(iter(()))

    def stop_here(self, payload: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
