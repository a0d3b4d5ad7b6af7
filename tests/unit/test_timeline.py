"""What a process records of itself, and what `megarl status` and `megarl trace` make of it. Real
runs are in tests/system/test_watching.py."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megarl.cli.status import SILENT, status
from megarl.cli.trace import lanes, read_timeline, trace_events, within
from megarl.config.errors import ConfigError
from megarl.config.recipe_engines import addresses_in
from megarl.observability import timeline as timeline_module
from megarl.observability.stats_tracker import StatsTracker
from megarl.observability.timeline import (
    PHASES,
    PROCESSES,
    LauncherPresence,
    Presence,
    Timeline,
    read_presence,
    read_spans,
)


def test_phases_nest_and_are_named_while_they_last(tmp_path: Path) -> None:
    t = Timeline()
    t.record("syncs", "nowhere", 0.0, 1.0)  # nothing is open: nothing happens
    t.open(tmp_path, 3)
    with t.phase("step"):
        with t.phase("train"):
            now = t.phase_now()
            assert now is not None and now[0] == "train" and abs(now[1] - time.time()) < 5
        assert t.phase_now() is not None and t.phase_now()[0] == "step"  # type: ignore[index]
    with pytest.raises(RuntimeError), t.span("syncs", "upload") as about:
        about["version"] = 2
        raise RuntimeError
    assert t.phase_now() is None
    t.close()
    t.record("syncs", "late", 0.0, 1.0)
    train, step, upload = read_spans(tmp_path / "timeline" / "rank_3.jsonl")
    assert [s["name"] for s in (train, step, upload)] == ["train", "step", "upload"]
    assert step["start"] <= train["start"] and train["seconds"] <= step["seconds"]
    assert upload["about"] == {"version": 2}


def test_the_newest_spans_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "LIMIT", 1000)
    t = Timeline()
    t.open(tmp_path, 0)
    for i in range(100):
        t.record(PHASES, f"p{i}", float(i), 1.0)
    t.close()
    path = tmp_path / "timeline" / "rank_0.jsonl"
    path.write_text(path.read_text() + '{"cut')
    names = [s["name"] for s in read_spans(path)]
    assert names == [f"p{i}" for i in range(100 - len(names), 100)] and 10 < len(names) < 50
    assert sum(p.stat().st_size for p in path.parent.iterdir()) < 2500


def test_timed_phases_are_on_the_timeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Timeline()
    monkeypatch.setattr("megarl.observability.timeline.timeline", own)
    own.open(tmp_path, 0)
    tracker = StatsTracker()
    with tracker.record_timing("rollout"):
        time.sleep(0.01)
    own.close()
    (span,) = read_spans(tmp_path / "timeline" / "rank_0.jsonl")
    assert span["track"] == PHASES and span["name"] == "rollout"
    assert 0.01 <= span["seconds"] <= tracker.seconds("rollout")


def test_presence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "BEAT", 0.01)
    listed = tmp_path / "servers.txt"
    listed.write_text("127.0.0.1:1\n")
    first = Presence(tmp_path, rank=0, world_size=1, servers=partial(addresses_in, listed))
    Presence(tmp_path, rank=1, world_size=2).end(ValueError("of an earlier, larger world"))
    (said,) = read_presence(tmp_path)
    assert said["pid"] == os.getpid() and said["state"] == "running"
    while read_presence(tmp_path)[0]["beat"] == said["beat"]:
        time.sleep(0.01)
    assert said["servers"] == ["127.0.0.1:1"]
    listed.write_text("127.0.0.1:1\n127.0.0.1:2  # joins later\n")
    while len(read_presence(tmp_path)[0]["servers"]) == 1:
        time.sleep(0.01)
    assert [s["address"] for s in status(tmp_path)["servers"]] == ["127.0.0.1:1", "127.0.0.1:2"]
    listed.unlink()  # between two moves: what was listed stays
    first.end(ValueError("no luck at https://bob:hunter2@host"))
    (said,) = read_presence(tmp_path)
    assert said["servers"] == ["127.0.0.1:1", "127.0.0.1:2"]
    assert said["state"] == "failed" and said["error"].startswith("ValueError: no luck at ")
    assert "hunter2" not in said["error"]


def test_what_a_killed_process_left_amid_a_write_goes_with_its_next_start(tmp_path: Path) -> None:
    folder = tmp_path / PROCESSES
    folder.mkdir()
    half = [f".rank_{n}.json.tmp-0123abcd" for n in (1, 11)] + [".launcher_0.json.tmp-89abcdef"]
    for name in half:
        (folder / name).write_text("{")
    Presence(tmp_path, rank=1, world_size=2).end(None)
    assert {p.name for p in folder.iterdir()} == {"rank_1.json", *half[1:]}  # others write theirs
    LauncherPresence(tmp_path, 0)
    assert {p.name for p in folder.iterdir()} == {"rank_1.json", half[1], "launcher_0.json"}


def write_run(folder: Path, *people: dict[str, Any], rows: int = 0) -> None:
    (folder / PROCESSES).mkdir(parents=True)
    for rank, person in enumerate(people):
        said = {
            "rank": rank,
            "world_size": len(people),
            "host": "far",
            "pid": 1,
            "servers": [],
            "started": time.time() - 100,
            "beat": time.time(),
            "phase": "rollout",
            "phase_since": time.time() - 7,
            "state": "running",
            "error": None,
            "total_steps": 9,
        } | person
        (folder / PROCESSES / f"rank_{rank}.json").write_text(json.dumps(said))
    lines = [
        {
            "step": i + 1,
            "time": time.time(),
            "elapsed_s": 2.0 * i,
            "reward/mean": i / 10,
            "timing/step_s": 2.0,
            "tokens/trained": 100.0,
        }
        for i in range(rows)
    ]
    if rows:
        (folder / "stats.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_run_that_its_launcher_starts_again_is_not_over(tmp_path: Path) -> None:
    """And the launcher's word, which saw who ended first, comes before that of the others."""
    here = socket.gethostname()
    told = {"state": "failed", "error": "RuntimeError: lost touch"}
    write_run(tmp_path, {"host": here, "pid": ended_process()}, told)
    assert status(tmp_path)["state"] == "dead"
    launcher = LauncherPresence(tmp_path, 0)  # this process
    assert status(tmp_path)["state"] == "restarting"
    launcher.failed("trainer 0 exited with status 137 (SIGKILL)")
    LauncherPresence(tmp_path, 0)  # the next start, whose trainers are not there yet
    found = status(tmp_path)
    assert found["state"] == "restarting"
    assert found["last_error"] == (
        "trainer 0 exited with status 137 (SIGKILL); trainer 1: RuntimeError: lost touch"
    )
    path = tmp_path / PROCESSES / "launcher_0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": ended_process()}))
    found = status(tmp_path)
    assert found["state"] == "dead"
    assert found["last_error"].endswith("was killed; trainer 1: RuntimeError: lost touch")


