"""Prints a tier's time beside its budget; a slow machine fails nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from tests.warm import warm_starts

STARTED = time.monotonic()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the time beside TIER, set by the Makefile: target and minutes, "make test-te: 3"."""
    name, colon, budget = os.environ.get("TIER", "").partition(":")
    if colon:
        took = (time.monotonic() - STARTED) / 60
        terminalreporter.write_line(f"{name}: {took:.1f} minutes here, of {budget.strip()}")


@pytest.fixture(scope="session")
def warm() -> Iterator[None]:
    """Programs start by fork from a process that has imported everything (tests/warm.py)."""
    with warm_starts():
        yield
