"""Several optimizer steps over one batch: who is in which, and the metrics of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megarl.algos.checks import some
from megarl.algos.rows import Data, select_rows


def minibatch_rows(batch_size: int, n: int, *, seed: int, of: str = "sequences") -> list[list[int]]:
    """Rows 0..batch_size-1 in n parts whose sizes differ by at most one, shuffled by `seed`.

    One part keeps the order of the batch. Within a part rows stay ascending, so that neighbours of
    equal prompt stay neighbours. Groups need not stay whole: advantages are already computed.
    """
    if n > batch_size:
        raise ValueError(
            f"ppo_n_minibatches={n} exceeds the {batch_size} {of} of the batch: lower it, or "
            "raise train_dataset.batch_size or gconfig.n_samples"
        )
    if n == 1:
        return [list(range(batch_size))]
    # torch uses the low 32 bits of a seed only
    order = torch.randperm(batch_size, generator=torch.Generator().manual_seed(seed % 2**32))
    return [sorted(part.tolist()) for part in order.tensor_split(n)]


def unit_minibatches(unit_ids: Tensor, n: int, *, seed: int) -> list[list[int]]:
    """Rows of the units [B] in n parts; a unit is never split, and the numbers of units of two
    parts differ by at most one. Where every row is a unit of its own: `minibatch_rows`.
    """
    units, of_row = unit_ids.unique(return_inverse=True)
    if len(units) == len(unit_ids):
        return minibatch_rows(len(units), n, seed=seed)
    part_of_unit = torch.empty(len(units), dtype=torch.long)
    for k, part in enumerate(minibatch_rows(len(units), n, seed=seed, of="units")):
        part_of_unit[part] = k
    part_of_row = part_of_unit[of_row]
    return [(part_of_row == k).nonzero().flatten().tolist() for k in range(n)]


def minibatches(
    data: Data, names: Sequence[str], parts: Sequence[list[int]], trained: Tensor
) -> Iterator[tuple[list[int], Data]]:
    """(rows, their fields `names`) for those of `parts` that have something to train on: elsewhere
    the gradient is zero, and so is its denominator. `trained` [B]: trained tokens of every row.
    ValueError if there are none.
    """
    if not trained.any():
        rows = some((trained == 0).nonzero().flatten().tolist())
        raise ValueError(f"ppo_update: loss_mask marks no token in the whole batch (rows {rows})")
    for rows in parts:
        if trained[rows].any():
            yield rows, select_rows(data, rows, names)


def skipped_metrics(trained: Tensor, skipped: Tensor) -> dict[str, float]:
    """Counts what was not trained on: the rows of `skipped` [B] bool, and their `trained` tokens
    [B]."""
    return {
        "skipped_sequences": float(skipped.sum()),
        "skipped_tokens": float(trained[skipped].sum()),
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
