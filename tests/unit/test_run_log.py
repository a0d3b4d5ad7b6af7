"""The files that a run appends to: a kill, a resume, a file of an older megarl."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from megarl.config.errors import ConfigError
from megarl.observability.run_log import DiskThread, RunLog


def test_a_start_goes_on_from_its_step(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "deep" / "x.jsonl")
    assert log.read() == []
    log.begin(3)  # nothing is there
    for step in (1, 2, 3):
        log.append(step, {"n": step, "nan": float("nan")})
    with log.path.open("ab") as file:
        file.write(b'{"step": 4, "te\xc3')  # killed in mid-line, within a character
    assert [line["n"] for line in log.read()] == [1, 2, 3]
    log.begin(2)
    log.append(3, {"n": "again"})
    assert [(line["step"], line["n"]) for line in log.read()] == [(1, 1), (2, 2), (3, "again")]
    moved = log.path.with_suffix(".superseded.jsonl").read_text()
    assert moved.count("\n") == 2 and '"n":3' in moved and '"te' in moved
    before = log.path.read_bytes()
    log.begin(3)
    assert log.path.read_bytes() == before
    log.begin(-1)
    assert log.read() == [] and "again" in log.path.with_suffix(".superseded.jsonl").read_text()


def test_what_an_older_megarl_wrote_is_refused_by_one_line(tmp_path: Path) -> None:
    """Its lines {"after": k} said which lines before them no longer count."""
    log = RunLog(tmp_path / "index.jsonl")
    log.path.write_text('{"step": 2}\n{"kind": "start", "after": 1}\n{"step": 2}\n')
    for use in (log.read, lambda: log.begin(2)):
        with pytest.raises(ConfigError, match=r"index.jsonl: .* goes on from its checkpoint") as e:
            use()
        assert len(e.value.problems) == 1
    assert log.path.read_text().count("\n") == 3  # as it was


def test_a_file_of_somebody_else_is_named(tmp_path: Path) -> None:
    path = tmp_path / "stats.jsonl"
    for text in ("[1]", "{'step': 1}", "[" * 100_000 + "}"):
        path.write_text('{"step": 1}\n' + text + "\n")
        with pytest.raises(ValueError, match=r"stats.jsonl:2: not a JSON object"):
            RunLog(path).read()


def test_a_thread_that_is_behind_leaves_out_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    go, done = threading.Event(), []
    thread = DiskThread("a thread", waiting=1)

    def wait() -> None:
        go.wait(30)
        done.append("first")

    thread.do("first", wait)
    for name in ("second", "third", "fourth"):  # one of them waits, of which the queue decides
        thread.do(name, lambda name=name: done.append(name))  # type: ignore[misc]
    go.set()
    assert thread.close() and thread.close()
    assert done[0] == "first" and len(done) < 4
    thread.do("late", lambda: done.append("late"))
    assert "late" not in done


def test_a_line_that_lacks_its_end_is_not_joined_with_the_next(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "x.jsonl")
    log.path.write_text('{"step":1}\n{"step":2}')
    log.begin(2)
    log.append(3, {})
    assert [line["step"] for line in log.read()] == [1, 2, 3]
