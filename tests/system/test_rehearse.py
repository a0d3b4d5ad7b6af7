"""Every recipe in configs/ rehearses: the command as a user gives it, with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.leftovers import Mark

ROOT = Path(__file__).resolve().parents[2]
# what stands in for a model that an earlier job of the quickstart or a download makes
MODEL = {
    "quickstart_sft": ["model.path=qwen3-1.7b"],
    "quickstart_grpo": ["actor.path=qwen3-1.7b"],
    "quickstart_ppo": ["actor.path=qwen3-1.7b"],
    "quickstart_rm": ["model.path=qwen3-1.7b"],
    "quickstart_dpo": ["model.path=qwen3-1.7b"],
    "quickstart_distill": ["actor.path=qwen3-1.7b", "teacher.path=qwen3-1.7b"],
    "script_grpo": ["actor.path=qwen3-1.7b"],
    "smollm2_grpo": ["actor.path=smollm2-135m-instruct"],
    "verifiers_grpo": ["actor.path=qwen3-1.7b"],
}
# in CI on two ranks: tensor parallelism, a pipeline
IN_CI = {
    "gsm8k_grpo": ["--ranks", "2", "server.count=1"],
    "llama3_70b_grpo": ["--ranks", "2", "allocation_mode=sglang.d1t4+megatron.d4t8p2"],
}
CONFIGS = sorted(p.stem for p in (ROOT / "configs").glob("*.yaml"))


def rehearse(*arguments: str) -> subprocess.CompletedProcess[str]:
    mark = Mark()
    done = subprocess.run(
        [sys.executable, "-m", "megarl.cli", "rehearse", *arguments],
        cwd=ROOT,
        env=os.environ | mark.env | {"COLUMNS": "200"},
        timeout=1200,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    mark.assert_none_left()
    return done


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in IN_CI else pytest.mark.full) for n in CONFIGS]
)
def test_every_recipe_rehearses(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--out", str(out), *IN_CI.get(name, []), *MODEL.get(name, [])]
    done = rehearse(f"configs/{name}.yaml", *options)
    said = done.stdout
    assert done.returncode == 0, said
    for words in ("ok    construct", "ok    train", "ok    save", "ok    resume", "passed"):
        assert words in said, said
    small = yaml.safe_load((out / "rehearsal.yaml").read_text())
    written = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    assert small["recipe"] == written.get("recipe", small["recipe"])
    log = (out / "to_step_3.log").read_text()
    assert "from step 2 of 3" in log, log


@pytest.mark.full
def test_what_fails_is_named_and_kept(tmp_path: Path) -> None:
    """A reward of the user's that raises: the rehearsal shows it before the cluster does."""
    (tmp_path / "mine.py").write_text("def reward(*a, **k):\n    raise RuntimeError('no luck')\n")
    out = tmp_path / "out"
    options = ["--ranks", "2", "--out", str(out), *MODEL["quickstart_grpo"]]
    reward = f"train_dataset.reward={tmp_path / 'mine.py'}:reward"
    done = rehearse("configs/quickstart_grpo.yaml", *options, reward)
    assert done.returncode == 1, done.stdout
    assert "FAIL  train" in done.stdout and "no luck" in done.stdout
    assert f"everything is in {out}" in done.stdout and (out / "to_step_2.log").is_file()
