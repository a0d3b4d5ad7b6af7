"""Gives tests facts about Transformer Engine's layers, each from a process (tests/te/worker.py).

All of them start together, when the first is asked for. `make test-te` installs the versions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HOME = Path(os.environ.get("MEGARL_TE_HOME", ROOT / ".venv-te"))
VERSIONS = ("oldest", "newest")
# the longest first; "none" is without Transformer Engine
JOBS = (
    ("newest", "big"), ("newest", "contract"), ("oldest", "contract"),
    ("newest", "names"), ("oldest", "names"), ("none", "names"),
)  # fmt: skip
Facts = Callable[[str, str], Any]


@pytest.fixture(scope="session")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Facts]:
    """Returns facts(version, mode): what the worker of that version wrote."""
    missing = [str(HOME / v) for v in VERSIONS if not (HOME / v / "transformer_engine").is_dir()]
    if missing:
        pytest.fail(f"no Transformer Engine in {', '.join(missing)}: run `make test-te`")
    home = tmp_path_factory.mktemp("facts")
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        running: dict[tuple[str, str], Future[Any]] = {
            job: pool.submit(work, *job, home) for job in JOBS
        }
        yield lambda version, mode: running[version, mode].result()
        for future in running.values():
            future.cancel()


def work(version: str, mode: str, home: Path) -> Any:
    file = home / f"{version}-{mode}.json"
    path = [str(ROOT)] if version == "none" else [str(HOME / version), str(ROOT)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("NVTE_")}
    env |= {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "MEGARL_DEVICE": "cpu"}
    if mode == "names":
        del env["MEGARL_DEVICE"]  # it says that there is a GPU
    done = subprocess.run(
        [sys.executable, "-O", "-m", "tests.te.worker", mode, str(file)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, f"{version} {mode}: {done.stderr[-1500:]}"
    return json.loads(file.read_text(encoding="utf-8"))
