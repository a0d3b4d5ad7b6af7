"""Datasets and the loader: rows in, batches of rows out."""

from megarl.data.dataset import RowDataset, build_dataset, check_context
from megarl.data.loader import build_dataloader, collate_sft

__all__ = ["RowDataset", "build_dataloader", "build_dataset", "check_context", "collate_sft"]
