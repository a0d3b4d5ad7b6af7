"""A dataset and how batches are drawn from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.config.base import arg
from megarl.config.bounds import POSITIVE


@dataclass(kw_only=True)
class DatasetConfig:
    type: str = arg(
        "arithmetic",
        help="loader",
        choices=("arithmetic", "gsm8k", "reasoning_gym"),
    )
    path: str = arg("", help="hub name, or local directory / parquet / jsonl file (gsm8k)")
    split: str = arg("train", help="which split: train or test", choices=("train", "test"))
    batch_size: int = arg(
        8, bounds=POSITIVE, help="prompts (RL) or sequences (SFT) per training step, all ranks"
    )
    size: int | None = arg(
        None, bounds=POSITIVE, help="take this many rows; null is all (generated sets: 1000)"
    )
    max_length: int | None = arg(
        None,
        bounds=POSITIVE,
        help="drop prompts (RL) or sequences (SFT) longer than this many tokens",
    )
    shuffle: bool = arg(True, help="reshuffle every epoch by the run's seed")
    drop_last: bool = arg(True, help="drop the last incomplete batch of an epoch")
    reward: str = arg(
        "", help="reward function (RL): pkg.module:function; empty is the dataset type's own"
    )
    options: dict[str, Any] = arg(
        factory=dict, help="loader's own options (arithmetic: level; reasoning_gym: task, ...)"
    )
