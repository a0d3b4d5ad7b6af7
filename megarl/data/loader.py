"""Gives batches of rows in a seeded order that survives a resume; pads them for SFT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from megarl.config.dataset import DatasetConfig
from megarl.data.problem import Row
from megarl.data.sources import check_batches
from megarl.utils.batch import Padded
from megarl.utils.importing import load_object


def build_dataloader(
    dataset: Dataset[Row],
    cfg: DatasetConfig,
    *,
    seed: int,
    collate: Callable[[list[Row]], Any] | None = None,
) -> StatefulDataLoader[Any]:
    """Yields `collate` of `cfg.batch_size` rows (default: `collator(cfg)`). Every epoch has its own
    order, given by `seed`; state_dict and load_state_dict resume in the middle of one.

    A sampler of the user's (cfg.sampler) gives the order instead; with state_dict and
    load_state_dict of its own it resumes where it was, else torchdata draws again what was drawn.
    """
    check_batches(len(dataset), cfg)  # type: ignore[arg-type]
    # a generator of its own: the loader draws from a shared one too, which a resume would not redo
    generator = torch.Generator().manual_seed(seed)
    sampler: Any = RandomSampler(dataset, generator=generator) if cfg.shuffle else None  # type: ignore[arg-type]
    if cfg.sampler.type:
        make = load_object(cfg.sampler.type, what="sampler")
        sampler = make(dataset, seed=seed, **cfg.sampler.options)
    return StatefulDataLoader(
        dataset,
        batch_size=cfg.batch_size,
        sampler=sampler,
        drop_last=cfg.drop_last,
        collate_fn=collate or collator(cfg),
        num_workers=cfg.num_workers,
    )


def collator(
    cfg: DatasetConfig, default: Callable[[list[Row]], Any] = list
) -> Callable[[list[Row]], Any]:
    """Returns the user's function cfg.collate with its options, or `default` where there is none:
    rows to a list of rows (RL) or to padded tensors (SFT)."""
    if not cfg.collate.type:
        return default
    return partial(load_object(cfg.collate.type, what="collate"), **cfg.collate.options)


def collate_sft(rows: Sequence[Row]) -> Padded:
    """Returns input_ids [B,S], attention_mask [B,S], loss_mask [B,S] of SFT rows, right-padded."""
    width = max(len(row["input_ids"]) for row in rows)
    batch: Padded = {
        "input_ids": torch.zeros(len(rows), width, dtype=torch.int64),
        "attention_mask": torch.zeros(len(rows), width, dtype=torch.bool),
        "loss_mask": torch.zeros(len(rows), width, dtype=torch.bool),
    }
    for i, row in enumerate(rows):
        n = len(row["input_ids"])
        batch["input_ids"][i, :n] = torch.tensor(row["input_ids"])
        batch["attention_mask"][i, :n] = True
        batch["loss_mask"][i, :n] = torch.tensor(row["loss_mask"])
    return batch
