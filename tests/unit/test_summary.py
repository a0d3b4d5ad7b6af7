"""The summary at the end of a run: sums of its steps, honest about how it ended."""

from __future__ import annotations

import io
import json
import time

import pytest
from rich.console import Console

from megarl.cli.status import status
from megarl.config.run import StatsLoggerConfig
from megarl.observability.report import Run
from megarl.observability.report.curves import end_window
from megarl.observability.report.summary import print_summary, summarize
from megarl.observability.stats_logger import StatsLogger


def counters(done: int, *, ahead: int = 0, running: int = 0, failed: int = 0, handed: int = 0):
    """After `done` trained prompts of 4 samples; `handed`: more are handed out, not trained."""
    accepted, rejected = done + handed + ahead, 2
    figures = {
        "submitted": running + accepted + rejected + failed, "running": running,
        "accepted": accepted, "rejected": rejected, "failed": failed, "dropped": 0,
        "handed_out": done + handed, "trained": done, "trained_samples": 4 * done,
        "failed_samples/reward": 1, "failed_samples/len_mean": 3,
    }  # fmt: skip
    return {f"rollout/{k}": float(v) for k, v in figures.items()}


def rl_row(step: int) -> dict:
    return {
        "step": step, "reward/mean": 0.1 * step, "loss": 0.5, "skipped_updates": float(step == 2),
        "tokens/sequences": 32.0, "tokens/trained": 100.0, "weight_sync/total_s": 0.1,
        "weight_sync/bytes": 2e6, "timing/step_s": 2.0, "timing/rollout_s": 1.0,
        "timing/train_s": 0.5, "timing/eval_s": 0.25, "elapsed_s": 3.0 * step,
        **counters(8 * step, ahead=3, running=2),
    }  # fmt: skip


def a_run(steps: int = 4) -> Run:
    rows = [{"step": 0, "eval/accuracy": 0.25}, *(rl_row(s) for s in range(1, steps + 1))]
    return Run(label="exp/t0", rows=rows)


def test_sums_of_an_rl_run():
    s = summarize(a_run(), seconds=20.0, total_steps=4)
    assert (s["status"], s["steps"], s["total_steps"]) == ("finished", 4, 4)
    counts = s["prompts"]
    assert counts.pop("submitted") == sum(counts.values()) == 39
    assert (s["prompts_trained"], s["samples_trained"], s["tokens_trained"]) == (32, 128, 400)
    assert s["each_sample_trained_once"] and s["handed_out_untrained"] == 0
    assert s["reward"] == pytest.approx([0.15, 0.35]) and s["accuracy"] == [0.25, 0.25]
    assert s["skipped_updates"] == 1 and s["failed_rollouts"] == {"reward": 1}
    assert s["weight_syncs"] == {"count": 4, "bytes": 8_000_000}
    assert s["seconds_by_phase"] == {
        "rollout": 4.0,
        "train": 2.0,
        "eval": 1.0,
        "start_and_other": 13.0,
    }
    json.dumps(s)


def test_a_secret_in_the_text_of_an_error_is_masked():
    words = "hf_abcdefghijklmnopqrstuvwx, WANDB_API_KEY=7f3a9c1be0d24586, eos_token=<|end|>"
    error = ValueError(f"GET https://bob:hunter2@host/x failed with {words}")
    status = summarize(a_run(), seconds=20.0, total_steps=4, error=error)["status"]
    assert status.startswith("failed: ValueError: GET ") and "host/x" in status
    assert not any(secret in status for secret in ("hunter2", "hf_abc", "7f3a"))
    assert "eos_token=<|end|>" in status


def test_skipped_updates_are_no_training():
    run = a_run()
    run.rows[2] |= {"skipped_sequences": 16.0, "skipped_tokens": 40.0}
    final = run.rows[-1] | {
        "rollout/trained": 30.0, "rollout/trained_samples": 112.0,
        "rollout/skipped": 2.0, "rollout/skipped_samples": 16.0,
    }  # fmt: skip
    s = summarize(run, seconds=20.0, total_steps=4, final=final)
    assert (s["prompts_trained"], s["samples_trained"], s["tokens_trained"]) == (30, 112, 360)
    assert (s["prompts_skipped"], s["samples_skipped"], s["handed_out_untrained"]) == (2, 16, 0)
    assert s["each_sample_trained_once"]
    del run.rows[2]["skipped_sequences"]  # books that disagree with the steps
    assert not summarize(run, seconds=20.0, final=final)["each_sample_trained_once"]


