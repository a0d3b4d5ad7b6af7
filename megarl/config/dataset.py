"""Configures data sets: where rows come from, and how batches are drawn from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.config.base import SeamConfig, arg, seam
from megarl.config.bounds import FRACTION, FRACTION_ABOVE_ZERO, NOT_NEGATIVE, POSITIVE

GENERATED = ("arithmetic", "reasoning_gym")  # types that make their rows and read no file
WITH_REWARD = ("arithmetic", "gsm8k", "reasoning_gym")  # types that have a reward of their own
TYPES = ("arithmetic", "gsm8k", "reasoning_gym", "chat", "preference")
MIX = "mix"
_TYPE = (
    "where rows come from; chat: conversations in jsonl or parquet files; preference: pairs of a "
    "chosen and a rejected answer; a path names a function of this section that returns rows"
)


@dataclass(kw_only=True)
class TokenizerConfig:
    """Configures the run's tokenizer, besides tokenizer_path."""

    chat_template: str = arg(
        "",
        help="Jinja file of the chat template, in place of the tokenizer's own; it is saved with "
        "the model; a base model's tokenizer often has none",
    )


@dataclass(kw_only=True)
class SourceConfig:
    """Configures where rows come from, and their reward."""

    type: str = arg("arithmetic", help=_TYPE, choices=TYPES, or_path=True)
    path: str = arg(
        "",
        help="hub name (hub://name where a directory has it, too), or local directory / parquet / "
        "jsonl file (gsm8k, chat, preference)",
    )
    files: list[str] = arg(
        factory=list, help="several local files, read one after another, in place of path"
    )
    split: str = arg(
        "train",
        help="which split: train (held-out data, too), test, or another that the files have",
    )
    size: int | None = arg(
        None, bounds=POSITIVE, help="take this many rows; null is all (generated sets: 1000)"
    )
    max_length: int | None = arg(
        None,
        bounds=POSITIVE,
        help="drop prompts (RL) or sequences (SFT, pairs) longer than this many tokens",
    )
    reward: SeamConfig = seam(
        help="reward function (RL); empty is the dataset type's own; none: 0 for every answer"
    )
    options: dict[str, Any] = arg(
        factory=dict,
        help="the type's own options (arithmetic: level; chat: columns; ...), and for every type "
        "system, chat_template_kwargs and train_on",
    )


@dataclass(kw_only=True)
class PartConfig(SourceConfig):
    """Configures one of the data sets of a mixture."""

    weight: float = arg(
        1.0, bounds=POSITIVE, help="its share of the rows drawn is weight / the sum of weights"
    )
    workflow: SeamConfig = seam(help="workflow of its rows (RL); empty is rollout.workflow")


@dataclass(kw_only=True)
class CurriculumConfig:
    """Configures which rows are drawn, by the pass rates of the latest answers to them."""

    low: float = arg(0.1, bounds=FRACTION, help="prefer rows with at least this pass rate ...")
    high: float = arg(0.9, bounds=FRACTION, help="... and at most this one")
    explore: float = arg(
        0.25,
        bounds=FRACTION_ABOVE_ZERO,
        help="share of rows drawn in turn whatever their pass rate, so that none is given up; and "
        "all that are drawn while no row is known to be in the band",
    )
    newest: float = arg(
        0.5,
        bounds=FRACTION_ABOVE_ZERO,
        help="weight of the newest answers in a row's pass rate; 1 is these alone",
    )
    passes_at: float = arg(1.0, help="an answer passes with a reward of at least this")


@dataclass(kw_only=True)
class DatasetConfig(SourceConfig):
    """Configures one data set: where rows come from, how they are batched, and their reward."""

    type: str = arg(
        "arithmetic",
        help=f"{_TYPE}; mix: several, see parts",
        choices=(*TYPES, MIX),
        or_path=True,
    )
    parts: dict[str, PartConfig] = arg(
        factory=dict, help="type=mix: data sets by name, each with a weight; rows keep the name"
    )
    batch_size: int = arg(
        8,
        bounds=POSITIVE,
        help="prompts (RL), sequences (SFT) or pairs per training step, all ranks",
    )
    shuffle: bool = arg(True, help="reshuffle every training epoch by the run's seed")
    drop_last: bool = arg(
        True, help="drop the last incomplete batch of a training epoch; held-out rows are all taken"
    )
    num_workers: int = arg(
        0, bounds=NOT_NEGATIVE, help="processes that collate batches; 0 is the trainer itself"
    )
    collate: SeamConfig = seam(
        help="makes a batch of rows; empty: a list of rows (RL), padded tensors (SFT)"
    )
    sampler: SeamConfig = seam(
        help="made with (dataset, seed=...), gives the order of rows; empty is `shuffle`"
    )
    curriculum: CurriculumConfig | None = arg(
        None, help="RL: prefer rows of a middling pass rate; null draws all alike"
    )
