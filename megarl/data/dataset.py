"""Makes data sets of rows of tokens, and batches of them in a seeded order that survives a
resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from megarl.api.tokens import Padded
from megarl.config.dataset import DatasetConfig, SourceConfig
from megarl.data.draws import Draws
from megarl.data.rows import Row
from megarl.data.sources import (
    DATASET,
    PURPOSES,
    apart,
    check_batches,
    describe,
    load_rows,
    prompt_key,
    sources_of,
)
from megarl.data.tokenizer import encode_rows, none_fits, num_tokens
from megarl.observability.logging import get_logger
from megarl.utils.importing import load_object

log = get_logger(__name__)


class RowDataset(Dataset[Row]):
    """Holds rows in memory and gives them by index.

    prompts: the keys (sources.prompt_key) of the prompts of its source. parts: which rows are of
    which part of a mixture.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        prompts: frozenset[int] = frozenset(),
        parts: Mapping[str, range] | None = None,
    ) -> None:
        self._rows, self.prompts = list(rows), prompts
        self.parts = dict(parts or {"": range(len(self._rows))})

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)


def build_dataset(
    cfg: SourceConfig,
    tokenizer: Any,
    *,
    purpose: str,
    seed: int,
    apart_from: RowDataset | None = None,
    overlap: str = "drop",
) -> RowDataset:
    """Returns the rows of `cfg` with their tokens.

    purpose "rl": rows {row_id, messages, prompt, prompt_ids} and every other column of the source;
    "prompts" is the same of rows for SFT, without the answers that these end with. "sft": rows
    {row_id, input_ids, loss_mask}; the loss is on what the policy has to write: the text `response`
    and EOS, or the assistant's turns (Template.conversation). "pairs": rows {row_id, chosen_ids,
    chosen_mask, rejected_ids, rejected_mask}, each the whole conversation with the mask of the
    answer, and `margin` where the source has one.

    apart_from: training data; what `overlap` does with rows of the same prompt, see sources.apart.

    options of every type: system (a system message), chat_template_kwargs, train_on (SFT on
    conversations: all turns, or the last). Rows longer than `cfg.max_length` tokens (prompts for
    RL, sequences for SFT and pairs) are dropped, their count logged. Raises ValueError for a row or
    an option that is wrong.
    """
    if purpose not in PURPOSES:
        raise ValueError(f"build_dataset: purpose={purpose!r}: use one of {list(PURPOSES)}")
    encoded: list[Row] = []
    parts: dict[str, range] = {}
    prompts: set[int] = set()
    first_id = 0
    for name, part in sources_of(cfg).items():
        sources: Sequence[Row] = load_rows(part, seed=seed, purpose=purpose, part=name)
        if apart_from is not None:
            sources = apart(sources, part, apart_from.prompts, overlap)
        prompts.update(prompt_key(row, part) for row in sources)
        named = {DATASET: name} if name else {}
        with_tokens = enumerate(
            encode_rows(enumerate(sources), part, tokenizer, purpose), start=first_id
        )
        rows = _short_enough([{"row_id": i} | row | named for i, row in with_tokens], part)
        parts[name] = range(len(encoded), len(encoded) + len(rows))
        encoded, first_id = encoded + rows, first_id + len(sources)
    return RowDataset(encoded, prompts=frozenset(prompts), parts=parts)


def _short_enough(rows: list[Row], cfg: SourceConfig) -> list[Row]:
    if cfg.max_length is None:
        return rows
    kept = [row for row in rows if num_tokens(row) <= cfg.max_length]
    dropped = len(rows) - len(kept)
    if not kept:
        raise none_fits(cfg, map(num_tokens, rows))
    if dropped:
        log.warning(
            "%s: dropped %d of %d rows longer than max_length=%d tokens",
            describe(cfg),
            dropped,
            len(rows),
            cfg.max_length,
        )
    return kept


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
        if not isinstance(dataset, RowDataset):
            raise ValueError(
                f"a {type(dataset).__name__} does not know the parts of a mixture, nor the row_id "
                "that a curriculum goes by; make it with build_dataset"
            )
        sampler = Draws(dataset, cfg, seed=seed)
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
