"""Runs that the code of 58ee8bc began go on from its checkpoints (earlier/README.md)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from tests.system.earlier.make import COMMAND, RUNS, SAVED, STEPS
from tests.system.test_recover import ROOT, SCRIPT, VERIFIED, Run

ARCHIVE = Path(__file__).parent / "earlier" / "run_58ee8bc.tar.xz"
# of steps after the checkpoint: on the machine that made the archive they are equal to the bit;
# another one's last bits may differ, and a weight moves by about the learning rate of 1e-2
CLOSE = {"rtol": 1e-3, "atol": 1e-5}
FIGURES = (
    "loss", "grad_norm", "lr", "entropy", "reward/mean", "kl_ref", "kl_coef", "eval/accuracy",
    "dataset/one/prompts", "curriculum/in_band", "curriculum/explored", "rollout/trained",
)  # fmt: skip


class EarlierRun(Run):
    """A run of the archive in a folder of its own, and the command that began it, with a key that
    has another name today."""

    def __init__(self, folder: Path, name: str) -> None:
        today = [word.replace("warmup_steps_proportion", "warmup_steps") for word in COMMAND]
        super().__init__(folder / name / "runs", (*today, *RUNS[name]))

    def start_again(self) -> tuple[int, str]:
        """Repeats the command with today's code; the status and the output."""
        env = os.environ | {"OMP_NUM_THREADS": "1", "MEGARL_DEVICE": "cpu", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-m", "megarl.launcher.local", str(SCRIPT), "--nproc", "2",
             *self.command], cwd=self.root.parent, env=env, timeout=300, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return done.returncode, done.stdout

    def continued(self) -> None:
        """Goes on as the one line says by which the directory is refused: without the files that
        it names."""
        status, output = self.start_again()
        lines = output.splitlines()
        assert status == 2 and len(lines) == 1 and "from its checkpoint" in output, output
        files = re.findall(r"runs/\S+\.jsonl", output)
        assert {Path(file).name for file in files} == {"index.jsonl", "fingerprints.jsonl"}
        for file in files:
            (self.root.parent / file).unlink()
        status, output = self.start_again()
        assert status == 0, output
        assert re.search(
            rf"continuing \S+ from step {SAVED} of {STEPS} \(version {SAVED}\)", output
        )
        assert VERIFIED in output and "the training data is not" not in output, output
        assert [row["step"] for row in self.rows()] == list(range(STEPS + 1))
        assert {step for step, _ in self.episodes()} == set(range(SAVED + 1, STEPS + 1))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as tar:
        tar.extractall(tmp_path)  # `filter` is missing before Python 3.11.4
    return tmp_path


def test_a_synchronous_run_ends_as_the_code_that_began_it_would_have(folder: Path) -> None:
    """Weights, moments, random states, the reference, the KL's weight, the place in the data and
    its pass rates are what they were: the figures of later steps are those of then."""
    run, whole = EarlierRun(folder, "sync"), Run(folder / "whole", ())
    run.continued()
    for now, then in zip(run.rows()[SAVED + 1 :], whole.rows()[SAVED + 1 :], strict=True):
        for name in (n for n in FIGURES if n in then):
            assert now[name] == pytest.approx(then[name], rel=1e-3, abs=1e-5), name
    assert sum(name in whole.rows()[-1] for name in FIGURES) == len(FIGURES)
    weights, expected = run.weights(), whole.weights()
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, **CLOSE)


def test_an_asynchronous_run_trains_what_was_in_flight(folder: Path) -> None:
    run = EarlierRun(folder, "async")
    run.continued()
    last = run.rows()[-1]
    ended = ("running", "accepted", "rejected", "failed", "dropped")
    assert last["rollout/submitted"] == sum(last[f"rollout/{name}"] for name in ended)
    assert last["rollout/trained"] == last["rollout/handed_out"] == 4 * STEPS
    assert max(row["staleness/max"] for row in run.rows()[1:]) <= 2
