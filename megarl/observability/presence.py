"""Says which processes of a run are there and what they do, for `megarl status`.

<run>/processes/rank_3.json is written by a thread every BEAT seconds and at the end: host, pid,
`beat` (Unix seconds of the write), the phase that the process is in and since when, how it ended.
A launcher writes launcher_0.json when a start of its node's part begins and when it fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megarl.observability.timeline import timeline
from megarl.utils.files import clean_up, write_whole

FOLDER = "processes"
BEAT = 5.0  # seconds
RUNNING, ENDED, FAILED = "running", "ended", "failed"


class Presence:
    """Writes the file of this process until `end`. It is number `rank` of `world_size`, and called
    `name`, which is that of a trainer where it is empty. servers: returns the addresses that it
    generates with, asked anew each time; where it raises OSError or ValueError, they stay."""

    def __init__(
        self,
        run_dir: Path,
        *,
        rank: int,
        world_size: int,
        name: str = "",
        servers: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self.total_steps: int | None = None
        self._servers = servers
        self._path = run_dir / FOLDER / f"rank_{rank}.json"
        self._about: dict[str, Any] = {
            "rank": rank,
            "name": name or f"trainer {rank}",
            "world_size": world_size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": time.time(),
            "servers": [],
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        clean_up(self._path.parent, self._path.name)
        self._over = threading.Event()
        self._write(RUNNING)
        self._thread = threading.Thread(target=self._beat, name="megarl-presence", daemon=True)
        self._thread.start()

    def end(self, error: BaseException | None) -> None:
        """Writes how the process ended: with `error`, or well."""
        self._over.set()
        self._thread.join(2 * BEAT)
        text = f"{type(error).__name__}: {error}" if error is not None else None
        self._write(FAILED if error is not None else ENDED, text)

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            self._write(RUNNING)

    def _write(self, state: str, error: str | None = None) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._about["servers"] = list(self._servers())
        phase = timeline.phase_now()
        now = {
            "state": state,
            "error": error,
            "beat": time.time(),
            "phase": phase[0] if phase else None,
            "phase_since": phase[1] if phase else None,
            "total_steps": self.total_steps,
        }
        with contextlib.suppress(OSError):  # a full disk ends no run from here
            write_whole(self._path, json.dumps(self._about | now) + "\n")


class LauncherPresence:
    """Writes the file of the launcher of node `node`: that a start begins, and why it failed."""

    def __init__(self, run_dir: Path, node: int) -> None:
        """Says that a start begins; why the one before failed stays said (`before`)."""
        self._path = run_dir / FOLDER / f"launcher_{node}.json"
        process = {"host": socket.gethostname(), "pid": os.getpid()}
        earlier = read_launcher(run_dir, node) or {}
        same = all(earlier.get(name) == value for name, value in process.items())
        self._about = process | {"before": earlier["error"] if same else None}
        clean_up(self._path.parent, self._path.name)
        self._write(RUNNING)

    def failed(self, why: str) -> None:
        """Says why the start failed; another may follow."""
        self._write(FAILED, why)

    def _write(self, state: str, error: str | None = None) -> None:
        content = self._about | {"state": state, "error": error, "beat": time.time()}
        with contextlib.suppress(OSError):  # a full disk ends no run from here
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps(content) + "\n")


def read_launcher(run_dir: Path, node: int = 0) -> dict[str, Any] | None:
    """Returns what the launcher of a node last said, None where it has said nothing."""
    path = run_dir / FOLDER / f"launcher_{node}.json"
    with contextlib.suppress(OSError, json.JSONDecodeError):
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return content
    return None


def read_presence(run_dir: Path) -> list[dict[str, Any]]:
    """Returns what the processes of the newest start last said, by rank; none where there are no
    files."""
    processes = []
    for path in (run_dir / FOLDER).glob("rank_*.json"):
        with contextlib.suppress(OSError, json.JSONDecodeError):
            processes.append(json.loads(path.read_text(encoding="utf-8")))
    processes.sort(key=lambda p: p["rank"])
    world = processes[0]["world_size"] if processes else 0
    return [p for p in processes if p["rank"] < world]