def test_a_refused_start_leaves_the_summary_of_a_finished_run(tmp_path, capsys):
    def start(**kw):
        return StatsLogger(
            StatsLoggerConfig(table=False), run_dir=tmp_path, experiment_name="e", trial_name="t",
            run_config={}, **kw,
        )  # fmt: skip

    first = start()
    first.log(1, rl_row(1), total_steps=1)
    first.close()
    written = {name: (tmp_path / name).read_bytes() for name in ("summary.json", "report.html")}
    assert json.loads(written["summary.json"])["status"] == "finished"
    start(from_step=1).close(error=ValueError("no such dataset"))
    start(from_step=1).close(final={})  # nothing to do
    assert written == {name: (tmp_path / name).read_bytes() for name in written}
    again = start(from_step=1)
    again.log(2, rl_row(2), total_steps=2)
    again.close(error=ValueError("later"))
    assert "failed: ValueError" in (tmp_path / "summary.json").read_text()


def test_a_sample_too_few_or_too_many_is_not_hidden():
    run = a_run()
    run.rows[2]["tokens/sequences"] = 36.0
    s = summarize(run, seconds=20.0, total_steps=4)
    assert not s["each_sample_trained_once"]
    assert "NOT EACH ONCE" in shown(s)


def test_counters_as_the_run_ends_win_over_the_last_step():
    final = counters(32, failed=1, handed=8)
    s = summarize(a_run(), seconds=20.0, total_steps=9, final=final, error=KeyError("boom\nmore"))
    assert s["status"].startswith("failed: KeyError") and s["prompts"]["failed"] == 1
    assert s["handed_out_untrained"] == 8
    text = shown(s)
    assert "4 of 9" in text and "8 more about to be trained" in text and "1 failed" in text
    assert summarize(a_run(), seconds=1.0, total_steps=9)["status"] == "stopped early"


def test_a_run_that_failed_in_its_first_step():
    s = summarize(
        Run(label="x", rows=[]), seconds=1.0, final=counters(0, failed=1), error=KeyboardInterrupt()
    )
    assert s["status"] == "failed: KeyboardInterrupt" and s["steps"] == 0
    assert "3 submitted = 0 running + 0 accepted + 2 rejected + 1 failed" in shown(s)


def test_supervised_runs_have_no_rollout_lines():
    rows = [
        {"step": i, "loss": 1.0 / i, "tokens/sequences": 8.0, "tokens/trained": 50.0}
        for i in range(1, 13)
    ]
    s = summarize(Run(label="x", rows=rows), seconds=5.0, total_steps=12)
    assert (s["samples_trained"], s["tokens_trained"]) == (96, 600)
    assert "prompts" not in s and "reward" not in s and s["loss"][0] > s["loss"][1]
    assert "rejected" not in shown(s) and "96 samples, 600 tokens" in shown(s)


@pytest.mark.parametrize("n, window", [(1, 1), (2, 1), (3, 1), (5, 2), (10, 5), (99, 5)])
def test_the_ends_of_a_curve_do_not_overlap(n, window):
    assert end_window(n) == window


def shown(summary: dict, width: int = 100) -> str:
    """The printed words, without the frame and the line breaks."""
    out = io.StringIO()
    print_summary({"paths": {}} | summary, Console(file=out, width=width))
    assert all(len(line) <= width for line in out.getvalue().splitlines())
    return " ".join(out.getvalue().replace("│", " ").split())


@pytest.mark.parametrize("width", [40, 80, 200])
def test_it_fits_any_terminal(width):
    text = shown(summarize(a_run(), seconds=20.0, total_steps=4), width)
    for word in (
        "exp/t0",
        "finished",
        "submitted",
        "each",
        "once",
        "rollout 20%",
        "start and other 65%",
        "8MB",
    ):
        assert word in text


