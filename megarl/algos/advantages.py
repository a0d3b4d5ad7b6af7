"""Outcome rewards to advantages. Pure functions; B sequences, S positions."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.config.algo import PPOActorConfig

ADV_MODES = ("group", "group_mean", "none")


def shape_rewards(rewards: Tensor, config: PPOActorConfig) -> Tensor:
    """(r + bias) * scaling, bounded by +-clip. [B] -> [B]"""
    shaped = (rewards.float() + config.reward_bias) * config.reward_scaling
    return shaped.clamp(-config.reward_clip, config.reward_clip)


def grpo_advantages(
    rewards: Tensor, group_ids: Tensor, mode: str = "group", eps: float = 1e-6
) -> Tensor:
    """Advantage of every sequence within its group, [B] float32.

    mode: "group"       (r - mean) / (std + eps), the sample std      (GRPO, arXiv 2402.03300)
          "group_mean"  r - mean: no division, so easy and hard prompts weigh the same
                        (Dr. GRPO, arXiv 2503.20783)
          "none"        r
    A group of one, and a group whose rewards are all equal, says nothing about which sample is
    better: its advantages are exactly 0 (not rounding noise divided by eps).
    Groups are found by id; they may have any size and stand in any order.
    """
    if mode not in ADV_MODES:
        raise ValueError(f"adv_norm={mode!r}: use one of {', '.join(ADV_MODES)}")
    if rewards.shape != group_ids.shape or rewards.ndim != 1:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)}: both must be "
            "[B]"
        )
    if mode == "none":
        return rewards.float()
    r = rewards.double()  # B numbers: exactness costs nothing
    groups, index = torch.unique(group_ids, return_inverse=True)

    def per_group(values: Tensor, reduce: str) -> Tensor:
        out = values.new_zeros(len(groups))
        return out.scatter_reduce(0, index, values, reduce, include_self=False)[index]

    size = per_group(torch.ones_like(r), "sum")
    centred = r - per_group(r, "mean")
    centred[per_group(r, "amax") == per_group(r, "amin")] = 0.0
    if mode == "group_mean":
        return centred.float()
    std = (per_group(centred.square(), "sum") / (size - 1).clamp(min=1)).sqrt()
    return (centred / (std + eps)).float()


def spread_over_tokens(advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """[B] -> [B,S]: the sequence's advantage at every trained token, 0 elsewhere."""
    return advantages[:, None].float() * loss_mask
