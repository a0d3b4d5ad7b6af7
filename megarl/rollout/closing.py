"""Closes what a sample used, such as an environment, however the sample ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from megarl.observability.logging import get_logger

log = get_logger(__name__)

CLOSE_TIMEOUT = 15.0  # seconds that one may take to close


class Closable(Protocol):
    """Stands for what has to be closed."""

    async def aclose(self) -> None:
        """Releases everything."""


@asynccontextmanager
async def closing(things: Sequence[Closable]) -> AsyncIterator[None]:
    """Closes all `things` at the end, at the same time: on success, failure, cancellation and
    time-out. A close that fails or takes longer than CLOSE_TIMEOUT is a warning: what the sample
    did is not lost by it."""
    try:
        yield
    finally:
        # tasks of their own: a cancellation of this one must not cut the closing short
        tasks = [asyncio.ensure_future(_close(thing)) for thing in things]
        if tasks:
            done = asyncio.gather(*tasks)
            try:
                await asyncio.shield(done)
            except asyncio.CancelledError:
                await asyncio.wait(tasks)
                raise


async def _close(thing: Closable) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT):
            await thing.aclose()
    except Exception as e:
        log.warning("%s did not close: %s: %s", type(thing).__name__, type(e).__name__, e)
