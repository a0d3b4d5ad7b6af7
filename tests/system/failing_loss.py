"""A loss that raises on rank 1."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megarl.algos.specs import LossSpec
from megarl.api.batch import Padded


def on_rank_1(outputs: Padded, batch: Padded) -> tuple[Any, dict[str, tuple[Any, Any]]]:
    if dist.get_rank() == 1:
        raise ValueError("the loss of rank 1")
    return outputs["logprobs"].sum(), {}


def failing(config: Any) -> LossSpec:
    return LossSpec(fn=on_rank_1, weight=lambda batch: float(batch["loss_mask"].sum()))
