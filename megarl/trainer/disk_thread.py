"""Writes what a run records in a thread beside training, which never waits for it."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from megarl.observability.logging import get_logger

log = get_logger(__name__)

PATIENCE = 30.0  # seconds that the end of a run waits for the disk


class DiskThread:
    """Does pieces of work one after the other. Nothing here ends a run: where the disk is full or
    does not follow, an error in the log says what is not recorded, and training goes on."""

    def __init__(self, name: str, *, waiting: int) -> None:
        """waiting: pieces of work that the disk may be behind; more are left out."""
        self._name = name
        self._work: queue.Queue[tuple[str, Callable[[], None]] | None] = queue.Queue(waiting)
        self._thread: threading.Thread | None = None
        self._over = False

    def do(self, what: str, work: Callable[[], None]) -> None:
        """Has the thread call `work`, which records `what`; not after `close`."""
        if self._over:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        try:
            self._work.put_nowait((what, work))
        except queue.Full:
            log.error("not recorded: %s: the disk is behind", what)

    def _run(self) -> None:
        while (job := self._work.get()) is not None:
            what, work = job
            try:
                work()
            except Exception as e:  # of a disk that is full, mostly
                log.error("not recorded: %s: %s: %s", what, type(e).__name__, e)

    def close(self) -> bool:
        """Waits until all is written, PATIENCE seconds at most, and returns whether it is. May be
        called twice."""
        self._over, thread = True, self._thread
        if thread is None:
            return True
        with contextlib.suppress(queue.Full):
            self._work.put(None, timeout=PATIENCE)
        thread.join(PATIENCE)
        if thread.is_alive():
            log.error("%s: the last is not recorded: the disk did not answer", self._name)
            return False
        self._thread = None
        return True
