"""Runs whose directory holds an earlier start's, as a launcher looks at them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megarl.config.earlier_run import (
    MARKER,
    RECOVER_DIR,
    architecture,
    check_run_dir,
    ended,
)
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config, run_dir, save_config
from megarl.launcher import local
from megarl.observability.episodes import FOLDER, INDEX
from megarl.observability.run_log import EVAL_REWARDS_FILE, FINGERPRINTS_FILE
from megarl.utils.files import seal
from tests.hf_stub import write_stub


def test_a_run_goes_on_without_a_variable_that_its_start_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_MODEL", str(write_stub(tmp_path / "model")))
    monkeypatch.setenv("MY_KEY", "x")
    command = [
        "recipe=sft", "model.path=${oc.env:MY_MODEL}", f"fileroot={tmp_path}", "recover.mode=auto"
    ]  # fmt: skip
    begun = load_config(None, [*command, "+train_dataset.options.api_key=${oc.env:MY_KEY}"])
    save_config(begun, run_dir(begun) / "config.yaml")
    checkpoint = run_dir(begun) / RECOVER_DIR / "step_000004"
    checkpoint.mkdir(parents=True)
    info = {"models": {"model": architecture(begun, "model")}, "version": 4}
    (checkpoint / MARKER).write_text(json.dumps(seal(info)))
    monkeypatch.delenv("MY_KEY")
    cfg = load_config(None, command)
    check_run_dir(cfg)
    cfg.model.path = str(write_stub(tmp_path / "other"))
    with pytest.raises(ConfigError, match="it was"):
        check_run_dir(cfg)


def test_a_changed_key_of_a_model_beside_a_vision_tower_is_named(tmp_path: Path) -> None:
    model = write_stub(tmp_path / "model")
    text = {"rope_theta": 1e4, "dtype": "bfloat16"}
    cfg = load_config(None, ["recipe=sft", f"model.path={model}", f"fileroot={tmp_path}"])

    def write(**changed: Any) -> None:
        (model / "config.json").write_text(json.dumps({"text_config": text | changed}))

    write()
    checkpoint = run_dir(cfg) / RECOVER_DIR / "step_000004"
    checkpoint.mkdir(parents=True)
    info = {"models": {"model": architecture(cfg, "model")}, "version": 4}
    (checkpoint / MARKER).write_text(json.dumps(seal(info)))
    write(dtype="float32")
    check_run_dir(cfg)
    write(rope_theta=5.0)
    with pytest.raises(ConfigError, match=r"\(text_config.rope_theta 10000.0 -> 5.0\)"):
        check_run_dir(cfg)
    cfg.model.override_config = {"text_config": {"rope_theta": 1e4}}
    check_run_dir(cfg)
    write(rope_theta=5.0, hidden_size=8)
    with pytest.raises(ConfigError, match=r"\(text_config.hidden_size None -> 8\)"):
        check_run_dir(cfg)


@pytest.mark.parametrize("ends", [["--check"], []])
def test_files_of_an_older_megarl_are_refused_before_anything_starts(
    tmp_path: Path, ends: list[str], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(local, "launch", lambda *_: pytest.fail("something was started"))
    command = [
        "recipe=sft", f"model.path={write_stub(tmp_path / 'model')}", f"fileroot={tmp_path}/runs",
        "model.optimizer.lr=1e-5", "train_dataset.type=arithmetic",
    ]  # fmt: skip
    run = run_dir(load_config(None, command))
    for name in (f"{FOLDER}/{INDEX}", FINGERPRINTS_FILE):
        (run / name).parent.mkdir(parents=True)
        (run / name).write_text('{"step": 1}\n{"kind": "start", "after": 0}\n{"step": 1}\n')
    (run / EVAL_REWARDS_FILE).write_text('{"step": 1, "rewards": {"after": [1.0]}}\n')
    assert local.main([*command, *ends]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "goes on from its checkpoint" in error
    assert str(run / FOLDER / INDEX) in error and str(run / FINGERPRINTS_FILE) in error
    assert not (run / "config.yaml").exists()


def test_a_start_of_a_run_that_has_ended_starts_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_stub(tmp_path / "model")
    turns = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(8 * (json.dumps({"messages": turns}) + "\n"))
    command = [
        "recipe=sft", f"model.path={model}", f"fileroot={tmp_path}/runs", "total_train_steps=4",
        "model.optimizer.lr=1e-5", "train_dataset.type=chat", f"train_dataset.path={rows}",
        "train_dataset.batch_size=2",
    ]  # fmt: skip

    def is_over(*overrides: str) -> bool:
        return ended(load_config(None, [*command, *overrides])) is not None

    run = run_dir(load_config(None, command))
    checkpoint = run / RECOVER_DIR / "step_000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / MARKER).write_text(json.dumps(seal({"models": {}, "version": 4})))
    assert not is_over()  # its final model is to be saved yet
    assert is_over("saver.final=false")
    (run / "final").mkdir()
    os.utime(run / "final", (1, 1))  # an older one
    assert not is_over()
    os.utime(run / "final")
    assert is_over()
    assert is_over("total_train_steps=3")
    assert not is_over("total_train_steps=5")
    assert not is_over("total_train_steps=null")  # the data say how many
    assert not is_over("recover.mode=disabled")
    with caplog.at_level("INFO"):
        assert local.main(command) == 0
    assert f"the run in {run} ended at step 4 of 4: nothing to do" in caplog.text
    assert not (run / "logs").exists()
