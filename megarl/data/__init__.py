"""Datasets and the loader: rows in, batches of rows out.

Names load on first use, so that a start can look at its data before it imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.data.dataset import RowDataset, build_dataset, check_context
    from megarl.data.loader import build_dataloader, collate_sft, collator
    from megarl.data.sources import check_batches, load_rows

_HOME = {
    "RowDataset": "dataset",
    "build_dataset": "dataset",
    "check_context": "dataset",
    "build_dataloader": "loader",
    "collate_sft": "loader",
    "collator": "loader",
    "check_batches": "sources",
    "load_rows": "sources",
}
__all__ = [
    "RowDataset",
    "build_dataloader",
    "build_dataset",
    "check_batches",
    "check_context",
    "collate_sft",
    "collator",
    "load_rows",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
