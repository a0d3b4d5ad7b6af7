"""Prints a tier's time beside its budget; a slow machine fails nothing. Collections of garbage do
not look through the libraries and the tests themselves."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.warm import warm_starts

STARTED = time.monotonic()
# what libraries read once, in every program of a job
ALIKE = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip


def pytest_configure() -> None:
    """Undoes what a shell does to a job in the background (`make test &` in a script): it ignores
    SIGINT, and so would every program that a test starts and interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Has each collection of an engine look through what its test made."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the time beside TIER, set by the Makefile: target and minutes, "make test-te: 3"; and
    by which word rows of the invariance table were drawn."""
    if word := os.environ.get("MEGARL_DRAW"):
        terminalreporter.write_line(f"drawn by MEGARL_DRAW={word}")
    name, colon, budget = os.environ.get("TIER", "").partition(":")
    if colon:
        took = (time.monotonic() - STARTED) / 60
        terminalreporter.write_line(f"{name}: {took:.1f} minutes here, of {budget.strip()}")


@pytest.fixture(scope="session")
def warm() -> Iterator[None]:
    """Programs start by fork from a process that has imported everything (tests/warm.py). All have
    the variables that tests set for some: one that has others starts cold."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ALIKE.items():
            patch.setenv(name, value)
        with warm_starts():
            yield
