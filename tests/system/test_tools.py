"""GRPO with tools: servers, trainer and tools are real, some tools are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from tiny_model import make_model  # noqa: E402

ANSWER, SAMPLES, PROMPTS, STEPS = 5, 4, 4, 2


def test_grpo_with_tools_of_which_some_are_killed(tmp_path: Path) -> None:
    make_model(tmp_path / "model", hidden=64, layers=1)
    log = tmp_path / "tools.log"
    tools = [{"type": "tests.system.tool_run:Counter", "options": {"every": 6, "log": str(log)}}]
    options = {"tools": tools, "max_length": 64}
    workflow = {"type": "tests.system.tool_run:EagerToolWorkflow", "options": options}
    parts = {"digit": {"type": "regex", "options": {"pattern": "[0-9]"}, "weight": 0.5}}
    parts["early"] = {"type": "regex", "options": {"pattern": "[a-m]"}, "weight": 0.25}
    reward = {"type": "weighted", "options": {"parts": parts}}
    command = [sys.executable, "-m", "megarl.launcher.local", "--nproc", "1"]
    command += ["--config", str(ROOT / "configs" / "quickstart_grpo.yaml")]
    done = subprocess.run(
        [
            *command, f"actor.path={tmp_path / 'model'}", f"fileroot={tmp_path}",
            "experiment_name=e", f"total_train_steps={STEPS}", "actor.parallel.tp=1",
            f"train_dataset.batch_size={PROMPTS}", "train_dataset.size=40", "valid_dataset=null",
            f"train_dataset.reward={json.dumps(reward)}",
            f"gconfig.n_samples={SAMPLES}", f"gconfig.max_new_tokens={ANSWER}",
            "gconfig.ignore_eos=true", "saver.final=false",
            f"rollout.workflow={json.dumps(workflow)}",
        ],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    stats = (tmp_path / "e" / "grpo" / "stats.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, stats) if row["step"] > 0]
    assert len(rows) == STEPS
    for row in rows:  # both answers are trained, and nothing that was told
        assert row["response_len/mean"] == row["response_len/max"] == 2 * ANSWER
        assert row["tokens/total"] > (2 * ANSWER + 7) * row["tokens/sequences"]
        assert row["train_rollout_logprob_abs_diff/max"] < 1e-4
        assert row["first_ratio_abs_dev"] < 1e-5
        parts_mean = 0.5 * row["reward/digit"] + 0.25 * row["reward/early"]
        assert abs(row["reward/mean"] - parts_mean) < 1e-6
    assert "the counter is gone" in done.stdout
    assert rows[-1]["rollout/failed_samples/tool"] > 0
    begun, ended = [], []
    for line in log.read_text().splitlines():
        word, pid, _ = line.split()
        (begun if word == "begun" else ended).append(pid)
    assert sorted(begun) == sorted(ended)  # closed once each, the killed ones too
