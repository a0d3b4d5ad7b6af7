"""The wheel by itself: its commands, its public names, its files, and a step of SFT."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.tiny import save_tiny
from tests.tiny_tokenizer import save_tokenizer
from tests.wheel.conftest import HOME, ROOT, Run

NAMES = """
import json, megarl
for name in megarl.__all__:
    getattr(megarl, name)
print(json.dumps([megarl.__file__, len(megarl.__all__)]))
"""

DEPENDENCIES = """
import json
from importlib.metadata import requires, version
from packaging.requirements import Requirement
asked = [Requirement(text) for text in requires("megarl-trainer")]
asked = [r for r in asked if r.marker is None or r.marker.evaluate({"extra": ""})]
print(json.dumps([len(asked), [str(r) for r in asked if version(r.name) not in r.specifier]]))
"""


@pytest.mark.parametrize("command", ["megarl", "megarl-launch"])
def test_commands_say_how_they_are_called(installed: Run, command: str) -> None:
    assert installed(command, "--help").strip()


def test_every_public_name_is_imported(installed: Run) -> None:
    file, names = json.loads(installed("python", "-c", NAMES).splitlines()[-1])
    assert Path(file).is_relative_to(HOME) and names > 0


def test_every_file_of_the_package_is_in_it(installed: Run) -> None:
    code = "import megarl; print(megarl.__path__[0])"
    there = Path(installed("python", "-c", code).splitlines()[-1])
    here = ROOT / "megarl"

    def files(folder: Path) -> set[str]:
        found = (f for f in folder.rglob("*") if f.is_file() and "__pycache__" not in f.parts)
        return {f.relative_to(folder).as_posix() for f in found}

    shipped = {f"shipped/{f}/{name}" for f in ("configs", "examples") for name in files(ROOT / f)}
    assert files(there) == files(here) | shipped


def test_a_shipped_configuration_is_written_and_sound(installed: Run, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "qwen3")
    save_tokenizer(tmp_path / "model")
    assert "configs/quickstart_sft.yaml" in installed("megarl", "init", "--from", "quickstart_sft")
    config = ("--config", "configs/quickstart_sft.yaml", f"model.path={model}")
    installed("megarl", "launch", *config, "--check")
    assert installed("python", "examples/quickstart.py", "--help").strip()


def test_an_error_names_a_command_that_pip_takes(installed: Run) -> None:
    code = "from megarl.utils.extras import install_hint; print(install_hint('stacks'))"
    *_, target = shlex.split(installed("python", "-c", code).splitlines()[-1])
    asked = ("install", "--dry-run", "--no-index", "--no-deps", target)
    assert "does not provide" not in installed("python", "-m", "pip", *asked)


def test_the_versions_of_the_tests_are_those_it_asks_for(installed: Run) -> None:
    asked, unmet = json.loads(installed("python", "-c", DEPENDENCIES).splitlines()[-1])
    assert asked > 0 and unmet == []


def test_a_step_of_sft(installed: Run, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "qwen3")
    save_tokenizer(tmp_path / "model")
    installed(
        "megarl", "launch", "recipe=sft", f"model.path={model}", f"fileroot={tmp_path / 'runs'}",
        "experiment_name=wheel", "trial_name=sft", "total_train_steps=1", "model.optimizer.lr=1e-3",
        "train_dataset.type=arithmetic", "train_dataset.size=8", "train_dataset.batch_size=4",
        "train_dataset.options.level=1",
    )  # fmt: skip
    rows = [json.loads(row) for row in (tmp_path / "runs/wheel/sft/stats.jsonl").open()]
    assert rows[-1]["step"] == 1
