"""Measures how much of a model a GRPO step in bf16 changes, and how much a sync then sends.

    python benchmarks/delta.py [--model DIR] [--lr 1e-6 1e-5] [--steps 6] [a.b=c ...]

Runs configs/smollm2_grpo.yaml for every learning rate, in bf16 with fp32 main weights, with
weight_sync.delta=true and every sync verified by checksums. --model is a Hugging Face directory
(SmolLM2-135M-Instruct, fetched once, by default); the rest is overrides of the configuration.

Prints a Markdown table, a row for each step. The sync before the first step sends everything.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
RUN_TIMEOUT = 7200
COLUMNS = ("lr", "step", "changed", "MB sent", "of all", "encode s", "sync s")


def run(model: Path, root: Path, lr: float, steps: int, overrides: list[str]) -> list[Any]:
    """Returns the metrics of every step; shows the log of a failed run."""
    command = [
        sys.executable, "-m", "megarl.launcher.local", "--nproc", "1",
        "--config", str(ROOT / "configs" / "smollm2_grpo.yaml"), f"actor.path={model}",
        f"fileroot={root}", f"trial_name=lr{lr:g}", f"total_train_steps={steps}",
        f"actor.optimizer.lr={lr:g}", "actor.dtype=bfloat16", "server.dtype=bfloat16",
        "weight_sync.delta=true", "weight_sync.verify=full", "valid_dataset=null",
        "saver.final=false", "recover.mode=disabled", "stats_logger.report=false", *overrides,
    ]  # fmt: skip
    env = os.environ | {"MEGARL_DEVICE": "cpu", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    log = root / "log"
    with log.open("w") as out:
        status = subprocess.run(
            command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, timeout=RUN_TIMEOUT
        ).returncode
    if status:
        sys.exit(log.read_text())
    lines = (root / "smollm2" / f"lr{lr:g}" / "stats.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "weight_sync/bytes" in row]


def report(lr: float, rows: list[dict[str, float]]) -> None:
    for step, row in enumerate(rows, 1):
        assert row["weight_sync/verified"] == 1
        sent, whole = row["weight_sync/bytes"], row["weight_sync/bytes_whole"]
        cells = (
            f"{lr:g}", f"{step}", f"{row['weight_sync/changed']:.2%}", f"{sent / 1e6:.1f}",
            f"{sent / whole:.1%}", f"{row['weight_sync/encode_s']:.2f}",
            f"{row['weight_sync/total_s']:.2f}",
        )  # fmt: skip
        print("| " + " | ".join(cells) + " |", flush=True)


def default_model() -> Path:
    from fetch_smollm2 import fetch
    from smollm2 import CACHE

    return fetch(CACHE / "SmolLM2-135M-Instruct")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("overrides", nargs="*", help="a.b=c, for configs/smollm2_grpo.yaml")
    args = parser.parse_intermixed_args()
    model = args.model or default_model()
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS))
    with tempfile.TemporaryDirectory() as folder:
        for lr in args.lr:
            report(lr, run(model, Path(folder), lr, args.steps, args.overrides))


if __name__ == "__main__":
    main()
