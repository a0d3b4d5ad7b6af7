"""Runs TRL's side of grpo_vs_trl.py: GRPOTrainer once, a JSON line for every step.

    python benchmarks/trl_grpo.py MODEL --steps 12 --out DIR

Every rank writes <DIR>/<rank>.jsonl with {"time", "tokens", "samples"}: when the step ended, and
how many tokens and samples this rank trained on in it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from grpo_task import (
    BETAS,
    CLIP,
    CLIP_NORM,
    EPS,
    GROUP,
    LEVEL,
    LR,
    MAX_NEW_TOKENS,
    PROMPTS,
    WEIGHT_DECAY,
    score,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from megarl.config.dataset import DatasetConfig
from megarl.data.dataset import build_dataset

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Steps(TrainerCallback):
    """Counts what the trainer trains on and notes when each step ends."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out = (out / f"{RANK}.jsonl").open("w")
        self.lengths: list[int] = []

    def score(self, completions: list[str], completion_ids: list[list[int]], **_: Any) -> Any:
        self.lengths += map(len, completion_ids)
        return [score(c) for c in completions]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        n, tokens = len(self.lengths), sum(self.lengths)
        row = {"time": time.time(), "tokens": tokens, "samples": n}
        self.out.write(json.dumps(row) + "\n")
        self.out.flush()
        self.lengths = []


def config(out: Path, steps: int) -> GRPOConfig:
    """Returns the cheapest of TRL's own options on a CPU."""
    return GRPOConfig(
        output_dir=str(out), use_cpu=True, bf16=False, report_to="none",
        max_steps=steps, save_strategy="no", logging_strategy="no", disable_tqdm=True,
        per_device_train_batch_size=PROMPTS * GROUP // WORLD, gradient_accumulation_steps=1,
        num_generations=GROUP, max_completion_length=MAX_NEW_TOKENS, num_iterations=1,
        temperature=1.0, top_k=0, beta=0.0, loss_type="dapo", scale_rewards="group",
        epsilon=CLIP, learning_rate=LR, adam_beta1=BETAS[0], adam_beta2=BETAS[1],
        adam_epsilon=EPS, weight_decay=WEIGHT_DECAY, max_grad_norm=CLIP_NORM,
        lr_scheduler_type="constant", optim="adamw_torch_fused", gradient_checkpointing=False,
        dataloader_num_workers=0, use_vllm=False, seed=1,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    data = DatasetConfig(type="arithmetic", size=PROMPTS * 64, options={"level": LEVEL})
    rows = build_dataset(data, tokenizer, purpose="rl", seed=1)
    prompts = [rows[i]["prompt"] for i in range(len(rows))]
    steps = Steps(args.out)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        reward_funcs=steps.score,
        args=config(args.out, args.steps),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[steps],
    )
    trainer.train()


if __name__ == "__main__":
    main()
