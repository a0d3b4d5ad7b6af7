"""StatsLogger and its sinks."""

from __future__ import annotations

import io
import json
import math
import sys
import time
from collections import deque
from pathlib import Path

import pytest
from rich.console import Console

from megarl.config.errors import ConfigError
from megarl.config.run import StatsLoggerConfig
from megarl.observability.stats_logger import (
    ConsoleSink,
    StatsLogger,
    duration,
    number,
    progress_line,
    seconds_per_step,
    throughput,
)
from megarl.utils.files import DiskFull
from tests.full_disk import files_below


def open_logger(run_dir: Path, *, from_step: int | None = None, **config) -> StatsLogger:
    settings = StatsLoggerConfig(**({"table": False, "report": False} | config))
    return StatsLogger(
        settings,
        run_dir=run_dir,
        experiment_name="exp",
        trial_name="t0",
        run_config={"a": 1},
        from_step=from_step,
    )


def rows(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "stats.jsonl").read_text().splitlines()]


def test_jsonl_has_one_flushed_object_per_step(tmp_path, capsys):
    logger = open_logger(tmp_path / "deep" / "run")
    logger.log(1, {"loss": 0.5, "bad": math.nan, "worse": math.inf}, total_steps=2)
    got = rows(tmp_path / "deep" / "run")  # before close
    logger.close()
    assert len(got) == 1
    assert (got[0]["step"], got[0]["loss"], got[0]["bad"], got[0]["worse"]) == (1, 0.5, None, None)
    assert got[0]["elapsed_s"] >= 0 and got[0]["time"] > 1.7e9
    assert "step 1/2 · loss 0.500" in capsys.readouterr().out


def test_a_disk_that_is_full_is_one_line_and_leaves_no_half_row(tmp_path, caplog):
    """And the end of the run, which has something to say itself, is not lost in another error."""
    logger = open_logger(tmp_path, report=True)
    logger.log(1, {"loss": 1.0})
    before = (tmp_path / "stats.jsonl").read_text()
    full = pytest.raises(DiskFull, match=r"writing the metrics of step 2: File too large: .* free")
    with files_below(len(before) + 10):
        with full as error:
            logger.log(2, {"loss": 2.0})
        logger.close(error=error.value)
    assert (tmp_path / "stats.jsonl").read_text() == before
    assert "the summary or the report is not written" in caplog.text
    assert not (tmp_path / "summary.json").exists()


def test_a_run_that_continues_keeps_what_came_before_and_counts_on(tmp_path):
    path = tmp_path / "stats.jsonl"
    kept, moved = '{"step": 1, "elapsed_s": 100.0}', '{"step": 2, "elapsed_s": 150.0}'
    path.write_text(f'{kept}\n{moved}\n{{"step": 3, "elap')  # killed in mid-line
    logger = open_logger(tmp_path, from_step=1)
    logger.log(2, {"loss": 1.0})
    logger.close()
    first, last = path.read_text().splitlines()
    assert first == kept
    assert json.loads(last)["step"] == 2 and 100.0 <= json.loads(last)["elapsed_s"] < 140.0
    superseded = tmp_path / "stats.superseded.jsonl"
    assert superseded.read_text() == f'{moved}\n{{"step": 3, "elap\n'
    open_logger(tmp_path, from_step=2).close()
    assert path.read_text().splitlines() == [first, last]  # nothing is beyond


def test_a_run_that_starts_anew_moves_all_rows_away(tmp_path):
    (tmp_path / "stats.jsonl").write_text('{"step": 1, "elapsed_s": 100.0}\n')
    logger = open_logger(tmp_path)
    logger.log(1, {"loss": 1.0})
    logger.close()
    (row,) = rows(tmp_path)
    assert row["elapsed_s"] < 60.0
    assert "100.0" in (tmp_path / "stats.superseded.jsonl").read_text()


def test_tensorboard_hides_superseded_steps(tmp_path):
    for from_step, steps in ((None, (1, 2, 3)), (1, (2,))):
        logger = open_logger(tmp_path, tensorboard=True, from_step=from_step)
        for step in steps:
            logger.log(step, {"loss": 10.0 * len(steps) + step})
        logger.close()
        time.sleep(1.1)  # event files are read in the order of the second in their names
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 31.0), (2, 12.0)]


def test_other_ranks_write_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    logger = open_logger(tmp_path / "run", report=True)
    logger.log(1, {"loss": 1.0})
    logger.close()
    assert not (tmp_path / "run").exists() and capsys.readouterr().out == ""


def test_close_writes_the_report(tmp_path):
    logger = open_logger(tmp_path, report=True)
    for step in (1, 2):
        logger.log(step, {"reward/mean": 0.5 * step})
    logger.close()
    logger.close()  # twice is fine
    assert "<svg" in (tmp_path / "report.html").read_text()


def test_tensorboard_events_hold_the_values(tmp_path):
    logger = open_logger(tmp_path, tensorboard=True)
    logger.log(3, {"reward/mean": 0.25})
    logger.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Scalars("reward/mean")
    assert (event.step, event.value) == (3, 0.25)


