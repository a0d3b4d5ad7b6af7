"""The scripts that the design documents print, in megarl's words (ports/): they run, every rank
trains on the whole batch, and the weights move."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.tiny_model import make_model

pytestmark = pytest.mark.system  # servers, launchers and time-outs that are waited for
ROOT = Path(__file__).resolve().parents[2]
PORTS = Path(__file__).resolve().parent / "ports"
PROMPTS, STEPS = 4, 2  # of a step; one epoch


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ports")
    make_model(path / "model", hidden=64, layers=2)
    rows = [{"question": f"{i}+{i + 1}=", "answer": f"#### {2 * i + 1}"} for i in range(10)]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:8]))
    (path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[8:]))
    return path


def config(home: Path, run: Path) -> list[str]:
    (run / "my_config.yaml").write_text(f"""
experiment_name: ports
fileroot: {run}
total_train_epochs: 1
actor:
  path: {home}/model
  mb_spec: {{max_tokens_per_mb: 8192}}
  adv_norm: batch
  kl_coef: 0.01
  reward_clip: 1000
  optimizer: {{lr: 1.0e-3, weight_decay: 0.0, lr_scheduler_type: constant}}
ref:
  path: ${{actor.path}}
gconfig: {{max_new_tokens: 8}}
server: {{type: embedded, context_length: 256}}
train_dataset: {{type: gsm8k, path: {home}/rows.jsonl, batch_size: {PROMPTS}}}
stats_logger: {{table: false, report: false}}
""")
    return ["--config", str(run / "my_config.yaml")]


def launch(script: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "megarl.launcher.local", str(PORTS / script), *args],
        cwd=ROOT, timeout=400, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def figures(run: Path, *, samples: int, versions: list[int]) -> list[dict[str, float]]:
    """The rows of the run, of which each has finite figures and that many samples. A step in which
    no answer of the random model is right has no figures of right ones."""
    rows = [json.loads(line) for line in (run / "ports/trial0/stats.jsonl").open()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert row["samples"] == samples
        finite = {k: v for k, v in row.items() if not k.startswith("correct_seq_len/")}
        assert all(value is not None and math.isfinite(value) for value in finite.values())
        assert row["grad_norm"] > 0
    assert [row["servers_version"] for row in rows] == versions
    return rows


def test_gsm8k_grpo(home: Path, tmp_path: Path) -> None:
    """Document 002, two data-parallel ranks and a server by allocation_mode."""
    launch(
        "gsm8k_grpo.py",
        *config(home, tmp_path),
        *("allocation_mode=embedded.d1p1t1+d2p1t1", f"tokenizer_path={home}/model"),
        *(
            "actor.recompute_logprob=true",
            "gconfig.n_samples=4",
            "gconfig.seed=1",  # with some others no answer has an even digit
            f"valid_dataset.path={home}/held_out.jsonl",
        ),
        *("valid_dataset.type=gsm8k", "evaluator.freq_steps=2", "eval_gconfig.max_new_tokens=4"),
    )
    rows = figures(tmp_path, samples=4 * PROMPTS, versions=[1, 2])
    assert all(row["world_size"] == 2 and row["timing/rollout_s"] > 0 for row in rows)
    assert "eval/accuracy" not in rows[0] and rows[1]["eval/samples"] == 2
    kept = (tmp_path / "ports/trial0/eval_rewards.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in kept] == [2]
    before = load_file(home / "model/model.safetensors")
    after = load_file(tmp_path / "ports/trial0/final/model.safetensors")
    assert sorted(before) == sorted(after)
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("mode", ["spmd", "controller"])
def test_main_grpo(home: Path, tmp_path: Path, mode: str) -> None:
    """Document 000, on two ranks of their own, and under one controller with two trainers."""
    ends = f"gconfig.stop_token_ids={list(range(100, 140))}".replace(" ", "")  # lengths differ
    launch(
        "main_grpo.py",
        *config(home, tmp_path),
        *(ends, "gconfig.seed=1"),
        *("--nproc", "2", f"trainer.mode={mode}", "rollout.workflow.options.num_turns=2"),
    )
    # a rollout of two turns is two rows; weights go to the servers before each rollout
    rows = figures(tmp_path, samples=2 * PROMPTS, versions=[1, 2])
    assert all(0 < row["mean_reward"] <= 16 for row in rows)
