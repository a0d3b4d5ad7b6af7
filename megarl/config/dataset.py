"""Configures data sets: where rows come from, and how batches are drawn from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from megarl.config.base import NOT_NEGATIVE, POSITIVE, Choices, Options, OptionsOf, SeamConfig, free

GENERATED = ("arithmetic", "reasoning_gym")  # types that make their rows and read no file
WITH_REWARD = ("arithmetic", "gsm8k", "reasoning_gym")  # types that have a reward of their own
TYPES = ("arithmetic", "gsm8k", "reasoning_gym", "chat", "preference")
MIX = "mix"


@dataclass(kw_only=True)
class SourceConfig:
    """Configures where rows come from, and their reward."""

    type: Annotated[str, Choices(*TYPES, MIX, or_path=True)] = "arithmetic"
    """where rows come from; chat: conversations in jsonl or parquet files; preference: pairs of
    a chosen and a rejected answer; a path names a function of this section that returns rows;
    mix: several, see parts"""
    path: str = ""
    """hub name (hub://name where a directory has it, too), or local directory / parquet / jsonl
    file (gsm8k, chat, preference)"""
    files: list[str] = field(default_factory=list)
    """several local files, read one after another, in place of path"""
    split: str = "train"
    """which split: train (held-out data, too), test, or another that the files have"""
    size: Annotated[int, POSITIVE] | None = None
    """take this many rows; null is all (generated sets: 1000)"""
    max_length: Annotated[int, POSITIVE] | None = None
    """drop prompts (RL) or sequences (SFT, pairs) longer than this many tokens"""
    reward: SeamConfig = field(default_factory=SeamConfig)
    """reward function (RL); empty is the dataset type's own; none: 0 for every answer"""
    options: Options = free()
    """the type's own options (arithmetic: level; chat: columns; ...), and for every type system,
    chat_template_kwargs and train_on"""


@dataclass(kw_only=True)
class PartConfig(SourceConfig):
    """Configures one of the data sets of a mixture."""

    weight: Annotated[float, POSITIVE] = 1.0
    """its share of the rows drawn is weight / the sum of weights"""
    workflow: SeamConfig = field(default_factory=SeamConfig)
    """workflow of its rows (RL); empty is rollout.workflow"""


@dataclass(kw_only=True)
class DatasetConfig(SourceConfig):
    """Configures one data set: where rows come from, how they are batched, and their reward."""

    parts: dict[str, PartConfig] = free()
    """type=mix: data sets by name, each with a weight; rows keep the name"""
    batch_size: Annotated[int, POSITIVE] = 8
    """prompts (RL), sequences (SFT) or pairs per training step, all ranks"""
    shuffle: bool = True
    """reshuffle every training epoch by the run's seed"""
    drop_last: bool = True
    """drop the last incomplete batch of a training epoch; held-out rows are all taken"""
    num_workers: Annotated[int, NOT_NEGATIVE] = 0
    """processes that collate batches; 0 is the trainer itself"""
    collate: SeamConfig = field(default_factory=SeamConfig)
    """makes a batch of rows; empty: a list of rows (RL), padded tensors (SFT)"""
    sampler: SeamConfig = field(default_factory=SeamConfig)
    """made with (dataset, seed=...), gives the order of rows; empty is `shuffle`"""
    curriculum: Annotated[Options | None, OptionsOf("megarl.data.draws:Curriculum")] = None
    """RL: prefer rows of a middling pass rate of their latest answers: low, high, explore (share of
    rows drawn in turn), passes_at (a reward that passes); {} is from 0.1 to 0.9, null draws all
    alike"""
