"""Cuts a batch into the mini-batches of several optimizer steps, and averages their metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megarl.algos.checks import some
from megarl.algos.rows import Data, select_rows
from megarl.api.engine import Metrics


def minibatches(
    data: Data, names: Sequence[str], parts: Sequence[list[int]], trained: Tensor
) -> Iterator[tuple[list[int], Data]]:
    """Yields (rows, their fields `names`) of those `parts` that have something to train on:
    elsewhere the gradient is zero, and so is its denominator. `trained` [B]: trained tokens of
    every row. Raises ValueError if there are none."""
    if not trained.any():
        named = some((trained == 0).nonzero().flatten().tolist())
        raise ValueError(f"ppo_update: loss_mask marks no token in the whole batch (rows {named})")
    for rows in parts:
        if trained[rows].any():
            yield rows, select_rows(data, rows, names)


def batch_shares(parts: Sequence[list[int]], trained: Tensor) -> Tensor:
    """Returns [B] float64: of the rows of each mini-batch that have something to train on equal
    shares that add up to 1, of the others 0."""
    shares = torch.zeros(len(trained), dtype=torch.float64)
    for rows in parts:
        telling = (trained[rows] > 0).double()
        shares[rows] = telling / telling.sum().clamp(min=1)
    return shares


def skipped_metrics(trained: Tensor, skipped: Tensor) -> dict[str, float]:
    """Counts what was not trained on: `skipped` [B] bool rows, and their `trained` tokens [B]."""
    return {
        "skipped_sequences": float(skipped.sum()),
        "skipped_tokens": float(trained[skipped].sum()),
    }


def mean_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """Returns the means over the optimizer steps that were made, and the numbers of steps made and
    skipped. Of lr it is the last value. A step counts for a mean by its weight where the step has
    one (`Metrics`), else like every other; NaN is what has no weight in any step."""
    done = [u for u in updates if u["update_successful"]]
    counts = {
        "n_updates": float(len(done)),
        "skipped_updates": float(len(updates) - len(done)),
        "update_successful": len(done) / len(updates),
    }
    if not done:
        return counts
    stats = {}
    for name in dict.fromkeys(name for update in done for name in update):
        said = [u for u in done if name in u]  # a loss need not say it of every mini-batch
        found = [(u[name], _weight(u, name)) for u in said]
        total = sum(weight for _, weight in found)
        mean = sum(value * weight for value, weight in found if weight) / (total or math.nan)
        stats[name] = found[-1][0] if name == "lr" else mean
    return stats | counts


def _weight(update: dict[str, float], name: str) -> float:
    return update.weights.get(name, 1.0) if isinstance(update, Metrics) else 1.0
