"""KTO (arXiv 2402.01306) learns from answers that each are desirable or not, without pairs.

With r = logp(y) - logref(y), sums over the trained tokens of y, and s the sigmoid, the loss of an
answer is (L_KTO of the paper's section 4)

    w_d (1 - s(beta (r - z)))   of a desirable one
    w_u (1 - s(beta (z - r)))   of another

The reference point z is what the policy has moved away from the reference: max(0, mean of r over
prompts with answers to other prompts). It belongs to the whole batch and has no gradient. So it is
made before the update (`mismatched`, `reference_point`), by the same weights, and the loss does not
depend on how the batch is cut. b rows, S positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algos.aggregation import Stats
from megarl.algos.summed import means, sums
from megarl.api.batch import Padded


def answer_weight(batch: Padded) -> float:
    """Counts answers, [b]."""
    return float(len(batch["desirable"]))


@dataclass(frozen=True, kw_only=True)
class KTO:
    """Raises r of desirable answers above the reference point, and lowers that of others below it;
    batch: ref_logp [b,S], desirable [b] bool, reference_point [b]."""

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __call__(self, outputs: Padded, batch: Padded) -> tuple[Tensor, Stats]:
        """Returns the summed loss of the answers, and their figures."""
        log_ratio = sums(outputs["logprobs"] - batch["ref_logp"], batch)
        good = batch["desirable"].bool()
        above = self.beta * (log_ratio - batch["reference_point"])
        gain = torch.where(good, above, -above)
        lost = torch.sigmoid(-gain)  # 1 - s(gain), without the loss of digits where s is near 1
        loss = torch.where(good, self.desirable_weight * lost, self.undesirable_weight * lost)
        return loss.sum(), self._figures(outputs, batch, log_ratio.detach(), gain.detach())

    def _figures(self, outputs: Padded, batch: Padded, log_ratio: Tensor, gain: Tensor) -> Stats:
        """Returns means over the answers, or over those of a kind, [b] each."""
        good, n = batch["desirable"].bool(), torch.tensor(float(len(gain)))
        logp, rewards = means(outputs["logprobs"].detach(), batch), self.beta * log_ratio
        found: Stats = {
            "accuracy": ((gain > 0).sum() + 0.5 * (gain == 0).sum(), n),  # by chance at the start
            "reference_point": (batch["reference_point"].sum(), n),
        }
        for name, kind in (("chosen", good), ("rejected", ~good)):
            found[f"reward_{name}"] = (rewards[kind].sum(), kind.sum())
            found[f"logp_{name}"] = (logp[kind].sum(), kind.sum())
        return found


def mismatched(batch: Padded) -> Padded:
    """Returns every row's prompt with the answer of the next row that has another prompt (the last
    one's next is the first): input_ids, attention_mask, loss_mask, [b,S'] each. A prompt ends where
    loss_mask begins. Where all rows have one prompt, the next row's answer is taken."""
    rows = range(len(batch["input_ids"]))
    prompts, answers = zip(*(_cut(batch, row) for row in rows), strict=True)
    made = []
    for i, prompt in enumerate(prompts):
        nexts = [(i + k) % len(prompts) for k in range(1, len(prompts) + 1)]
        other = next((j for j in nexts if not torch.equal(prompts[j], prompt)), nexts[0])
        made.append((prompt, *answers[other]))
    return _padded(made)


def reference_point(log_ratio: Tensor, batch: Padded) -> Tensor:
    """Returns z, a scalar, of the log ratios [b,S] of a `mismatched` batch."""
    return sums(log_ratio, batch).double().mean().clamp(min=0.0).float()


def _cut(batch: Padded, row: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Returns the ids of a row's prompt, and the ids and the mask of its answer."""
    mask = batch["loss_mask"][row].bool()
    length = int(batch["attention_mask"][row].sum())
    begin = int(mask.int().argmax()) if mask.any() else length
    ids = batch["input_ids"][row]
    return ids[:begin], (ids[begin:length], mask[begin:length])


def _padded(rows: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Padded:
    """Returns rows of (prompt, answer, the answer's mask) as a right-padded batch."""
    width = max(len(prompt) + len(answer) for prompt, answer, _ in rows)
    ids = rows[0][0].new_zeros(len(rows), width)
    real, trained = (torch.zeros(len(rows), width, dtype=torch.bool) for _ in range(2))
    for i, (prompt, answer, mask) in enumerate(rows):
        begin, end = len(prompt), len(prompt) + len(answer)
        ids[i, :begin], ids[i, begin:end] = prompt, answer
        real[i, :end], trained[i, begin:end] = True, mask
    return {"input_ids": ids, "attention_mask": real, "loss_mask": trained}
