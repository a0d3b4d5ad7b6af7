"""GRPO with tools: servers, trainer and tools are real, some tools are killed."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algos.estimators import gdpo_advantages
from megarl.cli.view import main as view
from megarl.observability.episodes import unpack
from tests.unit.test_episodes import rows_of
from tests.unit.test_viewer import Scripts, data_of

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from tiny_model import make_model  # noqa: E402

ANSWER, SAMPLES, PROMPTS, STEPS = 5, 4, 4, 2


def test_grpo_with_tools_of_which_some_are_killed(tmp_path: Path) -> None:
    make_model(tmp_path / "model", hidden=64, layers=1)
    template = tmp_path / "model" / "chat_template.jinja"  # of which a template must show something
    template.write_text("{% if tools %}0{% endif %}" + template.read_text())
    log = tmp_path / "tools.log"
    tools = [{"type": "tests.system.tool_run:Counter", "options": {"every": 6, "log": str(log)}}]
    options = {"tools": tools, "max_length": 64}
    workflow = {"type": "tests.system.tool_run:EagerToolWorkflow", "options": options}
    parts = {"digit": {"type": "format", "options": {"pattern": ".*[0-9].*"}, "weight": 0.5}}
    parts["early"] = {"type": "format", "options": {"pattern": ".*[a-m].*"}, "weight": 0.25}
    reward = {"type": "weighted", "options": {"parts": parts}}
    command = [sys.executable, "-m", "megarl.launcher.local", "--nproc", "1"]
    command += ["--config", str(ROOT / "configs" / "quickstart_grpo.yaml")]
    done = subprocess.run(
        [
            *command, f"actor.path={tmp_path / 'model'}", f"fileroot={tmp_path}",
            "experiment_name=e", f"total_train_steps={STEPS}", "actor.parallel.tp=1",
            f"train_dataset.batch_size={PROMPTS}", "train_dataset.size=40", "valid_dataset=null",
            f"train_dataset.reward={json.dumps(reward)}", "algorithm=gdpo",
            f"gconfig.n_samples={SAMPLES}", f"gconfig.max_new_tokens={ANSWER}",
            "gconfig.ignore_eos=true", "saver.final=false",
            f"rollout.workflow={json.dumps(workflow)}", "episodes.entropy=true",
            "trainer=tests.system.tool_run:KeepingTrainer",
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
    check_viewer(tmp_path / "e" / "grpo", rows)


def check_viewer(run: Path, stats: list[dict[str, Any]]) -> None:
    """The page of `megarl view` has what was trained, to the bit, and what failed."""
    assert view([str(run)]) == 0
    page = Scripts((run / "episodes.html").read_text(encoding="utf-8"))
    about = data_of(page)
    assert [step["step"] for step in about["steps"]] == [1, 2]
    failed = 0
    for step, row in zip((1, 2), stats, strict=True):
        batch = torch.load(run / f"batch_{step}.pt")
        parts = torch.stack([batch["reward_part/digit"], batch["reward_part/early"]])
        gdpo = gdpo_advantages(parts, [0.5, 0.25], batch["group_ids"], batch=True)
        assert torch.equal(batch["advantages"], gdpo[:, None] * batch["loss_mask"]) and gdpo.any()
        at = 0
        entropies = []
        for group in [g for g in about["groups"] if g["step"] == step]:
            record = unpack(base64.b64decode(page.scripts[f"group-{group['name']}"]))
            failed += sum("failure" in about_row for about_row, _ in rows_of(record))
            good = [found for found in rows_of(record) if "failure" not in found[0]]
            for about_row, tokens in good:
                n = int(batch["lengths"][at])
                for name, field in (
                    ("ids", "input_ids"), ("mask", "loss_mask"),
                    ("logprobs", "logprobs"), ("versions", "versions"),
                ):  # fmt: skip
                    assert tokens[name].tolist() == batch[field][at, :n].tolist(), (name, at)
                for field in ("prox_logp", "advantages", "entropy"):
                    assert tokens[field].tolist() == batch[field][at, :n].tolist(), field
                entropies += tokens["entropy"][tokens["mask"] > 0].tolist()
                of_row = {
                    name: batch[f"reward_part/{name}"][at].item() for name in ("digit", "early")
                }
                assert about_row["parts"] == of_row
                assert about_row["trained"]
                assert about_row["reward"] == batch["rewards"][at].item()
                at += 1
        assert at == len(batch["rewards"])  # those that failed twice are not among them
        assert sum(entropies) / len(entropies) == pytest.approx(row["entropy"], rel=1e-4)
    assert failed == stats[-1]["rollout/failed_samples/tool"]
