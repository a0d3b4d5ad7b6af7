"""Knows which rows of a batch are of one rollout. B rows of R rollouts.

A rollout whose conversation forked has a row for each of its branches. Numbers about rewards are of
rollouts: one with five rows counts once in the mean of its group, and all its rows get its
advantage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algos.rows import Data
from megarl.api.batch import Batch


@dataclass(frozen=True)
class Rollouts:
    """Holds the rollout of every row, of_row [B], counted from 0 in the order of their first rows,
    which are first [R]."""

    of_row: Tensor
    first: Tensor

    def __len__(self) -> int:
        """Returns R."""
        return len(self.first)

    def of_first(self, values: Tensor) -> Tensor:
        """Returns of `values` [B] those of the rollouts' first rows, [R]."""
        return values[self.first]

    def common(self, values: Tensor, name: str) -> Tensor:
        """Returns the rollouts' `values`: [B] -> [R]. Raises ValueError, with the field's `name`,
        where rows of one rollout differ."""
        found = values[self.first]
        other = found[self.of_row]
        same = (other == values) | (other.isnan() & values.isnan())
        differs = (~same).nonzero().flatten().tolist()
        if differs:
            row, first = differs[0], int(self.first[self.of_row[differs[0]]])
            raise ValueError(
                f"{name} of rows {first} and {row} are {values[first].item():g} and "
                f"{values[row].item():g}, and they are branches of one rollout: what a rollout "
                "earned stands on each of its rows; have the workflow score whole rollouts"
            )
        return found

    def sums(self, values: Tensor) -> Tensor:
        """Returns the sums over the rows of each rollout: [B] -> [R], of the dtype of `values`."""
        if len(self) == len(values):
            return values[self.first]
        return values.new_zeros(len(self)).index_add(0, self.of_row, values)

    def spread(self, values: Tensor) -> Tensor:
        """Returns the rollouts' `values` on each of their rows: [R] -> [B]."""
        return values[self.of_row]

    def any(self, mask: Tensor) -> Tensor:
        """Returns whether `mask` [B] is true of a row of the rollout, [R] bool."""
        return self.sums(mask.long()) > 0


def rollouts_of(data: Data | Mapping[str, Tensor]) -> Rollouts:
    """Returns the rollouts by rollout_ids [B]; without the field every row is one."""
    ids = data.get("rollout_ids")
    if ids is None:
        each = torch.arange(len(data) if isinstance(data, Batch) else len(data["input_ids"]))
        return Rollouts(each, each)
    _, index = ids.unique(return_inverse=True)
    rows = torch.arange(len(ids))
    first = rows.new_zeros(int(index.max()) + 1)
    first = first.scatter_reduce(0, index, rows, "amin", include_self=False)
    order = first.argsort()
    return Rollouts(order.argsort()[index], first[order])


def refuse_branches(data: Data, who: str) -> None:
    """Raises ValueError where a rollout has several rows, which `who` cannot work with."""
    rollouts = rollouts_of(data)
    rows = torch.bincount(rollouts.of_row)
    if len(rows) < len(rollouts.of_row):
        first = int(rollouts.first[int((rows > 1).nonzero()[0])])
        raise ValueError(
            f"{who}: {int((rows > 1).sum())} of {len(rows)} rollouts forked, the first at row "
            f"{first}, into {int(rows.max())} rows at most; where a conversation forks, a state "
            "has several successors and no one value: use advantages of groups (GRPO), or a "
            "workflow whose conversations never fork"
        )
