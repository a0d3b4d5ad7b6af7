"""GRPO as a user starts it, the launcher starting a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.sglang import servers
from tests.sglang.servers import ROOT

sys.path.insert(0, str(ROOT / "examples"))

from tiny_model import make_model

STEPS = 3


@pytest.mark.parametrize(
    ("transport", "kv", "turns"),
    (("distributed", "flush", "true"), ("colocated", "keep", "auto")),
)
def test_grpo(tmp_path: Path, transport: str, kv: str, turns: str) -> None:
    """Two trainers with sharded weights, one server. The server computes the same logprobs as the
    trainers at every step, which it can only with the weights of that step, and with KV of them.
    turns: both sides use the devices in turn; on a CPU, SGLang keeps its memory all the same.
    """
    make_model(tmp_path / "model", hidden=64, layers=2)
    command = [
        sys.executable, "-m", "megarl.launcher.local", "--nproc", "2",
        "--config", str(ROOT / "configs/quickstart_grpo.yaml"),
        f"actor.path={tmp_path / 'model'}", f"fileroot={tmp_path}", "experiment_name=e",
        f"total_train_steps={STEPS}", "train_dataset.batch_size=8", "train_dataset.size=40",
        "train_dataset.options.level=1", "valid_dataset=null", "actor.optimizer.lr=1e-2",
        "actor.ppo_n_minibatches=1", "train_dataset.reward=tests.sglang.rewards:many_digits",
        "server.type=sglang", f"server.python={servers.config().python}",
        *(f"server.options.{name}={value}" for name, value in servers.OPTIONS.items()),
        "server.max_running_requests=64",
        f"weight_sync.type={transport}", f"rollout.kv_after_sync={kv}",
        f"server.release_memory={turns}",
        f"rollout.setup_timeout={servers.START_TIMEOUT}",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | servers.ENV | {"MEGARL_DEVICE": "cpu"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=550,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    run = tmp_path / "e" / "grpo"
    rows = [json.loads(line) for line in (run / "stats.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "weight_sync/bytes" in row]
    assert len(rows) == STEPS
    assert all(row["train_rollout_logprob_abs_diff/max"] < 1e-4 for row in rows)
    assert done.stdout.count("keep(s) its memory while") == (turns == "true")
    # the sync before the first step, whose metrics no step has, compares by HF name
    assert "tensors agree with all ranks of server" in done.stdout
    assert "not verified" not in done.stdout and "not proved" not in done.stdout
    first, last = tmp_path / "model", run / "final"
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        a, b = (
            torch.log_softmax(AutoModelForCausalLM.from_pretrained(m, dtype=torch.float32)(ids)
                              .logits, -1)
            for m in (first, last)
        )  # fmt: skip
    assert (a - b).abs().max() > 1e-2  # old weights would have shown
