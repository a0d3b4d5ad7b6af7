"""The probes of docs/gpu_first_day.md run on a CPU, each in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROBES = ("env", "adam", "syncs", "head", "connections", "offload", "tries", "slices")


def first_day(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "first_day.py"), *args],
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_every_probe_prints_its_table() -> None:
    done = first_day("--small", "adam", "head", "tries")
    assert done.returncode == 0, done.stderr
    tables = re.findall(r"^## (\w+)\n\n\|.*\|\n\|[-|]+\|\n((?:\|.*\|\n)+)", done.stdout, re.M)
    assert {name: len(rows.splitlines()) for name, rows in tables} == {
        "adam": 3,
        "head": 4,
        "tries": 4,
    }


def test_a_probe_ends_at_its_limit_and_the_next_one_runs() -> None:
    done = first_day("--small", "--limit", "0.01", "adam", "head")
    assert done.returncode == 1
    assert re.findall(r"^## (\w+)", done.stdout, re.M) == ["adam", "head"]


def test_an_unknown_probe_is_refused() -> None:
    done = first_day("--small", "adam", "warp")
    assert done.returncode == 2 and not done.stdout
    assert "'warp'" in done.stderr and all(name in done.stderr for name in PROBES)