@pytest.mark.parametrize("its", (True, False))
def test_a_killed_launcher_is_named_if_it_started_the_trainers(its: bool, tmp_path: Path) -> None:
    here, pid = socket.gethostname(), ended_process()
    LauncherPresence(tmp_path, 0)  # starts before its trainers do
    path = tmp_path / PROCESSES / "launcher_0.json"
    told = json.loads(path.read_text()) | {"pid": pid, "beat": time.time() - 200}
    parent = pid if its else ended_process()
    path.unlink()
    path.parent.rmdir()
    write_run(tmp_path, {"host": here, "pid": ended_process(), "parent": parent})
    path.write_text(json.dumps(told))
    found = status(tmp_path)
    assert found["state"] == "dead"
    assert (f"the launcher (pid {pid} on {here}) was killed" in found["last_error"]) == its
    assert "trainer 0" in found["last_error"]


def test_a_process_that_is_stopped_is_not_silent_and_not_dead(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        write_run(tmp_path, {"host": socket.gethostname(), "pid": process.pid, "beat": 0.0})
        found = status(tmp_path)
    finally:
        process.kill()
        process.wait()
    assert found["state"] == "running" and found["processes"][0]["health"] == "stopped"


def test_health_of_processes(tmp_path: Path) -> None:
    here = socket.gethostname()
    write_run(
        tmp_path,
        {"host": here, "pid": os.getpid()},
        {"beat": time.time() - 2 * SILENT},
        {"host": here, "pid": ended_process()},
        {"state": "failed", "error": "ValueError: NaN"},
        {"state": "ended"},
        rows=4,
    )
    found = status(tmp_path)
    health = [p["health"] for p in found["processes"]]
    assert health == ["alive", "silent", "dead", "failed", "ended"]
    assert found["state"] == "dead" and found["last_error"] == "trainer 3: ValueError: NaN"
    assert found["step"] == 4 and found["total_steps"] == 9 and found["reward"] == 0.3
    assert found["seconds_per_step"] == 2 and found["tokens_per_s"] == 50
    assert 6.5 < found["processes"][0]["phase_s"] < 60


@pytest.mark.parametrize(
    ("people", "summary", "state"),
    [
        ([{}], None, "running"),
        ([{}], "finished", "running"),  # an earlier start's summary
        ([{"beat": 0.0}], None, "running"),  # silent, for all we know
        ([{"state": "ended"}], "finished", "finished"),
        ([{"state": "ended"}], "stopped early", "stopped"),
        ([{"state": "failed", "error": "E: x"}], "failed: E: x", "failed"),
        ([], "failed: E: x", "failed"),
    ],
)
def test_state_of_a_run(
    people: list[dict[str, Any]], summary: str | None, state: str, tmp_path: Path
) -> None:
    write_run(tmp_path, *people, rows=2)
    if summary is not None:
        (tmp_path / "summary.json").write_text(json.dumps({"status": summary}))
        old = time.time() - (1000 if state == "running" else 0)
        os.utime(tmp_path / "summary.json", (old, old))
    found = status(tmp_path)
    assert found["state"] == state
    assert (found["last_error"] or "").endswith("E: x" if state == "failed" else "")


def test_a_directory_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run has begun there"):
        status(tmp_path)


def span(start: float, seconds: float, track: str = PHASES, name: str = "step") -> dict[str, Any]:
    return {"track": track, "name": name, "start": start, "seconds": seconds}


def test_lanes_are_few_and_nothing_overlaps() -> None:
    spans = [span(0, 4), span(1, 1), span(2, 5), span(3, 1), span(4, 1)]
    assert [n for _, n in lanes(spans)] == [0, 1, 1, 2, 0]
    assert lanes([]) == []


def test_steps_are_cut_out_of_every_rank() -> None:
    spans = {
        0: [span(0, 10), span(10, 10), span(20, 10)],
        1: [span(1, 2, name="a"), span(12, 2, name="b"), span(19, 4, name="c"), span(31, 1)],
    }
    found = within(spans, (2, 2))
    assert [s["start"] for s in found[0]] == [10]
    assert [s["name"] for s in found[1]] == ["b", "c"]
    with pytest.raises(ConfigError, match="has 3 steps"):
        within(spans, (3, 4))


def test_events_begin_at_zero_and_name_their_processes(tmp_path: Path) -> None:
    for rank in (0, 1):
        t = Timeline()
        t.open(tmp_path, rank)
        t.record(PHASES, "step", 1e9 + rank, 2.0)
        t.record("episodes", "row 1", 1e9 + 1, 0.5, outcome="accepted")
        t.close()
    events = list(trace_events(read_timeline(tmp_path), {0: "trainer 0 a", 1: "trainer 1 b"}))
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"trainer 0 a", "trainer 1 b"}
    steps = [e for e in events if e["name"] == "step"]
    assert [(e["pid"], e["ts"], e["dur"]) for e in steps] == [(0, 0, 2e6), (1, 1e6, 2e6)]
    episodes = [e for e in events if e["name"] == "row 1"]
    assert {e["tid"] for e in episodes} == {2} and episodes[0]["args"] == {"outcome": "accepted"}
