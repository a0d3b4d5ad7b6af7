"""A recipe with LoRA, as a user starts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.test_recipes import launch, make_model, stats


@pytest.mark.full
def test_sft_with_lora_learns_and_saves_adapters(tmp_path: Path) -> None:
    make_model(tmp_path / "model", hidden=64, layers=2)
    done = launch(
        "quickstart_sft.yaml", f"model.path={tmp_path / 'model'}", f"fileroot={tmp_path}",
        "experiment_name=e", "total_train_steps=60", "evaluator.freq_steps=60",
        "model.lora.r=8", "model.lora.save=adapter", "model.optimizer.lr=1e-2",
        "train_dataset.options.level=1", "train_dataset.size=40", "train_dataset.options.demos=64",
        "train_dataset.batch_size=32", "valid_dataset.options.level=1", "valid_dataset.size=15",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    rows = stats(tmp_path / "e" / "sft")
    # what a random model with a frozen embedding and head can learn
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"], [r["loss"] for r in rows]
    final = tmp_path / "e" / "sft" / "final"
    assert sorted(f.name for f in final.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    assert json.loads((final / "adapter_config.json").read_text())["r"] == 8
