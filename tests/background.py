"""Programs as a shell starts them in the background."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def ignoring_sigint() -> Iterator[None]:
    """Ignores SIGINT in the block; programs that start there inherit it, as by `COMMAND &` in a
    script."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
