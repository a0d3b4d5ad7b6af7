"""Gives batches of rows in a seeded order that survives a resume; pads them for SFT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from megarl.api.tokens import Padded
from megarl.config.dataset import DatasetConfig
from megarl.data.dataset import RowDataset
from megarl.data.draws import Draws
from megarl.data.rows import Row
from megarl.data.sources import check_batches
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

    Mixtures and curricula draw by `Draws`, for which the dataset has to be `build_dataset`'s. A
    sampler of the user's (cfg.sampler) gives the order instead; with state_dict and
    load_state_dict of its own it resumes where it was, else torchdata draws again what was drawn.
    """
    check_batches(len(dataset), cfg)  # type: ignore[arg-type]
    # a generator of its own: the loader draws from a shared one too, which a resume would not redo
    generator = torch.Generator().manual_seed(seed)
    sampler: Any = RandomSampler(dataset, generator=generator) if cfg.shuffle else None  # type: ignore[arg-type]
    if cfg.parts or cfg.curriculum is not None:
        sampler = _draws(dataset, cfg, seed)
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


def go_on(loader: StatefulDataLoader[Any], state: dict[str, Any]) -> None:
    """Has the loader and its sampler continue from what `loader.state_dict` returned. By itself the
    loader would tell its sampler only when the next row is drawn, which a run with rows in flight
    may do long after it has told it of pass rates."""
    loader.load_state_dict(state)
    loader.state_dict()


def _draws(dataset: Dataset[Row], cfg: DatasetConfig, seed: int) -> Draws:
    if not isinstance(dataset, RowDataset):
        raise ValueError(
            f"a {type(dataset).__name__} does not know the parts of a mixture, nor the row_id that "
            "a curriculum goes by; make it with build_dataset"
        )
    return Draws(dataset, cfg, seed=seed)


def collator(
    cfg: DatasetConfig, default: Callable[[list[Row]], Any] = list
) -> Callable[[list[Row]], Any]:
    """Returns the user's function cfg.collate with its options, or `default` where there is none:
    rows to a list of rows (RL) or to padded tensors (SFT)."""
    if not cfg.collate.type:
        return default
    return partial(load_object(cfg.collate.type, what="collate"), **cfg.collate.options)


def collate_pairs(rows: Sequence[Row], *, margin: bool = False) -> Padded:
    """Returns the sequences of pairs as `collate_sft` does, [2B,S]: the chosen one of each pair and
    then the rejected one, with group_ids and unit_ids [2B], the pair's number, and `chosen` [2B]
    bool. With `margin` also the rows' margins, [2B]."""
    sides = [
        {"input_ids": row[f"{side}_ids"], "loss_mask": row[f"{side}_mask"]}
        for row in rows
        for side in ("chosen", "rejected")
    ]
    pair = torch.arange(len(rows)).repeat_interleave(2)
    chosen = torch.arange(len(sides)) % 2 == 0
    batch = collate_sft(sides) | {"group_ids": pair, "unit_ids": pair.clone(), "chosen": chosen}
    if margin:
        batch["margin"] = torch.tensor([float(row["margin"]) for row in rows])[pair]
    return batch


def collate_unpaired(rows: Sequence[Row]) -> Padded:
    """Returns answers as `collate_sft` does, and which of them are desirable, [B] bool."""
    return collate_sft(rows) | {"desirable": torch.tensor([row["label"] for row in rows])}


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
