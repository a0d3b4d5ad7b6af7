"""Sums per-token numbers [b,S] over each row's trained tokens. b rows, S positions."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.api.batch import Padded


def sums(per_token: Tensor, batch: Padded) -> Tensor:
    """Returns the sum of [b,S] over each row's trained tokens, [b]."""
    return torch.where(batch["loss_mask"].bool(), per_token, 0.0).sum(1)


def means(per_token: Tensor, batch: Padded) -> Tensor:
    """Returns the mean of [b,S] over each row's trained tokens, [b]; 0 without one."""
    return sums(per_token, batch) / batch["loss_mask"].sum(1).clamp(min=1)
