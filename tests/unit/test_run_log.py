"""The files that a run appends to: a kill, a resume, a file of an older megarl."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from megarl.config.errors import ConfigError
from megarl.config.run import StatsLoggerConfig
from megarl.observability.episodes import append_record, pack, read_bytes, read_index, unpack
from megarl.observability.report import load_run
from megarl.observability.run_log import (
    LOGS,
    DiskThread,
    FingerprintFile,
    RunLog,
    check_age,
    read_fingerprints,
)
from megarl.observability.stats_logger import StatsLogger
from megarl.observability.timeline import Timeline, read_spans
from megarl.utils.files import Fingerprint


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
    names = ("record/fingerprints.jsonl", "episodes/index.jsonl")
    for name in names:
        log = RunLog(tmp_path / name)
        log.path.parent.mkdir()
        log.path.write_text('{"step": 2}\n{"kind": "start", "after": 1}\n{"step": 2}\n')
        with pytest.raises(ConfigError, match=f"{name}: .* goes on from its checkpoint"):
            log.read()
    (tmp_path / "samples.jsonl").write_text('{"when": "after", "prompt": "{\\"after\\": 1}"}\n')
    with pytest.raises(ConfigError, match=" and .*".join(names)) as e:
        check_age(tmp_path / name for name in LOGS)  # as a start does, before there are servers
    assert len(e.value.problems) == 1 and "samples" not in str(e.value)


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


WHOLE = '{"step":1,"start":{"layout":{"actor":"tp2"}}}'


@pytest.mark.parametrize("size", range(1, len(WHOLE)))
def test_a_torn_line_costs_itself_alone(tmp_path: Path, size: int) -> None:
    """Wherever it is cut, also behind a bracket, amid the file or at its end."""
    log = RunLog(tmp_path / "x.jsonl")
    log.path.write_text(f"{WHOLE}\n{WHOLE[:size]}\n{WHOLE}\n{WHOLE[:size]}")
    assert [line["step"] for line in log.read()] == [1, 1]
    log.append(2, {})  # not behind a half line
    assert [line["step"] for line in log.read()] == [1, 1, 2]
    log.begin(1)
    assert log.path.read_text() == f"{WHOLE}\n{WHOLE}\n"


def test_a_line_that_lacks_its_end_is_not_joined_with_the_next(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "x.jsonl")
    log.path.write_text('{"step":1}\n{"step":2}')
    log.begin(2)
    log.append(3, {})
    assert [line["step"] for line in log.read()] == [1, 2, 3]


def torn(path: Path, *, at_end: str) -> None:
    """Cuts the second of three lines short, and adds a line of zeros, as a power failure leaves
    them, and one without an end."""
    first, second, third = path.read_text().splitlines()
    path.write_text(f"{first}\n{second[:-1]}\n{third}\n" + "\0" * 20 + f"\n{at_end}")


def test_a_timeline_lacks_what_is_torn_alone(tmp_path: Path) -> None:
    path = tmp_path / "timeline" / "rank_0.jsonl"
    timeline = Timeline()
    timeline.open(tmp_path, 0)
    for name in ("first", "second", "third"):
        timeline.record("calls", name, 1.0, 2.0, mesh="a")
    torn(path, at_end='{"track":"calls","about":{}')
    later = Timeline()
    later.open(tmp_path, 0)
    later.record("calls", "last", 3.0, 2.0)
    assert [span["name"] for span in read_spans(path)] == ["first", "third", "last"]


def test_metrics_lack_what_is_torn_alone(tmp_path: Path) -> None:
    """In the report, in the choice of the best saves, in the next start."""
    path = tmp_path / "stats.jsonl"
    for step in (1, 2, 3):
        RunLog(path).append(step, {"x": float(step), "time": 1.0, "elapsed_s": 2.0 * step})
    torn(path, at_end='{"step":4,"x"')
    assert load_run(tmp_path).points("x") == [(1, 1.0), (3, 3.0)]
    config = StatsLoggerConfig(report=False)
    names = {"experiment_name": "e", "trial_name": "t", "run_config": {}}
    logger = StatsLogger(config, run_dir=tmp_path, from_step=3, **names)
    logger.log(4, {"x": 4.0})
    logger.close()
    assert load_run(tmp_path).points("x") == [(1, 1.0), (3, 3.0), (4, 4.0)]
    assert path.with_suffix(".superseded.jsonl").read_text().count("\n") == 3


def test_samples_and_rewards_of_evaluations_lack_what_is_torn_alone(tmp_path: Path) -> None:
    RunLog(tmp_path / "stats.jsonl").append(1, {})
    for name, line in (
        ("samples.jsonl", {"when": "before", "prompt": "p"}),
        ("eval_rewards.jsonl", {"rewards": {"p": [1.0]}}),
    ):
        for step in (0, 5, 10):
            RunLog(tmp_path / name).append(step, line)
        torn(tmp_path / name, at_end='{"step":15,"rewards":{}')
    run = load_run(tmp_path)
    assert [sample["step"] for sample in run.samples] == [0, 10]
    assert list(run.eval_rewards) == [0, 10]


def test_fingerprints_lack_what_is_torn_alone(tmp_path: Path) -> None:
    file = FingerprintFile(tmp_path)
    file.begin(0, {"layout": {"actor": "tp2"}})
    for step in (1, 2):
        file.append(step, "rollout", {"x": Fingerprint("a")})
    torn(tmp_path / "record" / "fingerprints.jsonl", at_end='{"step":3,"tensors":{}')
    file.append(4, "rollout", {"x": Fingerprint("b")})
    fingerprints = read_fingerprints(tmp_path)
    assert list(fingerprints.steps) == [2, 4] and fingerprints.start["layout"] == {"actor": "tp2"}


def test_episodes_lack_what_is_torn_alone(tmp_path: Path) -> None:
    """Also a record whose bytes are not all there costs itself alone."""
    for number in (0, 1, 2):
        append_record(tmp_path, 1, {"episode": number}, pack({"n": number}, {}))
    torn(tmp_path / "episodes" / "index.jsonl", at_end='{"episode":3,"versions":{}')
    with (tmp_path / "episodes" / "records.bin").open("ab") as file:
        file.write(pack({"n": 3}, {})[:-4])
    append_record(tmp_path, 2, {"episode": 4}, pack({"n": 4}, {}))
    numbers = [unpack(read_bytes(tmp_path, line)).about["n"] for line in read_index(tmp_path)]
    assert numbers == [0, 2, 4]
