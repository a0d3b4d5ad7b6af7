"""megarl init: three sets of answers, each trained for two steps by the command that it prints."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_model import make_model

pytestmark = pytest.mark.system  # it starts launchers

ROOT = Path(__file__).resolve().parents[2]
REWARD = "def near(completion, answer):\n    return float(answer in completion)\n"
SUMS = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(8)]
TALKS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"{a}+1="}, {"role": "assistant", "content": f"{a}"}]}
    for a in range(8)
]
PAIRS = [{"prompt": f"{a}+1=", "chosen": str(a + 1), "rejected": str(a)} for a in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, hidden=64, layers=1)
    return folder


@pytest.mark.parametrize(
    ("rows", "answers", "smaller"),
    [
        (SUMS, "--algorithm dapo --reward reward.py:near",
         "gconfig.n_samples=2 gconfig.max_new_tokens=4 actor.dynamic_sampling=false"),
        (TALKS, "--algorithm sft", ""),
        (PAIRS, "--algorithm dpo", ""),
    ],
    ids=["dapo", "sft", "dpo"],
)  # fmt: skip
def test_what_is_written_trains(
    tmp_path: Path, model: Path, rows: list[dict[str, Any]], answers: str, smaller: str
) -> None:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)

    def megarl(words: list[str]) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "megarl.cli", *words], cwd=tmp_path, timeout=200, text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    printed = megarl(["init", "--model", str(model), *answers.split()]).splitlines()
    *_, launch = (line.partition("megarl ")[2] for line in printed)
    steps = ["total_train_steps=2", "total_train_epochs=2"]
    megarl([*shlex.split(launch), *steps, *smaller.split()])
    stats = tmp_path / "runs" / tmp_path.name / answers.split()[1] / "stats.jsonl"
    assert [json.loads(line)["step"] for line in stats.read_text().splitlines()][-1] == 2
