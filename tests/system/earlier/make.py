"""Makes run_58ee8bc.tar.xz by the code of 58ee8bc; see README.md."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

STEPS, SAVED = 4, 2  # of the runs; of the checkpoint that they are killed after, in the last step
# as users of that time wrote it; paths are relative to the folder that the launcher is started in
COMMAND = [
    "recipe=grpo", "actor.path=../model", "fileroot=runs", "experiment_name=e", "trial_name=t",
    f"total_train_steps={STEPS}", "total_train_epochs=9", f"recover.freq_steps={SAVED}",
    "recover.async_save=false", "stats_logger.table=false", "collective_timeout=120",
    "actor.parallel.tp=2", "actor.ppo_n_minibatches=2", "actor.optimizer.lr=1e-2",
    "actor.optimizer.lr_scheduler_type=linear", "actor.optimizer.warmup_steps_proportion=0.4",
    "gconfig.n_samples=4", "gconfig.max_new_tokens=8", "gconfig.seed=7",
    "eval_gconfig.max_new_tokens=4", "server.deterministic=true", "server.context_length=64",
    "server.threads=1", "train_dataset.batch_size=4", "train_dataset.type=mix",
    "train_dataset.parts.one.reward=tests.system.recover_run:even",
    "train_dataset.parts.one.size=5", "train_dataset.parts.one.options.level=1",
    "train_dataset.parts.two.reward=tests.system.recover_run:even",
    "train_dataset.parts.two.size=7", "train_dataset.parts.two.options.level=1",
    "train_dataset.parts.two.weight=2", "evaluator.freq_steps=2", "valid_dataset.size=4",
    "valid_dataset.options.level=1", "valid_dataset.split=test",
]  # fmt: skip
# synchronous: with states of a reference that follows, of the KL's weight and of a curriculum
RUNS = {
    "sync": [
        "ref.ema=0.9", "actor.kl_coef=0.1", "actor.kl_controller.target=0.01",
        "actor.kl_controller.horizon=64", "train_dataset.curriculum.passes_at=0.5",
        "train_dataset.curriculum.explore=0.5",
    ],
    "async": ["ref=null", "rollout.max_head_offpolicyness=2", "gconfig.max_new_tokens=40"],
}  # fmt: skip
# of a run: what a start goes on from, and what it looks at
KEPT = (
    "config.yaml", "stats.jsonl", "samples.jsonl", "eval_rewards.jsonl", "episodes", "record",
    f"recover/step_{SAVED:06d}",
)  # fmt: skip


def start(folder: Path, run: str, **more: str) -> int:
    root = Path.cwd()
    env = os.environ | {"OMP_NUM_THREADS": "1", "MEGARL_DEVICE": "cpu", "PYTHONPATH": str(root)}
    folder.mkdir()
    return subprocess.run(
        [sys.executable, "-m", "megarl.launcher.local", str(root / "tests/system/recover_run.py"),
         "--nproc", "2", *COMMAND, *RUNS[run]], cwd=folder, env=env | more,
    ).returncode  # fmt: skip


def main(work: Path, archive: Path) -> None:
    from tests.tiny import save_tiny
    from tests.tiny_tokenizer import save_tokenizer

    save_tiny(
        work / "model", "qwen3", layers=1, tie=True, hidden_size=8, intermediate_size=16,
        num_attention_heads=2, head_dim=4,
    )  # fmt: skip
    save_tokenizer(work / "model")
    assert start(work / "whole", "sync") == 0
    for run in RUNS:
        killed = work / f"{run}_killed"
        kill = {"KILL": f"update:{STEPS}", "KILLED": str(killed), "KILL_ALL": "1"}
        assert start(work / run, run, **kill) != 0 and killed.exists()
    whole = work / "whole" / "runs" / "e" / "t"
    with tarfile.open(archive, "w:xz") as tar:
        tar.add(work / "model", "model")
        tar.add(whole / "stats.jsonl", "whole/e/t/stats.jsonl")
        final = "final/model.safetensors"
        tar.add(whole / final, f"whole/e/t/{final}")
        for run in RUNS:
            for name in KEPT:
                tar.add(work / run / "runs" / "e" / "t" / name, f"{run}/runs/e/t/{name}")


if __name__ == "__main__":
    main(*(Path(argument).resolve() for argument in sys.argv[1:]))
