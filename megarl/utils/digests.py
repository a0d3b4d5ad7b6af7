"""Makes checksums that tell whether a file on disk is as it was written.

XXH3 with 128 bits finds every kind of damage, at the speed of memory. It is no protection against
somebody who changes a file on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

_CHUNK = 1 << 20  # bytes, read into one buffer: converters count their memory
_SEAL = "checksum"

Digest = xxhash.xxh3_128
RowDigest = xxhash.xxh3_64  # of one of many rows, to compare with the same row elsewhere


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
    found = _of_json({k: v for k, v in content.items() if k != _SEAL})
    return None if found == content.get(_SEAL) else "its content does not fit its checksum"


def _of_json(content: Mapping[str, Any]) -> str:
    return Digest(json.dumps(content, sort_keys=True).encode()).hexdigest()
