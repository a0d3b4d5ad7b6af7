"""megarl replay before it starts anything, and the session that hands out recorded batches."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.api.batch import Batch
from megarl.cli import main as megarl
from megarl.cli.replay import GRAPH_TRAINER, last_checkpoint, main
from megarl.config.earlier_run import MARKER, RECOVER_DIR
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config, save_config
from megarl.config.run import batch_path
from megarl.observability.run_log import FingerprintFile
from megarl.trainer.replay import RecordedSession, Replaying, replaying
from megarl.trainer.rl import PPOTrainer, RLTrainer
from megarl.trainer.step_recorder import as_tensors, record_batch
from megarl.utils.files import seal
from tests.unit.bigram import BigramEngine, rollout


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two processes with checkpoints of steps 2 and 4, and the batches of 3 to 5."""
    directory = tmp_path / "e" / "t"
    tracked = "stats_logger.tracker=mine:Tracker"
    save_config(load_config(None, [f"fileroot={tmp_path}", tracked]), directory / "config.yaml")
    for step in (2, 4):
        path = directory / RECOVER_DIR / f"step_{step:06d}"
        (path / "actor").mkdir(parents=True)
        (path / MARKER).write_text(json.dumps(seal({"version": step})))
        (path / "actor" / "weights").write_text("w")
    FingerprintFile(directory).begin(0, {"world_size": 2})
    for step in (3, 4, 5):
        batch = Batch.from_padded(rollout(BigramEngine()))
        about = {"step": step, "dataset_size": 40}
        record_batch(directory, as_tensors(batch), about, None)
    return directory


def test_the_newest_checkpoint_before_the_step(run):
    found = [last_checkpoint(run, step) for step in (2, 3, 4, 5, 9)]
    assert [c and c.step for c in found] == [None, 2, 2, 4, 4]


def test_what_is_run(run, capsys):
    assert main([str(run), "--step", "4", "--train-only", "--print", "seed=3"]) == 0
    words = capsys.readouterr().out.split()
    assert words[:4] == ["--config", str(run / "config.yaml"), "--nproc", "2"]
    cfg: Any = load_config(words[1], words[4:])
    assert cfg.replay == {"run": str(run), "step": 4, "what": "train"}
    assert cfg.seed == 3 and cfg.recover.mode == "auto"
    assert not cfg.stats_logger.tracker.type  # whose run is the run that is replayed
    out = Path(cfg.fileroot, cfg.experiment_name, cfg.trial_name)
    assert out == run / "replay" / "step_000004"
    mine, copy = (d / RECOVER_DIR / "step_000002" / "actor" / "weights" for d in (run, out))
    assert os.path.samefile(mine, copy)  # it takes no room
    assert [c.name for c in (out / RECOVER_DIR).iterdir()] == ["step_000002"]
    main([str(run), "--step", "4", "--print"])
    assert "trial_name=step_000004_2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "trainer",
    [
        ["trainer.mode=controller", "trainer.workers=2", "trainer.scheduler=ray"],
        ["trainer.mode=controller", "trainer.workers=2", f"trainer.type={GRAPH_TRAINER}"],
    ],
)
def test_runs_under_a_controller_are_replayed_without_one(run, tmp_path, capsys, trainer):
    config = run / "config.yaml"
    save_config(load_config(None, [f"fileroot={tmp_path}", *trainer]), config)
    assert main([str(run), "--step", "4", "--train-only", "--print"]) == 0
    cfg = load_config(config, capsys.readouterr().out.split()[4:])
    assert cfg.trainer == load_config(None).trainer


@pytest.mark.parametrize(
    "words, message",
    [
        (["--step", "2", "--train-only"], "batch of step 1 is not in .*steps 3, 4, 5 are recorded"),
        (["--step", "9", "--train-only"], "begins at step 5, and the batch of step 6 is not in"),
        (["--step", "4", "--train-only", "--rollout-only"], "give one of them, or none"),
        (["--step", "0"], "use a whole number of at least 1"),
        ([], "required: --step"),
    ],
)
def test_what_cannot_be_replayed_is_told(run, words, message):
    with pytest.raises(ConfigError, match=message):
        main([str(run), *words])
    assert not (run / "replay").exists()


def test_no_run_directory_and_a_directory_that_is_taken(run, tmp_path):
    with pytest.raises(ConfigError, match="it is no run directory"):
        main([str(tmp_path), "--step", "1"])
    with pytest.raises(ConfigError, match="it exists; name another"):
        main([str(run), "--step", "3", "--out", str(tmp_path)])


@pytest.mark.parametrize("command", ("diff", "replay"))
def test_help(command, capsys):
    with pytest.raises(SystemExit) as end:
        megarl([command, "--help"])
    assert end.value.code == 0 and f"usage: megarl {command}" in capsys.readouterr().out


def a_session(run: Path) -> RecordedSession:
    return RecordedSession(load_config(None, []), run, lambda fn, *args: fn(*args))  # type: ignore[arg-type]


def test_recorded_batches_come_as_they_were_handed_out(run):
    session = a_session(run)
    taken: list[Batch] = []
    session.step_recorder = SimpleNamespace(step=4, handed_out=taken.append)  # type: ignore[assignment]
    assert session.dataset_size == 40
    batch = session.prepare_batch()
    assert taken == [batch] and not batch.placed
    padded = rollout(BigramEngine())
    assert {k: v.dtype for k, v in batch.padded().items()} == {
        k: v.dtype for k, v in padded.items()
    }
    assert all(torch.equal(batch.padded()[name], padded[name]) for name in padded)
    session.step_recorder.step = 7
    with pytest.raises(ConfigError, match=r"step_000007.* cannot be read"):
        session.prepare_batch()
    batch_path(run, 4).write_bytes(batch_path(run, 4).read_bytes()[:-9])
    session.step_recorder.step = 4
    with pytest.raises(ConfigError, match=r"step_000004.* cannot be read"):
        session.prepare_batch()


def test_samples_may_leave_a_recorded_batch(run):
    session = a_session(run)
    batch = Batch.from_padded(rollout(BigramEngine()))
    assert len(session.drop(batch, torch.arange(16) < 2, "reward")) == 14


def test_the_runs_own_trainer_makes_the_steps():
    made = replaying(PPOTrainer)
    assert made.__mro__[1:4] == (Replaying, PPOTrainer, RLTrainer)
    assert made.step is PPOTrainer.step
    assert replaying(RLTrainer).step is RLTrainer.step
    with pytest.raises(ConfigError, match="a replay needs a subclass of RLTrainer"):
        replaying(SimpleNamespace)


@pytest.mark.parametrize(
    ("words", "warned"), [([], True), (["--rollout-only"], True), (["--train-only"], False)]
)
def test_a_run_without_a_seed_is_named_before_anything_starts(
    run, capsys, monkeypatch, words, warned
):
    said: list[str] = []

    def launch(arguments: list[str]) -> int:
        said.append(capsys.readouterr().out)
        return 3

    monkeypatch.setattr("megarl.launcher.local.main", launch)
    assert main([str(run), "--step", "4", *words]) == 3
    assert ("gconfig.seed" in said[0]) == warned
