"""docs/skills.md: every command is run, in the order of the page, beside a small model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.tiny_model import make_model

pytestmark = pytest.mark.system  # servers, launchers and time-outs that are waited for
ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands() -> list[tuple[str, int]]:
    """Each command of the page, and its exit status, which a comment may say."""
    lines = []
    for block in BLOCK.findall((ROOT / "docs" / "skills.md").read_text()):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            command, _, comment = line.strip().partition("  # ")
            lines.append((command, int(comment.removeprefix("exit status ") or 0)))
    return lines


def test_commands_of_the_skills_do_what_the_page_says(tmp_path: Path) -> None:
    for name in ("examples", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    make_model(tmp_path / "runs" / "quickstart" / "sft" / "final", hidden=64, layers=2)
    megarl = tmp_path / "bin" / "megarl"
    megarl.parent.mkdir()
    megarl.write_text(f'#!/bin/sh\nexec {sys.executable} -m megarl.cli "$@"\n')
    megarl.chmod(0o755)
    env = os.environ | {
        "PATH": f"{megarl.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    assert len(commands()) >= 14
    for command, status in commands():
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=env, timeout=300, text=True, capture_output=True
        )
        log = (tmp_path / "launch.log").read_text() if "launch.log" in command else ""
        assert done.returncode == status, f"{command}\n{done.stdout}{done.stderr}{log}"
    run = tmp_path / "runs" / "capitals" / "first"
    for name in ("report.html", "episodes.html", "trace.json.gz", "final"):
        assert (run / name).exists(), name