def log(run_dir, rows, **end) -> None:
    logger = StatsLogger(
        StatsLoggerConfig(table=False), run_dir=run_dir, experiment_name="e", trial_name="t",
        run_config={}, from_step=rows[0]["step"] - 1 if rows else None,
    )  # fmt: skip
    for row in rows:
        logger.log(row["step"], row, total_steps=4)
    logger.close(**end)


def test_written_printed_and_in_the_report_with_totals_over_a_resume(tmp_path, capsys):
    run = tmp_path / "e" / "t"
    (run / "recover").mkdir(parents=True)
    log(run, [rl_row(s) for s in (1, 2, 3)], error=RuntimeError("killed"))
    first = json.loads((run / "summary.json").read_text())
    assert first["status"] == "failed: RuntimeError: killed" and first["samples_trained"] == 96
    capsys.readouterr()
    log(run, [rl_row(s) for s in (3, 4)])  # from the checkpoint of step 2
    s = json.loads((run / "summary.json").read_text())
    assert (s["status"], s["steps"], s["samples_trained"]) == ("finished", 4, 128)
    assert s["each_sample_trained_once"]
    assert s["paths"] == {
        "report": str(run / "report.html"), "checkpoints": str(run / "recover"),
    }  # fmt: skip
    out = capsys.readouterr().out
    assert "39 submitted = " in out and f"checkpoints:   {run / 'recover'}" in out
    page = (run / "report.html").read_text()
    assert "<h2>Summary</h2>" in page and "39 submitted = 2 running" in page


def test_a_run_that_failed_in_its_first_step_says_why_and_where_its_log_is(tmp_path, capsys):
    """Before anything is in stats.jsonl."""
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    (tmp_path / "logs").mkdir()
    log(tmp_path, [], final=counters(0, failed=3), error=RuntimeError("no server is left"))
    page = (tmp_path / "report.html").read_text()
    for text in (capsys.readouterr().out, page):
        assert "failed: RuntimeError: no server is left" in text
        assert str(tmp_path / "logs") in text and "each once" not in text
    assert status(tmp_path)["last_error"] == "RuntimeError: no server is left"


def test_a_run_that_did_nothing_says_nothing(tmp_path, capsys):
    log(tmp_path, [], error=ValueError("bad config"))
    assert capsys.readouterr().out == "" and not (tmp_path / "summary.json").exists()


def test_a_run_that_logged_no_step_and_ended_well_is_not_summed_up(tmp_path, capsys):
    """As a replay, whose counters are those of its checkpoint."""
    log(tmp_path, [], final=counters(8))
    assert capsys.readouterr().out == "" and not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("harm", ["no stats", "stats are text", "summary is text"])
def test_a_run_ends_well_whatever_became_of_its_files(tmp_path, capsys, harm):
    logger = StatsLogger(
        StatsLoggerConfig(), run_dir=tmp_path, experiment_name="e", trial_name="t", run_config={}
    )
    logger.log(1, {"loss": 1.0})
    if harm == "no stats":
        (tmp_path / "stats.jsonl").unlink()
    elif harm == "stats are text":
        (tmp_path / "stats.jsonl").write_text("{all gone}\n")
    else:
        (tmp_path / "summary.json").write_text("garbage")
    logger.close()
    written = tmp_path / "summary.json"
    if harm == "summary is text":
        assert json.loads(written.read_text())["steps"] == 1
    else:
        assert not written.exists()


def test_elapsed_seconds_do_not_follow_the_wall_clock(tmp_path, monkeypatch):
    logger = StatsLogger(
        StatsLoggerConfig(), run_dir=tmp_path, experiment_name="e", trial_name="t", run_config={}
    )
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3000 * 86400)
    logger.log(1, {"loss": 1.0})
    logger.close()
    row = json.loads((tmp_path / "stats.jsonl").read_text())
    assert 0 <= row["elapsed_s"] < 3600
