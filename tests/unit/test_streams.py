"""What is printed never fails a process, whatever its terminal can show."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

TEXT = "→ 中 \U0001f600 \ud800 é"
# what each kind of process starts from: commands, launchers, trainers, servers, workers, scripts
LAUNCHERS = ("cli", "launcher.local", "launcher.node")
STARTS = (*LAUNCHERS, "run", "server.args", "rpc.link", "rollout.worker")


def printed(code: str, encoding: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    env = os.environ | {"PYTHONIOENCODING": encoding}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, env=env, capture_output=True, timeout=120)


@pytest.mark.parametrize("encoding", ["latin-1", "gbk", "ascii", "utf-8", "utf-8:surrogateescape"])
def test_a_character_that_stdout_lacks_is_replaced(encoding: str) -> None:
    done = printed(f"import megarl; print({TEXT!r}); print('end')", encoding)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode(encoding.partition(":")[0]).splitlines()[-1] == "end"


@pytest.mark.parametrize("start", STARTS)
def test_every_kind_of_process_is_like_that(start: str) -> None:
    done = printed(f"import megarl.{start}; print({TEXT!r})", "latin-1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode("latin-1") == "? ? ? ? é\n"


def test_a_users_own_choice_stays() -> None:
    done = printed("import megarl; print('→')", "latin-1:xmlcharrefreplace")
    assert done.stdout == b"&#8594;\n"


def test_the_summary_of_a_run_is_printed() -> None:
    code = """
from megarl.observability.report.runs import Run
from megarl.observability.report.summary import print_summary, summarize
rows = [{"step": step, "loss": 1 / step, "tokens/sequences": 8.0} for step in (1, 2)]
print_summary(summarize(Run(label="→ 中", rows=rows), seconds=1.0) | {"paths": {"run": "中"}})
"""
    done = printed(code, "latin-1")
    assert done.returncode == 0, done.stderr
    assert "1 ? 0.5" in done.stdout.decode("latin-1")
