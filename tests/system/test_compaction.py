"""GRPO whose chats outgrow their bound: the policy sums them up. Servers and trainer are real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from examples.tiny_model import make_model

ROOT = Path(__file__).resolve().parents[2]
BOUND, SAMPLES, PROMPTS, STEPS = 160, 3, 2, 2


def test_grpo_trains_summaries_and_what_follows_on_them(tmp_path: Path) -> None:
    make_model(tmp_path / "model", hidden=64, layers=1)
    options = {"max_turns": 16, "compact_at": BOUND, "compact_prompt": "sum", "feedback": "no"}
    workflow = {
        "type": "megarl.rollout.workflows.multi_turn:MultiTurnWorkflow",
        "options": options,
    }
    parts = {"digit": {"type": "format", "options": {"pattern": ".*[0-9].*"}, "weight": 0.5}}
    reward = {"type": "weighted", "options": {"parts": parts}}  # never 1, so that no chat is over
    ends = list(range(4, 260, 6))  # a model that has learnt nothing writes no end
    command = [sys.executable, "-m", "megarl.launcher.local", "--nproc", "1"]
    command += ["--config", str(ROOT / "configs" / "quickstart_grpo.yaml")]
    done = subprocess.run(
        [
            *command, f"actor.path={tmp_path / 'model'}", f"fileroot={tmp_path}",
            "experiment_name=e", f"total_train_steps={STEPS}", "actor.parallel.tp=1",
            f"train_dataset.batch_size={PROMPTS}", "train_dataset.size=40", "valid_dataset=null",
            f"train_dataset.reward={json.dumps(reward)}", "actor.loss_agg=rollout-mean",
            f"gconfig.n_samples={SAMPLES}", "gconfig.max_new_tokens=24",
            f"gconfig.stop_token_ids={ends}", "saver.final=false", "recover.mode=disabled",
            f"server.context_length={BOUND}",
            f"rollout.workflow={json.dumps(workflow)}",
            "trainer=tests.system.tool_run:KeepingTrainer",
        ],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    run = tmp_path / "e" / "grpo"
    rows = [json.loads(line) for line in (run / "stats.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] > 0]
    assert len(rows) == STEPS
    for step, row in enumerate(rows, 1):
        assert row["rollout/compactions"] > 0
        assert row["forks/rows_per_rollout"] > 1
        assert row["tokens/sequences"] == SAMPLES * PROMPTS * row["forks/rows_per_rollout"]
        # each row is read by the trainer as the server read it, be it the first of its rollout or
        # one that begins with a summary
        assert row["train_rollout_logprob_abs_diff/max"] < 1e-4
        assert row["first_ratio_abs_dev"] < 1e-5 and row["n_updates"] > 0
        batch = torch.load(run / f"batch_{step}.pt")
        assert int(batch["lengths"].max()) <= BOUND
        assert len(batch["rollout_ids"].unique()) == SAMPLES * PROMPTS
        assert batch["loss_mask"].any(1).all()
