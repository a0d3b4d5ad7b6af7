"""RewardModel: a frozen model that scores whole answers."""

from __future__ import annotations

from torch import Tensor

from megarl.algos.role import Role
from megarl.algos.rows import Data


class RewardModel(Role):
    """A value model whose score at the last token is the reward, as in HF's
    ForSequenceClassification."""

    def compute_rewards(self, batch: Data) -> Tensor:
        """[B] scores of the sequences."""
        return self.forward_values(batch)[1]
