""".ci/run on a repository of a few lines, whose tiers print what they see."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOT_USER = os.geteuid() == 0
SEE = """
import json, os, sys
names = ("HOME", "UV_CACHE_DIR", "OWN_PYTHON", "OWN_CACHE")
found = {k: v for k, v in os.environ.items() if k in names or k.startswith("PIP_")}
print("seen", json.dumps([sys.argv[1], os.path.basename(os.getcwd()), os.geteuid(), found]))
"""
MAKEFILE = """
test later test-stranger:
\t@$(PYTHON) see.py $@
stranger-312:
\t@$(PYTHON312) see.py $@
broken:
\t@$(PYTHON) see.py $@
\t@exit 3
slurm:
\t@echo slurm
find-312:
\t@echo {closed}
find-313:
\t@echo
.PHONY: test
"""
# the starter's own python3, which an ordinary user of a machine would not have
OWN = f"""#!/bin/sh
OWN_PYTHON=yes exec {sys.executable} "$@"
"""
PIP = """
[global]
index-url = https://mirror/simple
[install]
find-links =
    /wheels/a
    /wheels/b
timeout = 5
"""


@pytest.fixture
def programs() -> Iterator[Path]:
    """A directory that everybody may read, as pytest's own are not."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        (Path(path) / "python3").write_text(OWN)
        (Path(path) / "python3").chmod(0o755)
        yield Path(path)


@pytest.fixture
def repository(tmp_path: Path, programs: Path) -> Path:
    path = tmp_path / "source"
    (path / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", path / ".ci" / "run")
    (closed := tmp_path / "python3.12").write_text(OWN)
    closed.chmod(0o700)
    (path / "see.py").write_text(SEE)
    (path / "Makefile").write_text(MAKEFILE.format(closed=closed))
    git = ["git", "-C", str(path), "-c", "user.name=a", "-c", "user.email=a@example.com"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "a"]):
        subprocess.run([*git, *words], check=True)
    (path / "see.py").write_text("raise SystemExit(9)")  # no part of the commit
    return path


def run_ci(repository: Path, programs: Path, *tiers: str) -> tuple[int, str, dict[str, Any]]:
    """Returns the exit status, the output, and what each tier saw: directory, user, variables."""
    home = repository.parent / "home"
    home.mkdir()
    (repository.parent / "pip.conf").write_text(PIP)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "MAKE", "TMP", "CI_"))}
    env = kept | {
        "HOME": str(home), "OWN_CACHE": f"{home}/cache", "PIP_TIMEOUT": "7", "CI_USER": "nobody",
        "PATH": f"{programs}:{kept['PATH']}",
        "PIP_CONFIG_FILE": str(repository.parent / "pip.conf"),
    }  # fmt: skip
    done = subprocess.run(
        [str(repository / ".ci" / "run"), *tiers],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
    )  # fmt: skip
    lines = [x.removeprefix("seen ") for x in done.stdout.splitlines() if x.startswith("seen ")]
    seen = {tier: facts for tier, *facts in map(json.loads, lines)}
    return done.returncode, done.stdout, seen


def test_a_tier_runs_as_an_ordinary_user_on_the_commit(repository: Path, programs: Path) -> None:
    status, output, seen = run_ci(repository, programs, "test")
    assert status == 0 and list(seen) == ["test"], output
    directory, user, env = seen["test"]
    assert directory == "megarl" and user != 0
    assert env["PIP_INDEX_URL"] == "https://mirror/simple"
    assert env["PIP_FIND_LINKS"] == "/wheels/a /wheels/b"
    assert env["PIP_TIMEOUT"] == "7"  # a variable that was set wins
    home = Path(env["HOME"])
    assert home.name == "home" and home != repository.parent / "home" and not home.exists()
    assert Path(env["UV_CACHE_DIR"]).is_relative_to(home)
    assert ("OWN_PYTHON" in env, "OWN_CACHE" in env) == (
        (False, False) if ROOT_USER else (True,) * 2
    )
    assert ("slurm" in output.splitlines()) == ROOT_USER


def test_a_tier_that_fails_hides_none(repository: Path, programs: Path) -> None:
    status, output, seen = run_ci(repository, programs, "broken", "later")
    assert status == 1 and list(seen) == ["broken", "later"], output


def test_interpreters_that_the_user_may_not_execute(repository: Path, programs: Path) -> None:
    status, output, seen = run_ci(repository, programs, "test-stranger")
    assert status == 0, output
    if ROOT_USER:
        assert seen["stranger-312"][:2] == ["megarl", 0] and "OWN_PYTHON" in seen["stranger-312"][2]
        assert "stranger-312" in output.splitlines()[-2] and "313" in output.splitlines()[-1]
    else:
        assert list(seen) == ["test-stranger"]
