"""The losses of the invariance suite: over tokens, whole sequences and pairs of sequences, for
language models and for value models. No loss is a mean over the tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megarl.algos import critic_loss, token_weight
from megarl.algos.losses import sequence_weight
from megarl.algos.preferences import DPO, BradleyTerry, pair_weight
from tests.dist.engine_jobs import TEMPERATURE, Tensors, loss_fn, weight_fn

LossAndStats = tuple[torch.Tensor, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss, the model's `head`, and train_batch's outputs, temperature and whole_groups."""

    fn: Callable[[Tensors, Tensors], LossAndStats]
    weight: Callable[[Tensors], float]
    head: str = "lm"
    outputs: tuple[str, ...] = ("logprobs",)
    temperature: float = TEMPERATURE
    whole_groups: bool = False

    @property
    def kw(self) -> dict[str, Any]:
        return dict(
            outputs=self.outputs, temperature=self.temperature, whole_groups=self.whole_groups
        )


def gspo(outputs: Tensors, b: Tensors) -> LossAndStats:
    """Computes GSPO's loss with the clipped ratio of sequences (arXiv 2507.18071, eq. 5 and 7)."""
    mask = b["loss_mask"]
    log_ratio = torch.where(mask, outputs["logprobs"] - b["old_logp"], 0.0)
    ratio = (log_ratio.sum(1) / mask.sum(1).clamp(min=1)).exp()
    adv = b["advantages"]
    gain = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
    return -torch.where(mask.any(1), gain, 0.0).sum(), {"ratio": (ratio.detach().sum(), len(ratio))}


VALUES: dict[str, Any] = dict(head="value", outputs=("values",), temperature=1.0)
LOSSES = {
    # its weights are fractional, and one term is a square of means over sequences
    "policy": Loss(fn=loss_fn, weight=weight_fn, outputs=("logprobs", "entropy")),
    "gspo": Loss(fn=gspo, weight=sequence_weight),
    "dpo": Loss(fn=DPO(beta=0.2), weight=pair_weight, whole_groups=True),
    "critic": Loss(fn=critic_loss, weight=token_weight, **VALUES),
    "reward": Loss(fn=BradleyTerry(), weight=pair_weight, whole_groups=True, **VALUES),
}
