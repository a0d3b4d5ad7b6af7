"""Starts the recipes' programs by fork."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="package", autouse=True)
def starts_are_warm(warm: None) -> None:
    """Jobs start in a tenth of the time."""
