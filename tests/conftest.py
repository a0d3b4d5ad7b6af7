"""Prints what a tier of tests took beside what it may take; a slow machine fails nothing."""

from __future__ import annotations

import os
import time

import pytest

STARTED = time.monotonic()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """TIER, as the Makefile sets it: a target and its budget in minutes, "make test-te: 3"."""
    name, colon, budget = os.environ.get("TIER", "").partition(":")
    if colon:
        took = (time.monotonic() - STARTED) / 60
        terminalreporter.write_line(f"{name}: {took:.1f} minutes here, of {budget.strip()}")
