"""Advantages of one's own: prompts of medium difficulty count most, late tokens more than early.

    megarl launch --config configs/quickstart_grpo.yaml \\
        actor.advantages=examples.custom_advantage:by_difficulty actor.advantages.options.decay=0.99
"""

from __future__ import annotations

from megarl.algos import AdvantageSpec
from megarl.algos.advantages import Groups
from megarl.config.algo import PPOActorConfig


def by_difficulty(config: PPOActorConfig, *, decay: float = 1.0) -> AdvantageSpec:
    """Returns an AdvantageSpec: the reward less the group's mean, times 4 p (1 - p) for the share p
    of the group that earned anything, times decay ** (trained tokens that follow)."""

    def per_sample(batch):
        """Returns one number for each rollout of the whole batch, [R]; the same on every rank."""
        groups = Groups(batch["rewards"], batch["group_ids"])
        passed = groups.of((groups.rewards > 0).double(), "mean")
        return (groups.centred() * 4.0 * passed * (1.0 - passed)).float()

    def per_token(numbers, rows):
        """Returns the advantages [b,S] of some rows, from their numbers [b] and loss_mask."""
        mask = rows["loss_mask"]
        follow = mask.long().flip(1).cumsum(1).flip(1) - 1
        return numbers[:, None] * decay**follow * mask

    return AdvantageSpec(per_sample=per_sample, per_token=per_token, needs_groups=True)
