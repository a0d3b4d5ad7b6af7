"""The venv that `make test-wheel` put the wheel in."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOME = Path(os.environ.get("MEGARL_WHEEL_VENV", ROOT / ".venv-wheel"))
Run = Callable[..., str]


@pytest.fixture
def installed(tmp_path: Path) -> Run:
    """Returns installed(program, *words): what a program of the venv prints, run far from the
    checkout."""
    if not (HOME / "bin" / "megarl").is_file():
        pytest.fail(f"no megarl in {HOME}: run `make test-wheel`")

    def run(program: str, *words: str) -> str:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run(
            [str(HOME / "bin" / program), *words], cwd=tmp_path, env=env, timeout=500, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:]
        return done.stdout

    return run
