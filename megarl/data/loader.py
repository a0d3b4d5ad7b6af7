"""Batches of rows in a seeded order that survives a resume; padding for SFT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from megarl.config.dataset import DatasetConfig
from megarl.data.sources import check_batches
from megarl.utils.batch import Padded

Row = dict[str, Any]


def build_dataloader(
    dataset: Dataset[Row], cfg: DatasetConfig, *, seed: int
) -> StatefulDataLoader[Row]:
    """Yields lists of `cfg.batch_size` rows. Every epoch has its own order, given by `seed`;
    state_dict and load_state_dict resume in the middle of one.
    """
    check_batches(len(dataset), cfg)  # type: ignore[arg-type]
    # a generator of its own: the loader draws from a shared one too, which a resume would not redo
    generator = torch.Generator().manual_seed(seed)
    sampler = RandomSampler(dataset, generator=generator) if cfg.shuffle else None  # type: ignore[arg-type]
    return StatefulDataLoader(
        dataset,
        batch_size=cfg.batch_size,
        sampler=sampler,
        drop_last=cfg.drop_last,
        collate_fn=list,
        num_workers=0,
    )


def collate_sft(rows: Sequence[Row]) -> Padded:
    """input_ids [B,S], attention_mask [B,S], loss_mask [B,S] of SFT rows, right-padded."""
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
