"""What the ways to send weights have in common: where the weights are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.models.piece_table import PieceTable
from megarl.parallel.layout import Layout
from megarl.weight_sync.agreement import Agreement
from megarl.weight_sync.plan import Dtypes


@dataclass(kw_only=True)
class Transport:
    """Fields as of WeightSender, whose ranks act together. A transport's `upload` is collective."""

    table: PieceTable
    layout: Layout
    rank: int
    params: Mapping[str, torch.Tensor]
    group: dist.ProcessGroup | None
    dtype: Dtypes
    owner: int
    device: torch.device
    agreement: Agreement

    def __post_init__(self) -> None:
        """For a transport with state of its own; dataclasses call it where a base has one."""
