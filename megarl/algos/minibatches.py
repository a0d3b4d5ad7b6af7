"""Several optimizer steps over one batch: who is in which, and the metrics of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megarl.algos.checks import some, untrained_rows
from megarl.utils.batch import select

Batch = dict[str, Tensor]


def minibatch_rows(batch_size: int, n: int, *, seed: int) -> list[list[int]]:
    """Rows 0..batch_size-1 in n parts whose sizes differ by at most one, shuffled by `seed`.

    One part keeps the order of the batch. Within a part rows stay ascending, so that neighbours of
    equal prompt stay neighbours. Groups need not stay whole: advantages are already computed.
    """
    if n > batch_size:
        raise ValueError(
            f"ppo_n_minibatches={n} exceeds the {batch_size} sequences of the batch: lower it, or "
            "raise train_dataset.batch_size or gconfig.n_samples"
        )
    if n == 1:
        return [list(range(batch_size))]
    # torch uses the low 32 bits of a seed only
    order = torch.randperm(batch_size, generator=torch.Generator().manual_seed(seed % 2**32))
    return [sorted(part.tolist()) for part in order.tensor_split(n)]


def minibatches(
    batch: Batch, n: int, weight: Callable[[Batch], float], *, seed: int
) -> Iterator[tuple[list[int], Batch]]:
    """(rows, part) for the parts of `batch` that have something to train on: elsewhere the gradient
    is zero, and so is its denominator. ValueError if none has.
    """
    found = False
    for rows in minibatch_rows(len(batch["input_ids"]), n, seed=seed):
        minibatch = select(batch, rows)
        if weight(minibatch) > 0:
            found = True
            yield rows, minibatch
    if not found:
        raise ValueError(
            "ppo_update: loss_mask marks no token in the whole batch "
            f"(rows {some(untrained_rows(batch['loss_mask']))})"
        )


def skipped_metrics(batch: Batch, skipped: Tensor) -> dict[str, float]:
    """Counts what was not trained on: the rows of `skipped` [B] bool, and their tokens."""
    return {
        "skipped_sequences": float(skipped.sum()),
        "skipped_tokens": float(batch["loss_mask"][skipped].sum()),
    }


def mean_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps that were made (of lr the last), and how many were."""
    done = [u for u in updates if u["update_successful"]]
    counts = {
        "n_updates": float(len(done)),
        "skipped_updates": float(len(updates) - len(done)),
        "update_successful": len(done) / len(updates),
    }
    if not done:
        return counts
    stats = {k: sum(u[k] for u in done) / len(done) for k in done[0]} | counts
    if "lr" in stats:
        stats["lr"] = done[-1]["lr"]
    return stats
