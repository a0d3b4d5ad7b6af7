"""What a user writes: the scripts examples/gsm8k_grpo_*.py, and the cells of docs/extending.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from examples.tiny_model import make_model
from megarl import ConfigError, GRPOConfig, RLTrainer, load_config
from tests.dist.world import free_port
from tests.embedded_server import embedded_server

pytestmark = pytest.mark.system  # servers, launchers and time-outs that are waited for
ROOT = Path(__file__).resolve().parents[2]
SCRIPT, CONFIG = ROOT / "examples" / "gsm8k_grpo_spmd.py", ROOT / "configs" / "script_grpo.yaml"
CONTROLLED = ROOT / "examples" / "gsm8k_grpo_controller.py"
STEPS = 2
EVALUATION = (
    *("valid_dataset.type=arithmetic", "valid_dataset.split=test", "valid_dataset.size=5"),
    *("evaluator.freq_steps=1", "eval_gconfig.max_new_tokens=6", "recover.mode=auto"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scripts") / "model"
    make_model(path, hidden=64, layers=2)
    return path


def run(command: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, timeout=300, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def keys(model: Path, root: Path) -> list[str]:
    return [
        "--config", str(CONFIG), f"actor.path={model}", f"fileroot={root}",
        f"total_train_steps={STEPS}", "train_dataset.size=40", "train_dataset.batch_size=6",
        "gconfig.n_samples=2",
    ]  # fmt: skip


def check_run(root: Path) -> None:
    rows = [json.loads(line) for line in (root / "script/grpo/stats.jsonl").open()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert row["n_updates"] == 2 and row["epoch"] == 0 and row["reward"] >= 0
        assert row["train_rollout_logprob_abs_diff/max"] < 1e-4
        assert row["timing/update_weights_s"] > 0 and row["timing/train_step_s"] > 0
    assert rows[0]["first_ratio_abs_dev"] < 1e-5
    AutoModelForCausalLM.from_pretrained(root / "script/grpo/final")


def check_evaluations(root: Path) -> None:
    """After each step 5 held-out rows were answered, by the weights after it."""
    rows = [json.loads(line) for line in (root / "script/grpo/stats.jsonl").open()]
    assert [row["eval/samples"] for row in rows] == [5.0] * STEPS
    assert all(0 <= row["eval/accuracy"] <= 1 and row["timing/eval_s"] > 0 for row in rows)
    kept = (root / "script/grpo/eval_rewards.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in kept] == list(range(1, STEPS + 1))


def test_the_script_by_the_launcher(model: Path, tmp_path: Path) -> None:
    """Two data-parallel ranks, weights streamed to a server of the launcher's."""
    command = ["-m", "megarl.launcher.local", str(SCRIPT), "--nproc", "2"]
    run([*command, *keys(model, tmp_path), *EVALUATION])
    check_run(tmp_path)
    check_evaluations(tmp_path)


def test_the_script_of_a_controller(model: Path, tmp_path: Path) -> None:
    command = ["-m", "megarl.launcher.local", str(CONTROLLED), "trainer.mode=controller"]
    run([*command, *keys(model, tmp_path), *EVALUATION])
    check_run(tmp_path)
    check_evaluations(tmp_path)


@pytest.mark.system
def test_the_script_by_torchrun(model: Path, tmp_path: Path) -> None:
    """Beside a server that runs already, weights through files."""
    flags = ("--context-length", "64", "--dtype", "float32")
    with embedded_server(model, *flags, log=tmp_path / "server.log") as server:
        run(
            ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
            + ["--master-port", str(free_port()), str(SCRIPT), *keys(model, tmp_path)]
            + [f"rollout.addresses=[127.0.0.1:{server.port}]", "weight_sync.type=disk"]
        )
        assert server.get("/model_info")[1]["weight_version"] == str(STEPS)
    check_run(tmp_path)


ONE_CALL = r"^```python\n(import sys\n.*?for_run\(config\)\.train\(\)\n)```$"


