"""RewardModel scores whole answers by a frozen model."""

from __future__ import annotations

from torch import Tensor

from megarl.algos.role import Role
from megarl.algos.rows import Data


class RewardModel(Role):
    """Scores answers by a value model whose score at the last token is the reward, as in HF's
    ForSequenceClassification."""

    def compute_rewards(self, batch: Data) -> Tensor:
        """Returns the scores of the sequences, [B]."""
        return self.forward_values(batch)[1]