def test_wandb_offline_keeps_one_id_over_resume_and_says_one_line(tmp_path, monkeypatch, capfd):
    import wandb

    monkeypatch.setenv("WANDB_CONSOLE", "off")
    finish, codes = wandb.Run.finish, []

    def finished(run, exit_code=None):
        codes.append(exit_code)
        finish(run, exit_code)

    monkeypatch.setattr(wandb.Run, "finish", finished)
    ids = []
    for step, error in ((1, None), (2, ValueError("no"))):
        logger = open_logger(tmp_path, wandb={"mode": "offline"})
        shown = {
            "train": [{"prompt": "1+1=", "reward": 0.5, "turns": [{"who": "model"}]}],
            "eval": [],
        }
        logger.log(step, {"loss": float(step)}, completions=shown)
        logger.close(error=error)
        ids.append((tmp_path / "wandb_id.txt").read_text())
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert ids[0] == ids[1] and files and codes == [0, 1]
    said = capfd.readouterr()
    assert "wandb:" not in said.out + said.err  # as it begins its own lines
    assert said.err.count("wandb, offline: ") == 2  # one for each start
    assert all(f.name == f"run-{ids[0]}.wandb" and f.stat().st_size > 0 for f in files)
    tables = sorted((tmp_path / "wandb").glob("offline-run-*/files/media/table/**/*.table.json"))
    assert len(tables) >= 1 and all(t.parent.name == "completions" for t in tables)
    assert json.loads(tables[0].read_text()) == {
        "columns": ["prompt", "reward", "turns"],
        "data": [["1+1=", 0.5, '[{"who": "model"}]']],
    }


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"entiti": "us"}, "entiti='us': init has no such option; did you mean entity?"),
        ({"resume": "never"}, "resume='never': megarl gives init this argument"),
    ],
)
def test_an_option_of_wandbs_that_does_not_go_is_refused(tmp_path, monkeypatch, option, words):
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    with pytest.raises(ConfigError) as caught:
        open_logger(tmp_path, wandb={"mode": "offline", "options": option})
    (problem,) = caught.value.problems
    assert problem.startswith(f"stats_logger.wandb.options.{words}")


@pytest.mark.parametrize(
    ("module", "config", "extra"),
    [
        ("wandb", {"wandb": {"mode": "offline"}}, r"\[wandb\]"),
        ("torch.utils.tensorboard", {"tensorboard": True}, r"\[tensorboard\]"),
    ],
)
def test_missing_package_names_the_extra(tmp_path, monkeypatch, module, config, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=extra):
        open_logger(tmp_path, **config)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_table_shows_every_figure_at_any_width(width):
    out = io.StringIO()
    sink = ConsoleSink(console=Console(file=out, width=width, highlight=False))
    stats = {f"group/name{i}": 1000.5 + i for i in range(9)} | {
        "train_rollout_logprob_abs_diff/mean": 1.25e-7,
        "loss": 0.125,
    }
    sink.write(1, stats, None)
    text = out.getvalue()
    assert all(len(line) <= width for line in text.splitlines())
    for value in [number(v) for v in stats.values()]:
        assert value in text
    assert text.index("loss") < text.index("name0")  # train comes before other groups


def test_progress_line():
    stats = {"reward/mean": 0.5, "loss": 1.0, "timing/step_s": 2.0}
    stats |= throughput(stats | {"tokens/total": 25_000})
    line = progress_line(3, stats, 10, 60.0)
    assert line == "step 3/10 · reward 0.500 · 2.00 s/step · 12500 tok/s · ETA 7m 00s"
    assert progress_line(10, {"loss": 1.0}, 10, 60.0) == "step 10/10 · loss 1.000"
    assert progress_line(2, {}, None, None) == "step 2"
    own = {"reward": 0.5, "loss": 1.0}
    assert progress_line(2, own, None, None) == "step 2 · reward 0.500"
    graded = {"eval/accuracy": 0.0, "eval/reward": 0.25}
    assert progress_line(2, graded, None, None) == "step 2 · accuracy 0.000 · eval reward 0.250"
    whole = {"eval/accuracy": 0.25, "eval/reward": 0.25}
    assert progress_line(2, whole, None, None) == "step 2 · accuracy 0.250"


def test_pace_is_the_median_so_one_evaluation_does_not_upset_it():
    ends = deque([(0, 0.0), (1, 2.0), (2, 4.0), (3, 104.0), (4, 106.0)])
    assert seconds_per_step(ends) == 2.0
    assert seconds_per_step(deque([(0, 0.0), (0, 5.0)])) is None  # a step logged twice


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (3.0, "3"),
        (0.12345, "0.1235"),
        (1.25e-7, "1.25e-07"),
        (12345.6, "12.35k"),
        (3.2e9, "3.2G"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (5e20, "5.00e+20"),
    ],
)
def test_numbers_are_short(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5.4, "5s"), (247, "4m 07s"), (7500, "2h 05m"), (273600, "3d 04h"), (-1, "0s")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_the_start_is_no_part_of_the_forecast() -> None:
    """Row 0 comes before the first step, which waits for more than later steps do."""
    out, now = io.StringIO(), iter([0.0, 60.0, 62.0])
    console = Console(file=out, width=80)
    sink = ConsoleSink(table=False, console=console, clock=lambda: next(now))
    for step in range(3):
        sink.write(step, {"loss": 1.0, "timing/step_s": 3.0} if step else {}, 101)
    _, first, second = out.getvalue().splitlines()
    assert first.endswith("ETA 5m 00s") and second.endswith("ETA 3m 18s")


def test_fast_steps_share_a_progress_line():
    out, now = io.StringIO(), iter([0.0, 0.3, 0.6, 1.2, 1.5, 1.6])
    sink = ConsoleSink(
        table=False, console=Console(file=out, width=80), clock=lambda: next(now)
    )  # fmt: skip
    for step in range(1, 6):
        sink.write(step, {"eval/accuracy": 0.5} if step == 2 else {"loss": 1.0}, 6)
    sink.write(6, {"loss": 1.0}, 6)
    shown = [line.split()[1] for line in out.getvalue().splitlines()]
    # the first, the evaluation (at 0.3 s), the next a second after it, the last
    assert shown == ["1/6", "2/6", "5/6", "6/6"]
