"""Sums per-token losses [b,S] into the mean that a configuration names (`actor.loss_agg`).

A loss sums and divides by nothing of the batch; the engine divides by the weight, which adds up
when the batch is cut. So a mean here is two functions: `aggregate`, the sum, and LOSS_WEIGHTS, what
it is divided by. b rows, S positions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megarl.api.batch import Padded

Stats = dict[str, tuple[Tensor, Tensor]]  # by name a sum, and what it is divided by


def token_weight(batch: Padded) -> float:
    """Counts the trained tokens of loss_mask [b,S]."""
    return float(batch["loss_mask"].sum())


def sequence_weight(batch: Padded) -> float:
    """Counts the sequences of loss_mask [b,S] with at least one trained token."""
    return float(batch["loss_mask"].bool().any(1).sum())


def rollout_weight(batch: Padded) -> float:
    """Counts the rollouts of loss_mask [b,S] by the share of each rollout's trained tokens
    (rollout_tokens [b]) that a row has, so that the rows of one add up to 1."""
    return float(weight_of(batch, "rollout-mean"))


def batch_weight(batch: Padded) -> float:
    """Adds the rows' shares of their mini-batch (batch_share [b]): 1 for the whole of it."""
    return float(weight_of(batch, "token-sum"))


LOSS_WEIGHTS: dict[str, Callable[[Padded], float]] = {
    "token-mean": token_weight,
    "sequence-mean": sequence_weight,
    "rollout-mean": rollout_weight,
    "sequence-sum": sequence_weight,
    "token-sum": batch_weight,
}


def aggregate(per_token: Tensor, batch: Padded, loss_agg: str) -> Tensor:
    """Returns the sum over [b,S] that, divided by LOSS_WEIGHTS[loss_agg], is what its name says.
    Raises ValueError for an unknown `loss_agg`.

    token-mean     the mean over trained tokens (DAPO, arXiv 2503.14476)
    sequence-mean  the mean over sequences of the mean over their trained tokens, so a long answer
                   counts as much as a short one (GRPO, arXiv 2402.03300)
    rollout-mean   the same over rollouts, whose trained tokens (rollout_tokens [b]) may stand in
                   several sequences
    sequence-sum   the mean over sequences of the sum over their trained tokens; over a constant
                   length, it is Dr. GRPO's (arXiv 2503.20783)
    token-sum      the sum over trained tokens

    >>> from megarl.algos.example import batch, values
    >>> [round(float(aggregate(values, batch, a)) / w(batch), 4) for a, w in LOSS_WEIGHTS.items()]
    [0.6, 0.5833, 0.5833, 1.5, 3.0]
    """
    mask = batch["loss_mask"].bool()
    masked = torch.where(mask, per_token, 0.0)
    if loss_agg in ("token-mean", "token-sum", "sequence-sum"):
        return masked.sum()
    if loss_agg == "sequence-mean":
        return (masked.sum(1) / mask.sum(1).clamp(min=1)).sum()
    if loss_agg == "rollout-mean":
        return (masked.sum(1) / batch["rollout_tokens"].clamp(min=1)).sum()
    raise ValueError(f"loss_agg={loss_agg!r}: use one of {', '.join(LOSS_WEIGHTS)}")


def weight_of(batch: Padded, loss_agg: str) -> Tensor:
    """Returns LOSS_WEIGHTS[loss_agg] of the batch as a scalar tensor."""
    mask = batch["loss_mask"].bool()
    if loss_agg == "token-mean":
        return mask.sum()
    if loss_agg == "rollout-mean":
        return (mask.sum(1).double() / batch["rollout_tokens"].clamp(min=1)).sum()
    if loss_agg == "token-sum":
        return batch["batch_share"].double().sum()
    return mask.any(1).sum()


def aggregation_needs(loss_agg: str) -> tuple[str, ...]:
    """Returns the fields [B] that `loss_agg` reads beside loss_mask."""
    return {"rollout-mean": ("rollout_tokens",), "token-sum": ("batch_share",)}.get(loss_agg, ())


def token_means(metrics: dict[str, Tensor], mask: Tensor) -> Stats:
    """Returns {name: (sum over trained tokens, their number)} of [b,S] metrics."""
    tokens = mask.sum()
    return {k: (torch.where(mask, v.float(), 0.0).sum(), tokens) for k, v in metrics.items()}
