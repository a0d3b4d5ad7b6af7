"""Makes digests: of files, to tell whether one is as it was written, and of what a run computed, to
compare it with another run.

XXH3 with 128 bits finds every kind of damage, at the speed of memory. It is no protection against
somebody who changes a file on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

_CHUNK = 1 << 20  # bytes, read into one buffer: converters count their memory
_SEAL = "checksum"

Digest = xxhash.xxh3_128
RowDigest = xxhash.xxh3_64  # of one of many rows, to compare with the same row elsewhere


class Fingerprint(NamedTuple):
    """Says what a tensor was, so that two runs can be compared. `bits` hashes its numbers in order;
    `rows`, where there is one, the same rows in any order; `shape` is for people."""

    bits: str
    norm: float | None = None
    sum: float | None = None
    shape: str = ""
    rows: str = ""

    @staticmethod
    def of_number(value: float) -> Fingerprint:
        """Returns the fingerprint of one number."""
        return Fingerprint(float(value).hex(), float(value), float(value))


def file_digest(path: Path) -> str:
    """Returns the checksum of a file's bytes. Raises OSError if it cannot be read."""
    digest, chunk = Digest(), memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as f:
        while n := f.readinto(chunk):
            digest.update(chunk[:n])
    return digest.hexdigest()


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `content`, for a JSON file, with a checksum of its own as another entry."""
    as_read = json.loads(json.dumps(content))  # keys are text there
    return {**as_read, _SEAL: _of_json(as_read)}


def broken_seal(content: Any) -> str | None:
    """Returns what is wrong with the content of a `seal`ed file, None if nothing is."""
    if not isinstance(content, dict):
        return "it is no json object"
    digest = _of_json({k: v for k, v in content.items() if k != _SEAL})
    return None if digest == content.get(_SEAL) else "its content does not fit its checksum"


def _of_json(content: Mapping[str, Any]) -> str:
    return Digest(json.dumps(content, sort_keys=True).encode()).hexdigest()
