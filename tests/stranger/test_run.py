"""A step of SFT, its checkpoint and a run that continues from it, on the Python of this tier."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.tiny import save_tiny
from tests.tiny_tokenizer import save_tokenizer


def test_sft_saves_and_continues(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "qwen3")
    save_tokenizer(tmp_path / "model")
    command = [
        sys.executable, "-m", "megarl.launcher.local", "recipe=sft", f"model.path={model}",
        f"fileroot={tmp_path / 'runs'}", "experiment_name=stranger", "trial_name=sft",
        "recover.freq_steps=1", "model.optimizer.lr=1e-3", "train_dataset.type=arithmetic",
        "train_dataset.size=8", "train_dataset.batch_size=4", "train_dataset.options.level=1",
    ]  # fmt: skip
    run = tmp_path / "runs" / "stranger" / "sft"
    for steps in (1, 2):
        done = subprocess.run(
            [*command, f"total_train_steps={steps}"], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        rows = [json.loads(row) for row in (run / "stats.jsonl").open()]
        assert [row["step"] for row in rows if "step" in row][-1] == steps
    assert len(list(run.glob("final/*.safetensors"))) == 1
    assert [row["step"] for row in rows] == [1, 2]  # the first step was not repeated
