"""A loss of one's own: learn from the good answers alone, as RAFT does (arXiv 2304.06767).

    megarl launch --config configs/quickstart_grpo.yaml \\
        actor.loss=examples.custom_loss:raft actor.loss.options.floor=0.5

A surrogate is the smaller part: it says what a token's loss is, and leaves the correction, the KL,
the entropy and the mean to the built-in loss.

    megarl launch --config configs/quickstart_grpo.yaml \\
        actor.surrogate=examples.custom_loss:square_root
"""

from __future__ import annotations

import torch

from megarl import stats_tracker
from megarl.algos import LossSpec, Surrogate, derived_policy_stats, policy_stats
from megarl.config.algo import PPOActorConfig


def raft(config: PPOActorConfig, *, floor: float = 0.0) -> LossSpec:
    """Returns a LossSpec: the mean cross entropy of the tokens whose advantage is above `floor`."""

    def good(batch):
        """Marks the tokens of good answers, [b,S]."""
        return batch["loss_mask"].bool() & (batch["advantages"] > floor)

    def loss(outputs, batch):
        # sums, and what they are divided by: the engine adds both up over all micro-batches
        cross_entropy = -torch.where(good(batch), outputs["logprobs"], 0.0).sum()
        share = (good(batch).sum(), batch["loss_mask"].sum())
        figures = policy_stats(outputs, batch, config.old_logp)  # ratio, KL, ... as of every loss
        # what is no mean over all trained tokens: the least likely of the good ones
        stats_tracker.denominator(good=good(batch))
        stats_tracker.stat(good_logp_min=outputs["logprobs"], denominator="good", reduce_type="min")
        return cross_entropy, figures | {"good_tokens": share}

    return LossSpec(
        fn=loss,
        weight=lambda batch: float(good(batch).sum()),
        needs=("advantages", "logprobs", config.old_logp),
        derive=derived_policy_stats,
        own_prox=True,
    )


def square_root(config: PPOActorConfig, *, power: float = 0.5):
    """Returns a surrogate: the ratio to a power, which moves less than the ratio does."""

    def surrogate(log_ratio, advantages, logp, mask):
        ratio = (power * log_ratio).exp()
        return Surrogate(-ratio * advantages / power, ratio.detach())

    return surrogate
