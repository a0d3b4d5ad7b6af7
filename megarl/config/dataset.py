"""Configures a data set and how batches are drawn from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.config.base import SeamConfig, arg, seam
from megarl.config.bounds import NOT_NEGATIVE, POSITIVE

GENERATED = ("arithmetic", "reasoning_gym")  # types that make their rows and read no file
WITH_REWARD = ("arithmetic", "gsm8k", "reasoning_gym")  # types that have a reward of their own


@dataclass(kw_only=True)
class DatasetConfig:
    """Configures one data set: where rows come from, how they are batched, and their reward."""

    type: str = arg(
        "arithmetic",
        help="where rows come from; chat: conversations in jsonl or parquet files; a path names a "
        "function of this section that returns rows",
        choices=("arithmetic", "gsm8k", "reasoning_gym", "chat"),
        or_path=True,
    )
    path: str = arg("", help="hub name, or local directory / parquet / jsonl file (gsm8k, chat)")
    split: str = arg("train", help="which split: train, test, or another that the files have")
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
    num_workers: int = arg(
        0, bounds=NOT_NEGATIVE, help="processes that collate batches; 0 is the trainer itself"
    )
    reward: SeamConfig = seam(
        help="reward function (RL); empty is the dataset type's own; none: 0 for every answer"
    )
    collate: SeamConfig = seam(
        help="makes a batch of rows; empty: a list of rows (RL), padded tensors (SFT)"
    )
    sampler: SeamConfig = seam(
        help="made with (dataset, seed=...), gives the order of rows; empty is `shuffle`"
    )
    options: dict[str, Any] = arg(
        factory=dict,
        help="the type's own options (arithmetic: level; chat: columns; ...), and for every type "
        "system, chat_template_kwargs and train_on",
    )
