"""GSPO (arXiv 2507.18071) clips the importance ratio of a sequence, not of a token.

    python -m megarl.launcher.local --config configs/quickstart_grpo.yaml \\
        actor.loss=examples.gspo:gspo actor.loss.options.eps_high=4e-4
"""

from __future__ import annotations

from functools import partial

import torch

from megarl.algos import LossSpec, sequence_weight
from megarl.algos.kl import safe_exp
from megarl.config.algo import PPOActorConfig


def gspo(config: PPOActorConfig, *, eps_low: float = 3e-4, eps_high: float = 4e-4) -> LossSpec:
    """Returns GSPO's LossSpec; the defaults are the paper's (section 5.1)."""
    fn = partial(gspo_loss, old_logp=config.old_logp, eps_low=eps_low, eps_high=eps_high)
    return LossSpec(fn=fn, weight=sequence_weight, needs=("advantages", config.old_logp))


def gspo_loss(outputs, batch, *, old_logp, eps_low, eps_high):
    """Computes eq. 5 and 7: -min(s A, clip(s, 1 - eps_low, 1 + eps_high) A), summed over sequences,
    with s = exp of the mean of log p / p_old over the sequence's trained tokens."""
    mask = batch["loss_mask"].bool()
    length = mask.sum(1).clamp(min=1)
    log_ratio = torch.where(mask, outputs["logprobs"] - batch[old_logp], 0.0)
    ratio = safe_exp(log_ratio.sum(1) / length)  # [b]
    advantage = torch.where(mask, batch["advantages"], 0.0).sum(1) / length
    clipped = ratio.clamp(1.0 - eps_low, 1.0 + eps_high)
    loss = torch.maximum(-advantage * ratio, -advantage * clipped)
    trained = mask.any(1)
    n, ratio, clip = trained.sum(), ratio.detach(), (clipped * advantage < ratio * advantage)
    stats = {
        "seq_ratio": (ratio[trained].sum(), n),
        "seq_clip_frac": ((clip & trained).sum(), n),
    }
    return loss[trained].sum(), stats
