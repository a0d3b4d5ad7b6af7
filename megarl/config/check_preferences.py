"""Checks the recipes that learn from preferences."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.preferences import preference_problems
from megarl.config.recipes import DPOConfig, RMConfig, datasets, sources

_WITHOUT_PAIRS = ("chat", "gsm8k", "reasoning_gym")


def dpo_problems(cfg: DPOConfig) -> Iterator[str]:
    """Yields the problems of the loss, the reference and the data of recipe dpo."""
    yield from preference_problems("preference", cfg.preference)
    if cfg.ref.path and not cfg.preference.needs_reference:
        yield (
            f"ref.path={cfg.ref.path}: preference.loss={cfg.preference.loss} measures against no "
            "reference; leave it out"
        )
    if not cfg.preference.paired:
        yield from _single_row_problems(cfg)
    yield from _data_problems(cfg)


def rm_problems(cfg: RMConfig) -> Iterator[str]:
    """Yields the problems of the data of recipe rm."""
    yield from _data_problems(cfg)


def _single_row_problems(cfg: DPOConfig) -> Iterator[str]:
    """Yields a line for each data set whose batches have no second answer to compare with."""
    for key, data in datasets(cfg).items():
        small = data.size == 1 if key != "train_dataset" else data.batch_size == 1
        if small:
            name = "batch_size" if key == "train_dataset" else "size"
            yield (
                f"{key}.{name}=1: preference.loss={cfg.preference.loss} needs answers to other "
                "prompts beside each; take 2 or more"
            )


def _data_problems(cfg: DPOConfig | RMConfig) -> Iterator[str]:
    for key, source in sources(cfg).items():
        if source.type in _WITHOUT_PAIRS:
            yield (
                f"{key}.type={source.type}: has no pairs of answers; take preference, arithmetic, "
                "or a function of yours that returns rows with chosen and rejected"
            )
    if cfg.train_dataset.curriculum is not None:
        yield (
            f"train_dataset.curriculum: goes by rewards, which recipe={cfg.recipe} has none of; "
            "leave it out"
        )
