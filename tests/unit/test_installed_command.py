"""The installed command finds modules of the working directory, as `python -m` does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import save_tiny
from tests.tiny_tokenizer import save_tokenizer

RECIPE = """
recipe: grpo
valid_dataset: {type: arithmetic, size: 4, reward: "rewards_of_mine:other"}
"""


@pytest.mark.parametrize("command", ["eval", "data"])
def test_modules_of_the_working_directory_are_found(tmp_path: Path, command: str) -> None:
    save_tiny(tmp_path / "model", "qwen3", layers=1)
    save_tokenizer(tmp_path / "model")
    (tmp_path / "rewards_of_mine.py").write_text("def half(completion):\n    return 0.5\n")
    (tmp_path / "own.yaml").write_text(RECIPE)
    given = {"eval": ["model", "--config", "own.yaml"], "data": ["own.yaml", "actor.path=model"]}
    words = [str(Path(sys.executable).with_name("megarl")), command, *given[command]]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "no module" not in done.stderr, done.stderr
    if command == "eval":  # the module is there, the name in it is not
        assert done.returncode == 2 and "rewards_of_mine:other" in done.stderr
