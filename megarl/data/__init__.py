"""Datasets and the loader: rows in, batches of rows out.

Names load on first use, so that a start can look at its data before it imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.data.dataset import RowDataset, build_dataset, check_context
    from megarl.data.loader import (
        build_dataloader,
        collate_pairs,
        collate_sft,
        collate_unpaired,
        collator,
        go_on,
    )
    from megarl.data.sources import check_batches, load_rows, sources_of

_HOME = {
    "RowDataset": "dataset",
    "build_dataset": "dataset",
    "check_context": "dataset",
    "build_dataloader": "loader",
    "collate_pairs": "loader",
    "collate_sft": "loader",
    "collate_unpaired": "loader",
    "collator": "loader",
    "check_batches": "sources",
    "go_on": "loader",
    "load_rows": "sources",
    "sources_of": "sources",
}
__all__ = [
    "RowDataset",
    "build_dataloader",
    "build_dataset",
    "check_batches",
    "check_context",
    "collate_pairs",
    "collate_sft",
    "collate_unpaired",
    "collator",
    "go_on",
    "load_rows",
    "sources_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
