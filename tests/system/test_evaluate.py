"""`megarl eval` as a user gives it, with a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.tiny_model import make_model
from tests.leftovers import Mark

ROOT = Path(__file__).resolve().parents[2]


def evaluate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megarl.cli", "eval", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


def test_a_model_is_evaluated_and_every_answer_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = Mark()
    for name, value in mark.env.items():
        monkeypatch.setenv(name, value)
    make_model(tmp_path / "model", hidden=64, layers=1)
    out = tmp_path / "out"
    done = evaluate(
        str(tmp_path / "model"), "--datasets", "arithmetic", "--n", "4", "--out", str(out),
        "valid_dataset.size=20", "valid_dataset.options.level=1", "server.context_length=64",
        "eval_gconfig.max_new_tokens=3",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    mark.assert_none_left()
    found = json.loads((out / "results.json").read_text())["results"]["arithmetic"]
    assert (found["prompts"], found["samples"]) == (20, 80)
    assert 0 <= found["pass@1"] <= found["pass@2"] <= found["pass@4"] <= 1
    assert found["pass@1"] == pytest.approx(found["accuracy"])
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 80
    assert sum(s["reward"] >= 1 for s in samples) == round(80 * found["accuracy"])
    assert len({s["completion"] for s in samples if s["prompt_number"] == 0}) > 1  # sampled
    assert "pass@4" in done.stdout and str(out / "samples.jsonl") in done.stdout


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["nowhere", "--datasets", "arithmetic"], "no config.json at 'nowhere'"),
        ([], "give one model directory"),
        (["MODEL"], "give --datasets or --config"),
        (["MODEL", "--datasets", "arithmetic", "--n", "0"], "--n 0: use a whole number"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: list[str], why: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    arguments = [str(tmp_path) if a == "MODEL" else a for a in arguments]
    done = evaluate(*arguments)
    assert done.returncode == 2 and why in done.stderr and "Traceback" not in done.stderr
