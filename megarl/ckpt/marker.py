"""Writes and checks megarl.json, which says that a directory is a whole checkpoint and that its
files are as written.

It is written last, with the size and the checksum of every file and a checksum of itself.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megarl.utils.files import broken_seal, file_digest, seal

MARKER = "megarl.json"
FORMAT = 1
_READERS = 4


def write_marker(
    staging: Path, info: Mapping[str, Any], checksums: Mapping[str, str] | None = None
) -> None:
    """Writes the marker of `staging`. `checksums` has those that are known already, by the file's
    name within `staging`; the other files are read."""
    known = dict(checksums or {})
    files = {
        f.relative_to(staging).as_posix(): f.stat().st_size
        for f in sorted(staging.rglob("*"))
        if f.is_file() and f.name != MARKER
    }
    for name in files:
        if name not in known:
            known[name] = file_digest(staging / name)
    marker = {
        "format": FORMAT,
        "id": uuid.uuid4().hex,
        "info": dict(info),
        "files": files,
        "xxh3_128": {name: known[name] for name in files},
    }
    text = json.dumps(seal(marker), indent=2) + "\n"
    (staging / MARKER).write_text(text, encoding="utf-8")


def read_marker(path: Path) -> dict[str, Any]:
    """Returns the marker of `path`. Raises ValueError, saying why, where there is none or a damaged
    one."""
    try:
        marker: dict[str, Any] = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError) as e:
        raise ValueError(
            f"{path} holds no whole checkpoint ({MARKER}: {e}); give the directory of one saved "
            "with weight_format='dist', on storage that every rank sees"
        ) from e
    if why := broken_seal(marker):
        raise ValueError(f"{path / MARKER} is damaged ({why}); load another checkpoint")
    if marker.get("format") != FORMAT:
        raise ValueError(
            f"{path}: checkpoint format {marker.get('format')!r}, this version reads {FORMAT}; "
            "load it with the version that wrote it"
        )
    return marker


def read_info(path: str | Path) -> dict[str, Any]:
    """Returns the `info` of the checkpoint at `path`, whose files are all there, in full length.
    Raises ValueError if it is none. Not collective; `check_contents` reads the files, too."""
    marker = read_marker(Path(path))
    for name, size in marker["files"].items():
        file = Path(path) / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            raise ValueError(
                f"{file} has {found} bytes, {MARKER} says {size}: the checkpoint is damaged or "
                "was copied in part; load another one"
            )
    info: dict[str, Any] = marker["info"]
    return info


def check_contents(path: Path, names: Iterable[str] | None = None) -> None:
    """Reads files of the checkpoint at `path` (None: all). Raises ValueError for bytes that are not
    those that were written."""
    known = read_marker(path)["xxh3_128"]
    wanted = list(known if names is None else names)
    with ThreadPoolExecutor(_READERS) as pool:
        for name, found in zip(wanted, pool.map(lambda n: file_digest(path / n), wanted)):
            if found != known[name]:
                raise ValueError(
                    f"{path / name} is damaged: its checksum is {found}, {MARKER} says "
                    f"{known[name]}; load another checkpoint"
                )


def share_of_files(path: Path, rank: int, ranks: int) -> list[str]:
    """Returns the files of the checkpoint that `rank` of `ranks` is to check: every file is one
    rank's."""
    files = read_marker(path)["files"]
    return sorted(files, key=lambda name: (-files[name], name))[rank::ranks]
