"""GRPO whose rewards are those of a model: a judge on a second server, which the launcher starts,
or a reward model beside the policy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from tests.leftovers import Mark
from tests.system.cluster_run import ROOT
from tests.tiny import save_tiny
from tests.tiny_tokenizer import save_tokenizer

# a random model says nothing that means anything, but the same about the same answer
JUDGE = """
import json, os
from megarl.rollout.rewards.judge import JudgeReward

class Letters(JudgeReward):
    def verdict(self, text):
        number = sum(map(ord, text)) % 12
        with open(os.environ["VERDICTS"], "a") as f:
            f.write(json.dumps([text, number]) + "\\n")
        return number / 10 if number <= 10 else None
"""


def launch(path: Path, command: Any, *more: str, **env: str) -> tuple[Path, list[dict[str, float]]]:
    """Runs two steps; returns the run's directory and the metrics of its steps."""
    model, mark = next(word for word in command if word.startswith("actor.path=")), Mark()
    line = [sys.executable, "-m", "megarl.launcher.local", model, f"fileroot={path}"]
    line += ["--config", str(ROOT / "configs" / "quickstart_grpo.yaml"), "saver.final=false"]
    line += ["experiment_name=e", "trial_name=t", "total_train_steps=2", "valid_dataset=null"]
    line += ["train_dataset.batch_size=4", "gconfig.n_samples=4", "gconfig.max_new_tokens=8"]
    line += more
    env = os.environ | {"OMP_NUM_THREADS": "1"} | env | mark.env
    try:
        done = subprocess.run(line, cwd=ROOT, env=env, timeout=200, capture_output=True, text=True)
        mark.assert_none_left(within=30.0)
    finally:
        mark.kill()
    assert done.returncode == 0, done.stdout + done.stderr
    run = path / "e" / "t"
    return run, [json.loads(line) for line in (run / "stats.jsonl").read_text().splitlines()]


def test_a_judge_on_a_second_server_rewards_a_run(tmp_path: Path, command: Any) -> None:
    (tmp_path / "judges.py").write_text(JUDGE)
    judge, verdicts = tmp_path / "judge", tmp_path / "verdicts"
    save_tokenizer(save_tiny(judge, "llama", layers=2, seed=3))
    run, rows = launch(
        tmp_path,
        command,
        f"judge.path={judge}",
        "judge.context_length=512",
        f"train_dataset.reward.type={tmp_path / 'judges.py'}:Letters",
        "train_dataset.reward.options={prompt: '{completion}', system: '', "
        "request: {max_tokens: 8}}",
        VERDICTS=str(verdicts),
    )
    said = [json.loads(line) for line in verdicts.read_text().splitlines()]
    unread = sum(number == 11 for _, number in said)
    assert len(said) >= 32 and len({text for text, _ in said}) > 4
    assert rows[-1].get("rollout/failed_samples/reward", 0) == unread
    assert all(0 < row["reward/mean"] < 1 and row["reward/std"] > 0 for row in rows)
    assert (run / "judge_0.log").is_file() and not (run / "server_1.log").exists()


def test_a_reward_model_rewards_grpo(tmp_path: Path, command: Any) -> None:
    """It has the policy's transformer and a random head; the reward function gives 0."""
    torch.manual_seed(0)
    policy = next(word for word in command if word.startswith("actor.path=")).partition("=")[2]
    scorer = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
    scorer.save_pretrained(tmp_path / "scorer")
    model = [f"reward_model.path={tmp_path / 'scorer'}", "reward_model.parallel.tp=2"]
    _, rows = launch(tmp_path, command, *model, "train_dataset.reward=none")
    assert len(rows) == 2 and all(r["timing/reward_model_s"] > 0 for r in rows)
    assert all(r["reward/std"] > 0 and r["update_successful"] == 1 for r in rows)
