"""Trackers of the user's own: what one gets, and that none ends a run."""

from __future__ import annotations

import json
import math
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from examples.trackers import MLflow, Trackio
from megarl.config.base import SeamConfig
from megarl.config.errors import ConfigError
from megarl.config.run import StatsLoggerConfig
from megarl.observability.stats_logger import StatsLogger
from megarl.utils import stopping

CONFIG = {"experiment_name": "e", "trial_name": "t", "actor": {"lr": 1e-3}}
# a tracker that writes what it is told, and one that raises wherever it is told something
MODULE = """
import json
import time
class Told:
    def __init__(self, config, *, run_dir, from_step, **options):
        self.file = run_dir / "told.jsonl"
        self.tell("made", config, from_step, options)
    def tell(self, *what):
        with self.file.open("a") as f:
            f.write(json.dumps(what) + "\\n")
    def write(self, step, stats, total_steps):
        self.tell("step", step, stats, total_steps)
    def close(self, outcome):
        self.tell("end", outcome)
class Fails(Told):
    def write(self, step, stats, total_steps):
        super().write(step, stats, total_steps)
        raise OSError("no route to the tracker")
    def close(self, outcome):
        raise KeyError("gone")
def make(config, *, run_dir, from_step):
    return Told(config, run_dir=run_dir, from_step=from_step, by="a function")
class Exits(Told):
    def write(self, step, stats, total_steps):
        super().write(step, stats, total_steps)
        raise (SystemExit(3) if step == 1 else GeneratorExit("ended"))
    def close(self, outcome):
        raise SystemExit(3)
class Hangs(Told):
    def write(self, step, stats, total_steps):
        time.sleep(0.5)
    def close(self, outcome):
        time.sleep(600)
def nothing(config, *, run_dir, from_step):
    return None
class Unmade(Told):
    def __init__(self, config, *, run_dir, from_step):
        raise RuntimeError("log in first")
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("mine", None)


def logger(run_dir: Path, tracker: str, *, from_step: int | None = None, **options: Any) -> Any:
    return StatsLogger(
        StatsLoggerConfig(tracker=SeamConfig(type=tracker, options=options), report=False),
        run_dir=run_dir,
        experiment_name="e",
        trial_name="t",
        run_config=CONFIG,
        from_step=from_step,
    )


def lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_tracker_gets_the_configuration_once_every_step_and_the_outcome(home: Path) -> None:
    """And after a resume the steps that are made again, under the same numbers."""
    run = home / "run"
    first = logger(run, "mine.py:Told", team="us")
    for step in (1, 2, 3):
        first.log(step, {"loss": 1.0 / step}, total_steps=9)
    first.close(error=ValueError("no more\nof this"))
    again = logger(run, "mine:make", from_step=1)
    again.log(2, {"loss": 0.25, "tokens/total": 6.0, "timing/step_s": 2.0})
    again.close()
    told = lines(run / "told.jsonl")
    assert told[0] == ["made", CONFIG, None, {"team": "us"}]
    assert told[1:4] == [["step", s, {"loss": 1.0 / s}, 9] for s in (1, 2, 3)]
    assert told[4] == ["end", "failed: ValueError: no more of this"]
    assert told[5] == ["made", CONFIG, 1, {"by": "a function"}]
    kind, step, stats, total = told[6]
    assert (kind, step, total) == ("step", 2, None)
    assert stats["loss"] == 0.25 and stats["perf/tokens_per_s"] == 3.0  # as in stats.jsonl
    assert told[7:] == [["end", "finished"]]


def test_a_run_that_a_signal_ends_was_stopped(home: Path) -> None:
    tracked = logger(home / "run", "mine:Told")
    stopping.honour(15)
    try:
        tracked.close()
    finally:
        stopping.honour(0)
    assert lines(home / "run" / "told.jsonl")[-1] == ["end", "stopped"]


def test_a_tracker_that_raises_is_one_warning_and_gets_the_later_steps(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = home / "run"
    tracked = logger(run, "mine:Fails")
    for step in (1, 2, 3):
        tracked.log(step, {"loss": 1.0})
    assert [line[1] for line in lines(run / "told.jsonl")[1:]] == [1, 2, 3]
    assert caplog.text.count("no route to the tracker") == 1 and "mine.py, line" in caplog.text
    tracked.close()
    assert caplog.text.count("KeyError: 'gone'") == 1
    assert [row["step"] for row in lines(run / "stats.jsonl")] == [1, 2, 3]
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"


def test_a_tracker_that_exits_ends_no_run(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = home / "run"
    tracked = logger(run, "mine:Exits")
    for step in (1, 2):
        tracked.log(step, {"loss": 1.0})
    tracked.close()
    assert [line[1] for line in lines(run / "told.jsonl")[1:]] == [1, 2]
    assert caplog.text.count("SystemExit") == 2  # of write and of close
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"


def test_a_tracker_that_hangs_is_named_and_given_up(
    home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.observability.stats_logger.SLOW_S", 0.1)
    monkeypatch.setattr("megarl.observability.stats_logger.CLOSE_S", 0.3)
    tracked = logger(home / "run", "mine:Hangs")
    tracked.log(1, {"loss": 1.0})
    assert "Hangs.write" in caplog.text
    tracked.close()
    assert "Hangs.close took 0.3 s" in caplog.text
    assert json.loads((home / "run" / "summary.json").read_text())["status"] == "finished"


def test_a_tracker_without_its_methods_ends_the_start(home: Path) -> None:
    with pytest.raises(ConfigError, match=r"stats_logger\.tracker\.type=mine:nothing: .*None"):
        logger(home / "run", "mine:nothing")


def test_a_failure_of_tensorboard_is_a_warning_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: Any) -> None:
        raise OSError("stale file handle")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", fails)
    logged = StatsLogger(
        StatsLoggerConfig(tensorboard=True, report=False),
        run_dir=tmp_path, experiment_name="e", trial_name="t", run_config=CONFIG,
    )  # fmt: skip
    for step in (1, 2):
        logged.log(step, {"loss": 1.0})
    logged.close()
    assert [row["step"] for row in lines(tmp_path / "stats.jsonl")] == [1, 2]
    assert caplog.text.count("stale file handle") == 1


def test_a_tracker_that_cannot_be_made_ends_the_start(home: Path) -> None:
    with pytest.raises(RuntimeError, match="log in first"):
        logger(home / "run", "mine:Unmade")


def test_other_ranks_make_none(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    tracked = logger(home / "run", "mine:Unmade")
    tracked.log(1, {"loss": 1.0})
    tracked.close()


# ---- the examples, with the packages themselves where they are installed


def twice(run: Path, tracker: str, **options: Any) -> None:
    """Logs three steps, and goes on from the first."""
    for from_step, steps in ((None, (1, 2, 3)), (1, (2,))):
        tracked = logger(run, tracker, from_step=from_step, **options)
        for step in steps:
            tracked.log(step, {"loss": 10.0 / step, "reward/mean": math.nan})
        tracked.close()
        time.sleep(0.01)  # MLflow tells points of one step apart by the millisecond


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # which it reads as it is imported
    pytest.importorskip("trackio")
    twice(tmp_path / "run", f"examples.trackers:{Trackio.__name__}", auto_log_cpu=False)
    with closing(sqlite3.connect(tmp_path / "e.db")) as db:
        rows = db.execute("select run_name, step, metrics from metrics").fetchall()
    assert {name for name, _, _ in rows} == {"t"}
    points = sorted((step, json.loads(metrics)["loss"]) for _, step, metrics in rows)
    assert points == [(1, 10.0), (2, 5.0), (2, 5.0), (3, 10.0 / 3)]


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    twice(tmp_path / "run", f"examples.trackers:{MLflow.__name__}", uri=uri)
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert (run.info.run_name, run.info.status) == ("t", "FINISHED")
    points = sorted((p.step, p.value) for p in client.get_metric_history(run.info.run_id, "loss"))
    assert points == [(1, 10.0), (2, 5.0), (2, 5.0), (3, 10.0 / 3)]