@pytest.fixture
def one_call(tmp_path: Path) -> str:
    """The script of docs/extending.md that starts a trainer of its own in one call."""
    page = (ROOT / "docs" / "extending.md").read_text()
    (script,) = re.findall(ONE_CALL, page.split("## A tracker")[0], re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    return str(tmp_path / "train.py")


def check_recipe_run(root: Path) -> None:
    """Both steps were the script's, on the whole batch, and all that a recipe writes is there."""
    run_dir = root / "script/grpo"
    rows = [json.loads(line) for line in (run_dir / "stats.jsonl").open()]
    assert [(row["step"], row["mine"], row["n_updates"]) for row in rows] == [(1, 1, 2), (2, 1, 2)]
    assert [row["rollout/trained_samples"] for row in rows] == [12.0, 24.0]
    AutoModelForCausalLM.from_pretrained(run_dir / "final")
    assert (run_dir / "recover/step_000002/trainer.json").is_file()


def test_a_trainer_in_one_call_by_torchrun(model: Path, tmp_path: Path, one_call: str) -> None:
    flags = ("--context-length", "64", "--dtype", "float32")
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr"]
    with embedded_server(model, *flags, log=tmp_path / "server.log") as server:
        out = run(
            [*torchrun, "127.0.0.1", "--master-port", str(free_port()), one_call]
            + [*keys(model, tmp_path), f"rollout.addresses=[127.0.0.1:{server.port}]"]
            + ["weight_sync.type=disk", "recover.freq_steps=2", "trainer=elsewhere:Unread"]
        )
        assert server.get("/model_info")[1]["weight_version"] == str(STEPS)
    check_recipe_run(tmp_path)
    (unread,) = (line for line in out.splitlines() if "no effect in this script" in line)
    assert "script: trainer.type. " in unread  # the script has chosen; it reads all other keys


def test_a_trainer_in_one_call_under_a_controller(
    model: Path, tmp_path: Path, one_call: str
) -> None:
    command = ["-m", "megarl.launcher.local", one_call, "trainer.mode=controller", "--nproc", "2"]
    run([*command, *keys(model, tmp_path), "recover.freq_steps=2"])
    check_recipe_run(tmp_path)


def test_a_trainer_in_one_call_refuses_what_the_recipe_refuses(model: Path) -> None:
    config = load_config(["--config", str(CONFIG), f"actor.path={model}"], cls=GRPOConfig)
    config.actor.parallel.tp = 3
    with pytest.raises(ConfigError, match=r"actor\.parallel: .*\b3\b"):
        RLTrainer.for_run(config)


def test_the_cells_of_the_notebook(model: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "extending.md").read_text().split("## From a notebook")[1]
    engine, server = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    cells = tmp_path / "cells.py"
    indented = "".join(f"    {line}\n" for line in server.splitlines())
    cells.write_text(
        f"import asyncio\npath = {str(model)!r}\n{engine}"
        "assert logprobs.shape == batch['input_ids'].shape\n"
        "real = batch['attention_mask'].bool()\n"
        "assert (logprobs[:, 1:][real[:, 1:]] < 0).all() and (logprobs[~real] == 0).all()\n"
        f"async def cell():\n{indented}"
        "    assert response.completion == tokenizer.decode(\n"
        "        response.output_tokens, skip_special_tokens=True)\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(cell())\n"
        "    print(len(batch['input_ids']), 'rows')\n"
    )
    assert run([str(cells)]).rstrip().endswith("2 rows")


def test_the_configuration_with_its_own_data_and_reward(model: Path, tmp_path: Path) -> None:
    """docs/your_own.md: the files are found beside the configuration."""
    sizes = ["server.context_length=128", "gconfig.max_new_tokens=8", f"fileroot={tmp_path}"]
    config = ["--config", "examples/capitals/grpo.yaml", f"actor.path={model}", *sizes]
    run(["-m", "megarl.launcher.local", *config])
    rows = [json.loads(line) for line in (tmp_path / "capitals/first/stats.jsonl").open()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]  # 0: the evaluation before the first
    assert all(row["reward/mean"] >= 0 and row["rollout/failed"] == 0 for row in rows[1:])
    answers = [json.loads(x) for x in (tmp_path / "capitals/first/samples.jsonl").open()]
    assert {"Athens", "Lisbon", "Tehran", "Vienna"} == {row["answer"] for row in answers}
