"""Gathers the rollouts of an episode whose workflow runs again, because some of them failed.

What failed is made anew in a fresh environment, since leaving it out would favour prompts whose
environments seldom fail. Only as many rollouts are taken as are missing, the first ones: no rule
that looks at what they earned may choose among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from megarl.api.batch import Padded
from megarl.api.tokens import concat_padded, select

Failed = tuple[str, int]  # kind and length in tokens of a rollout that failed


class Gathered:
    """Holds what the runs of one episode's workflow have brought. expected: how many rollouts the
    workflow is to make, until a run has shown it.

    failed: kind and length of every rollout that failed, also of those that were made anew.
    good: rollouts that did not fail. retried: those of them made in place of failed ones.
    """

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self.failed: list[Failed] = []
        self.good = self.retried = 0
        self._parts: list[Padded] = []
        self._wanted: int | None = None  # not known before a run has returned a batch
        self._runs = 0

    @property
    def counted(self) -> bool:
        """Returns whether a run has shown how many rollouts there are to be."""
        return self._wanted is not None

    @property
    def missing(self) -> int:
        """Returns how many rollouts are missing."""
        return (self._expected if self._wanted is None else self._wanted) - self.good

    def add(self, batch: Padded | None, failed: Sequence[Failed]) -> None:
        """Takes what a run has returned: rollouts without those that failed, None for none."""
        got = 0 if batch is None else count_rollouts(batch)
        if self._wanted is None:
            self._wanted = got + len(failed)
        taken = min(got, self._wanted - self.good)
        if batch is not None and taken:
            self._parts.append(_first_rollouts(batch, taken))
        self.failed += failed
        self.good += taken
        self.retried += taken if self._runs else 0
        self._runs += 1

    def add_failure(self, kind: str) -> None:
        """Notes that all rollouts failed that a run should have made."""
        self.failed += [(kind, 0)] * self.missing
        self._runs += 1

    def joined(self, min_rollouts: int) -> Padded | None:
        """Returns the rollouts, those made anew at the end; None where there are none, or some are
        missing and fewer than `min_rollouts` are left."""
        if not self.good or (self.missing and self.good < min_rollouts):
            return None
        return concat_padded(numbered_through(self._parts))


def by_kind(failed: Sequence[Failed]) -> str:
    """Returns how many rollouts failed of each kind, in words, the most frequent first."""
    return ", ".join(f"{n} {kind}" for kind, n in Counter(k for k, _ in failed).most_common())


def count_rollouts(batch: Padded) -> int:
    """Returns the number of rollouts in a batch [n,S]."""
    ids = batch.get("rollout_ids")
    return len(batch["input_ids"]) if ids is None else len(ids.unique())


def rewards_of(batch: Padded | None) -> list[float]:
    """Returns the reward of each rollout of an episode, however many rows it has; [] for None."""
    if batch is None:
        return []
    rewards = batch["rewards"].tolist()
    ids = batch["rollout_ids"].tolist() if "rollout_ids" in batch else range(len(rewards))
    return list(dict(zip(ids, rewards, strict=True)).values())


def numbered_through(parts: Sequence[Padded]) -> list[Padded]:
    """Returns batches [n,S] whose unit_ids and rollout_ids [n], where there are any, are numbered
    through all of them."""
    count = dict.fromkeys(("unit_ids", "rollout_ids"), 0)
    out = []
    for part in parts:
        numbered = dict(part)
        for key in count.keys() & part.keys():
            names, local = part[key].unique(return_inverse=True)
            numbered[key], count[key] = local + count[key], count[key] + len(names)
        out.append(numbered)
    return out


def _rollout_ids(batch: Padded) -> torch.Tensor:
    return batch.get("rollout_ids", torch.arange(len(batch["input_ids"])))


def _first_rollouts(batch: Padded, n: int) -> Padded:
    """Returns the first `n` rollouts of a batch, by their first rows."""
    ids = _rollout_ids(batch)
    first = list(dict.fromkeys(ids.tolist()))[:n]
    keep = torch.isin(ids, torch.tensor(first, dtype=ids.dtype))
    return batch if keep.all() else select(batch, keep.nonzero().flatten())
