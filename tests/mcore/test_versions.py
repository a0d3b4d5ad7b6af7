"""Training checkpoints pass from one megatron-core to the other; `make test-mcore` has both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.mcore.worker import CASES

ROOT = Path(__file__).parents[2]
HOME = Path(os.environ.get("MEGARL_MCORE_HOME", ROOT / ".venv-mcore"))
OTHER = {"oldest": "newest", "newest": "oldest"}
Results = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Returns results(action, version, writer): what that version's worker printed, run once."""
    if not (HOME / "megatron").is_dir():
        pytest.fail(f"no megatron-core in {HOME}: run `make test-mcore`")
    home = tmp_path_factory.mktemp("checkpoints")

    @cache
    def of(action: str, runs: str, writer: str) -> dict[str, Any]:
        path = [str(ROOT)] if runs == "oldest" else [str(HOME), str(ROOT)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(path), "MEGARL_DEVICE": "cpu"}
        done = subprocess.run(
            [sys.executable, "-m", "tests.mcore.worker", action, str(home), writer],
            cwd=ROOT, env=env, capture_output=True, text=True, timeout=500,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    return of


def pinned(file: str) -> str:
    """The version that a file of constraints has for this Python."""
    lines = (ROOT / "constraints" / file).read_text().splitlines()
    asked = [Requirement(line) for line in lines if line.startswith("megatron-core==")]
    (pin,) = [r for r in asked if r.marker is None or r.marker.evaluate()]
    return str(pin.specifier).removeprefix("==")


def test_each_version_is_the_pinned_one(results: Results) -> None:
    assert version("megatron-core") == pinned("mcore-newest.txt")  # of the tier's other files
    for name, file in (("oldest", "cpu.txt"), ("newest", "mcore-newest.txt")):
        saved = results("save", name, name)
        assert saved["version"] == pinned(file)
        assert Path(saved["code"]).is_relative_to(HOME) == (name == "newest")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("writer", OTHER)
def test_training_goes_on_under_the_other_version(results: Results, writer: str, name: str) -> None:
    saved, loaded = results("save", writer, writer), results("load", OTHER[writer], writer)
    for before, after in zip(saved["figures"][name], loaded["figures"][name], strict=True):
        assert after == pytest.approx(before, rel=1e-5)


@pytest.mark.parametrize("runs", OTHER)
def test_megatron_core_has_nothing_to_warn_of(results: Results, runs: str) -> None:
    for found in (results("save", runs, runs), results("load", runs, OTHER[runs])):
        assert found["warnings"] == []
