"""Says in a few bytes what a tensor was, so that two runs can be compared."""

from __future__ import annotations

from typing import NamedTuple


class Fingerprint(NamedTuple):
    """Says what a tensor was. `bits` hashes its numbers in order; `rows`, where there is one, the
    same rows in any order; `shape` is for people."""

    bits: str
    norm: float | None = None
    sum: float | None = None
    shape: str = ""
    rows: str = ""

    @staticmethod
    def of_number(value: float) -> Fingerprint:
        """Returns the fingerprint of one number."""
        return Fingerprint(float(value).hex(), float(value), float(value))
