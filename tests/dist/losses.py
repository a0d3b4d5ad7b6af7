"""The losses of the invariance suite: over tokens, whole sequences and pairs of sequences, for
language models and for value models. No loss is a mean over the tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from megarl.algos import critic_loss, token_weight
from megarl.algos.aggregation import sequence_weight
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


def pairs(values: torch.Tensor, b: Tensors) -> torch.Tensor:
    """Returns [b] numbers of sequences as [b/2,2], the earlier row of each group first."""
    order = b["group_ids"].argsort(stable=True)
    first, second = b["group_ids"][order].view(-1, 2).unbind(1)
    assert torch.equal(first, second), "a pair was torn apart"
    return values[order].view(-1, 2)


def dpo(outputs: Tensors, b: Tensors) -> LossAndStats:
    """Computes DPO's loss (arXiv 2305.18290, eq. 7), beta = 0.2."""
    log_ratio = torch.where(b["loss_mask"], outputs["logprobs"] - b["old_logp"], 0.0).sum(1)
    chosen, rejected = pairs(log_ratio, b).unbind(1)
    return -F.logsigmoid(0.2 * (chosen - rejected)).sum(), {}


def bradley_terry(outputs: Tensors, b: Tensors) -> LossAndStats:
    """Computes a reward model's loss on pairs; a score is the last value in `values`."""
    last = b["attention_mask"].sum(1, keepdim=True) - 1
    chosen, rejected = pairs(outputs["values"].gather(1, last)[:, 0], b).unbind(1)
    return -F.logsigmoid(chosen - rejected).sum(), {"right": ((chosen > rejected).sum(), 1.0)}


def pair_weight(b: Tensors) -> float:
    return len(b["group_ids"]) / 2


VALUES: dict[str, Any] = dict(head="value", outputs=("values",), temperature=1.0)
LOSSES = {
    # its weights are fractional, and one term is a square of means over sequences
    "policy": Loss(fn=loss_fn, weight=weight_fn, outputs=("logprobs", "entropy")),
    "gspo": Loss(fn=gspo, weight=sequence_weight),
    "dpo": Loss(fn=dpo, weight=pair_weight, whole_groups=True),
    "critic": Loss(fn=critic_loss, weight=token_weight, **VALUES),
    "reward": Loss(fn=bradley_terry, weight=pair_weight, whole_groups=True, **VALUES),
}
