"""Computes statistics over the samples of a prompt. R rollouts in groups of any size and order."""

from __future__ import annotations

import torch
from torch import Tensor


class Groups:
    """Holds which group each rollout is in, index [R], and each rollout's group size, [R]."""

    def __init__(self, rewards: Tensor, group_ids: Tensor) -> None:
        """Takes rewards and group_ids, both [R]; raises ValueError for other shapes."""
        if rewards.shape != group_ids.shape or rewards.ndim != 1:
            raise ValueError(
                f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)}: both must "
                "be [B]"
            )
        self.rewards = rewards.double()  # R numbers: exactness costs nothing
        ids, self.index = torch.unique(group_ids, return_inverse=True)
        self._count = len(ids)
        self.size = self.of(torch.ones_like(self.rewards), "sum")

    def of(self, values: Tensor, reduce: str) -> Tensor:
        """Returns "sum", "mean", "amin" or "amax" of the group's `values`, for every rollout."""
        out = values.new_zeros(self._count)
        return out.scatter_reduce(0, self.index, values, reduce, include_self=False)[self.index]

    @property
    def tied(self) -> Tensor:
        """Says which rollouts are in a group whose rewards are all equal, [R] bool."""
        return self.of(self.rewards, "amax") == self.of(self.rewards, "amin")

    def centred(self) -> Tensor:
        """Returns the rewards less the group's mean, exactly 0 where they are all equal."""
        return torch.where(self.tied, 0.0, self.rewards - self.of(self.rewards, "mean"))

    def std(self, kind: str = "sample") -> Tensor:
        """Returns the standard deviation within the group, by n - 1 ("sample") or n
        ("population"); 0 in a group of one."""
        n = self.size - 1 if kind == "sample" else self.size
        return (self.of(self.centred().square(), "sum") / n.clamp(min=1)).sqrt()

    def std_of_all(self, kind: str = "sample") -> Tensor:
        """Returns the standard deviation of all rewards, a scalar; `kind` as of `std`."""
        n = len(self.rewards) - 1 if kind == "sample" else len(self.rewards)
        return ((self.rewards - self.rewards.mean()).square().sum() / max(1, n)).sqrt()
