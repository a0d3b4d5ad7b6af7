"""GRPO whose rewards are the verdicts of a model on a second server, started by the launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def test_a_judge_on_a_second_server_rewards_a_run(tmp_path: Path, command: Any) -> None:
    (tmp_path / "judges.py").write_text(JUDGE)
    judge = save_tiny(tmp_path / "judge", "llama", layers=2, seed=3)
    save_tokenizer(judge)
    model = next(word for word in command if word.startswith("actor.path="))
    line = [sys.executable, "-m", "megarl.launcher.local", model, f"fileroot={tmp_path}"]
    line += ["--config", str(ROOT / "configs" / "quickstart_grpo.yaml")]
    line += ["experiment_name=e", "trial_name=t", "total_train_steps=2", "valid_dataset=null"]
    line += ["train_dataset.batch_size=4", "gconfig.n_samples=4", "gconfig.max_new_tokens=8"]
    line += [f"judge.path={judge}", "judge.context_length=512", "saver.final=false"]
    line += [f"train_dataset.reward.type={tmp_path / 'judges.py'}:Letters"]
    options = "{prompt: '{completion}', system: '', request: {max_tokens: 8}}"
    line += [f"train_dataset.reward.options={options}"]
    verdicts, mark = tmp_path / "verdicts", Mark()
    env = os.environ | {"VERDICTS": str(verdicts), "OMP_NUM_THREADS": "1"} | mark.env
    try:
        done = subprocess.run(line, cwd=ROOT, env=env, timeout=200, capture_output=True, text=True)
        mark.assert_none_left(within=30.0)
    finally:
        mark.kill()
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "e" / "t"
    rows = [json.loads(line) for line in (run / "stats.jsonl").read_text().splitlines()]
    said = [json.loads(line) for line in verdicts.read_text().splitlines()]
    unread = sum(number == 11 for _, number in said)
    assert len(said) >= 32 and len({text for text, _ in said}) > 4
    assert rows[-1].get("rollout/failed_samples/reward", 0) == unread
    assert all(0 < row["reward/mean"] < 1 and row["reward/std"] > 0 for row in rows)
    assert (run / "judge_0.log").is_file() and not (run / "server_1.log").exists()
