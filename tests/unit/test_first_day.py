"""The probes of docs/gpu_first_day.md run on a CPU, each in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROBES = ("env", "adam", "calls", "train", "loop", "head", "connections", "te", "slices")


def first_day(*args: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as out:
        return subprocess.run(
            [sys.executable, str(ROOT / "benchmarks" / "first_day.py"), "--out", out, *args],
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


def test_results_are_kept_and_what_did_not_pass_runs_again(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    done = first_day("--small", "--out", str(tmp_path), "--seconds", "0", "adam")
    assert done.returncode == 0  # it had no time, which is no failure
    (row,) = map(json.loads, results.open())
    assert (row["probe"], row["s"]) == ("adam", 0)
    with results.open("a") as file:
        for probe, status in (("connections", "ok"), ("head", "exit status 1")):
            line = {"probe": probe, "status": status, "s": 1, "last": ""}
            file.write(json.dumps(line) + "\n")
    names = ("connections", "adam", "head")
    done = first_day("--small", "--out", str(tmp_path), "--again", *names)
    assert done.returncode == 0, done.stdout
    assert re.findall(r"^## (\w+)", done.stdout, re.M) == ["adam", "head"]
    rows = [json.loads(line) for line in results.open()]
    assert [r["probe"] for r in rows if r.get("status") == "ok"] == ["connections", "adam", "head"]
    table = [r for r in rows if r["probe"] == "adam" and "step" in r]
    assert [r["step"] for r in table] == [1, 2, 3]
    summary = (tmp_path / "summary.md").read_text()
    assert summary.count("| ok |") == 3 and "- head: hidden=64" in summary
    first_day("--small", "--out", str(tmp_path), "--seconds", "0", "adam")
    (earlier,) = tmp_path.glob("results.*.jsonl")
    assert [json.loads(line) for line in earlier.open()] == rows
