"""Turns rewards into advantages, by group or by a critic's values. b sequences at hand of B, S
positions, R rollouts in groups of any size and order.

An estimator has up to three parts: group statistics, [B] -> [B] on every rank; work on rows, padded
[b,S] -> [b,S], for some of them at a time; and one step that sees the whole batch (whitening).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.algos.rows import map_tokens, moments
from megarl.algos.specs import AdvantageSpec
from megarl.api.batch import Batch, Padded, Tokens
from megarl.config.algo import PPOActorConfig


class Groups:
    """Holds which group each rollout is in, index [R], and each rollout's group size, [R]."""

    def __init__(self, rewards: Tensor, group_ids: Tensor) -> None:
        """Takes rewards and group_ids, both [R]; raises ValueError for other shapes."""
        if rewards.shape != group_ids.shape or rewards.ndim != 1:
            raise ValueError(
                f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)}: both must "
                "be [B]"
            )
        self.rewards = rewards.double()  # R numbers: exactness costs nothing
        ids, self.index = torch.unique(group_ids, return_inverse=True)
        self._count = len(ids)
        self.size = self.of(torch.ones_like(self.rewards), "sum")

    def of(self, values: Tensor, reduce: str) -> Tensor:
        """Returns "sum", "mean", "amin" or "amax" of the group's `values`, for every rollout."""
        out = values.new_zeros(self._count)
        return out.scatter_reduce(0, self.index, values, reduce, include_self=False)[self.index]

    @property
    def tied(self) -> Tensor:
        """Says which rollouts are in a group whose rewards are all equal, [R] bool."""
        return self.of(self.rewards, "amax") == self.of(self.rewards, "amin")

    def centred(self) -> Tensor:
        """Returns the rewards less the group's mean, exactly 0 where they are all equal."""
        return torch.where(self.tied, 0.0, self.rewards - self.of(self.rewards, "mean"))

    def std(self, kind: str = "sample") -> Tensor:
        """Returns the standard deviation within the group, by n - 1 ("sample") or n
        ("population"); 0 in a group of one."""
        n = self.size - 1 if kind == "sample" else self.size
        return (self.of(self.centred().square(), "sum") / n.clamp(min=1)).sqrt()

    def std_of_all(self, kind: str = "sample") -> Tensor:
        """Returns the standard deviation of all rewards, a scalar; `kind` as of `std`."""
        n = len(self.rewards) - 1 if kind == "sample" else len(self.rewards)
        return ((self.rewards - self.rewards.mean()).square().sum() / max(1, n)).sqrt()


ADV_MODES = {  # the levels of mean and std, see levels_advantages
    "group": ("group", "group"),
    "group_mean": ("group", "none"),
    "group_batch": ("group", "batch"),
    "none": ("none", "none"),
}
KINDS = ("sample", "population")  # of a std


def shape_rewards(rewards: Tensor, config: PPOActorConfig) -> Tensor:
    """Returns (r + bias) * scaling, within +-reward_clip if it is set: [B] -> [B] float32.

    >>> shape_rewards(torch.tensor([0.0, 1.0]), PPOActorConfig(reward_bias=-0.5, reward_scaling=2))
    tensor([-1.,  1.])
    """
    within = rewards.double().clamp(*config.reward_limits)
    return ((within + config.reward_bias) * config.reward_scaling).float()


def grpo_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    mode: str = "group",
    eps: float = 1e-6,
    std: str = "sample",
) -> Tensor:
    """Returns the advantage of every sequence within its group, [B] float32. Raises ValueError for
    an unknown mode, or shapes that are not [B].

    mode: "group"        (r - mean) / (std + eps)                    (GRPO, arXiv 2402.03300)
          "group_mean"   r - mean: no division, so easy and hard prompts weigh the same
                         (Dr. GRPO, arXiv 2503.20783)
          "group_batch"  (r - mean) / (std of all r + eps)            (arXiv 2508.08221)
          "none"         r
    std: "sample" divides by n - 1, "population" by n.
    A group of one, and a group whose rewards are all equal, says nothing about which sample is
    better: its advantages are exactly 0 (not rounding noise divided by eps).
    Groups are found by id; they may have any size and stand in any order.

    >>> r, g = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0]), torch.tensor([0, 0, 0, 1, 1])
    >>> grpo_advantages(r, g)
    tensor([ 1.1547, -0.5773, -0.5773,  0.7071, -0.7071])
    >>> grpo_advantages(r, g, std="population")
    tensor([ 1.4142, -0.7071, -0.7071,  1.0000, -1.0000])
    >>> grpo_advantages(r, g, "group_mean")
    tensor([ 0.6667, -0.3333, -0.3333,  0.5000, -0.5000])
    >>> grpo_advantages(r, g, "group_batch")
    tensor([ 1.2172, -0.6086, -0.6086,  0.9129, -0.9129])
    """
    if mode not in ADV_MODES:
        raise ValueError(f"adv_norm={mode!r}: use one of {', '.join(ADV_MODES)}")
    mean, of = ADV_MODES[mode]
    return levels_advantages(rewards, group_ids, mean, of, kind=std, eps=eps)


MEANS, STDS = ("group", "leave_one_out", "batch", "none"), ("group", "batch", "none")


def levels_advantages(
    rewards: Tensor, group_ids: Tensor, mean: str, std: str, kind: str = "sample", eps: float = 1e-6
) -> Tensor:
    """Returns (r_i - mean) / (std + eps). arXiv 2508.08221 compares the levels. mean: of the
    "group", of the group's other rewards ("leave_one_out"), of the "batch", or "none". std: of the
    "group", of the "batch", or "none", which divides by nothing. kind: of the std, "sample" (n - 1)
    or "population" (n). With the std of the group, a group of equal rewards has 0.

    >>> r, g = torch.tensor([2.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    >>> levels_advantages(r, g, "leave_one_out", "none").tolist()
    [2.0, -2.0, 0.0, 0.0]
    >>> [round(a, 3) for a in levels_advantages(r, g, "batch", "batch", "population").tolist()]
    [1.414, -1.414, 0.0, 0.0]
    """
    groups = Groups(rewards, group_ids)
    if mean == "leave_one_out":
        x = groups.centred() * groups.size / (groups.size - 1).clamp(min=1)
    elif mean == "group":
        x = groups.centred()
    else:
        x = groups.rewards - (groups.rewards.mean() if mean == "batch" else 0.0)
    if std == "group":
        return torch.where(groups.tied, 0.0, x / (groups.std(kind) + eps)).float()
    if std == "batch":
        x = x / (groups.std_of_all(kind) + eps)
    return x.float()


def group(config: PPOActorConfig, *, kind: str = "sample") -> AdvantageSpec:
    """Returns `grpo_advantages` by the mode config.adv_norm, with that kind of std, or "batch":
    whitened rewards. Raises ValueError for an unknown kind."""
    if kind not in KINDS:
        raise ValueError(f"actor.advantages.options.kind={kind!r}: use one of {', '.join(KINDS)}")
    whitens = config.adv_norm == "batch"
    mode = "none" if whitens else config.adv_norm
    return AdvantageSpec(
        per_sample=lambda b: grpo_advantages(b["rewards"], b["group_ids"], mode, std=kind),
        whiten=whitens,
        needs_groups=mode != "none",
    )


def levels(
    config: PPOActorConfig, *, mean: str = "group", std: str = "batch", kind: str = "sample"
) -> AdvantageSpec:
    """Returns `levels_advantages`. Raises ValueError for a level or a kind that is not one."""
    for name, value, choices in (("mean", mean, MEANS), ("std", std, STDS), ("kind", kind, KINDS)):
        if value not in choices:
            raise ValueError(
                f"actor.advantages.options.{name}={value!r}: use one of {', '.join(choices)}"
            )
    return AdvantageSpec(
        per_sample=lambda b: levels_advantages(b["rewards"], b["group_ids"], mean, std, kind),
        needs_groups=True,
    )


def spread_over_tokens(advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """Returns the sequence's advantage at every trained token, 0 elsewhere: [b] -> [b,S].

    >>> from megarl.algos.example import mask
    >>> spread_over_tokens(torch.tensor([1.0, 2.0]), mask)
    tensor([[0., 1., 1., 1.],
            [0., 2., 2., 0.]])
    """
    return advantages[:, None].float() * loss_mask


def place_rewards(rewards: Tensor, loss_mask: Tensor) -> Tensor:
    """Returns the outcome as the reward of the sequence's last trained token: [b] -> [b,S].

    >>> from megarl.algos.example import mask
    >>> place_rewards(torch.tensor([1.0, 2.0]), mask)
    tensor([[0., 0., 0., 1.],
            [0., 0., 2., 0.]])
    """
    mask = loss_mask.bool()
    last = mask & (mask.long().flip(1).cumsum(1).flip(1) == 1)
    return rewards[:, None].float() * last


def gae(
    token_rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    *,
    last_value: Tensor,
    discount: float = 1.0,
    gae_lambda: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """Returns the generalized advantage estimation (Schulman et al., arXiv 1506.02438, eq. 16), and
    the returns A_t + v_t that the critic learns; both [b,S] float32, 0 where no token is trained.

    token_rewards [b,S]: what writing x_t earned. values [b,S]: v(state before x_t). last_value [b]:
    v(state after the last token) of episodes that were cut, 0 of those that ended. gae_lambda: one
    for all, or [b,1].

    An episode's steps are its trained tokens t_1 < t_2 < ...; what stands between them (a tool's
    answer, the user's next turn) is the environment's transition and takes no time:
      delta_k = r_k + discount * v(t_{k+1}) - v(t_k),   A_k = delta_k + discount*lambda * A_{k+1}
    A reward at a token the policy did not write belongs to the trained token before it.

    >>> from megarl.algos.example import mask, values
    >>> earned = place_rewards(torch.tensor([1.0, 2.0]), mask)
    >>> made = gae(earned, values, mask, last_value=torch.zeros(2), gae_lambda=0.5)
    >>> made[0]
    tensor([[0.0000, 0.2500, 0.5000, 0.0000],
            [0.0000, 0.0000, 2.0000, 0.0000]])
    >>> made[1]
    tensor([[0.0000, 0.7500, 1.0000, 1.0000],
            [0.0000, 1.0000, 2.0000, 0.0000]])
    """
    mask = loss_mask.bool()
    n, width = mask.sum(1, keepdim=True), mask.shape[1]
    step = mask.long().cumsum(1) - 1  # [b,S] the step a position belongs to, -1 before the first
    place = trained_first(mask)
    steps = torch.arange(width) < n
    earned = token_rewards.double().where(step >= 0, 0.0)
    r = torch.zeros_like(earned).scatter_add(1, step.clamp(min=0), earned)
    first = torch.zeros_like(earned).scatter(1, place, values.double())
    v = F.pad(first.where(steps, 0.0), (0, 1))
    v = v.scatter(1, n, last_value.double()[:, None])  # the state after the last step
    delta = (r + discount * v[:, 1:] - v[:, :-1]).where(steps, 0.0)
    advantages = discounted_sums(delta, discount * gae_lambda).gather(1, place)
    return advantages.float(), (advantages + values).where(mask, 0.0).float()


def trained_first(mask: Tensor) -> Tensor:
    """Returns where each position goes, [b,S], so that trained tokens (mask [b,S] bool) come first
    in a row, one step after another, and then the others.

    >>> trained_first(torch.tensor([[False, True, False, True]]))
    tensor([[2, 0, 3, 1]])
    """
    step = mask.long().cumsum(1) - 1
    return torch.where(mask, step, mask.sum(1, keepdim=True) + (~mask).long().cumsum(1) - 1)


def length_lambda(loss_mask: Tensor, alpha: float) -> Tensor:
    """Returns lambda = 1 - 1 / (alpha l) for each episode of l trained tokens, at least 0: [b,S] ->
    [b,1] float64. The weights of GAE's terms then reach as far as a fixed share of the answer
    (length-adaptive GAE; VAPO, arXiv 2504.05118).

    >>> from megarl.algos.example import mask
    >>> length_lambda(mask, alpha=1.0).tolist()
    [[0.6666666666666667], [0.5]]
    """
    steps = loss_mask.bool().sum(1, keepdim=True).clamp(min=1)
    return (1.0 - 1.0 / (alpha * steps.double())).clamp(min=0.0)


def discounted_sums(x: Tensor, factor: float | Tensor) -> Tensor:
    """Returns y_t = x_t + factor * y_{t+1} along dim 1 of [b,S], in log2(S) steps instead of S:
    after each step, y_t holds the terms up to twice as far ahead. factor: a number, or [b,1].

    >>> discounted_sums(torch.tensor([[1.0, 0.0, 0.0, 8.0]]), 0.5)
    tensor([[2., 2., 4., 8.]])
    """
    reach = 1
    while reach < x.shape[1]:
        x = x + factor**reach * F.pad(x[:, reach:], (0, reach))
        reach *= 2
    return x


def whiten(batch: Batch, name: str, eps: float = 1e-6) -> Tokens:
    """Returns the field `name` with zero mean and unit std over the trained tokens of the whole
    batch; 0 elsewhere, and everywhere if fewer than two tokens are trained. Collective.
    """
    count, mean, squares = moments(batch, lambda part: part[name], [name])

    def normed(part: Padded) -> Tensor:
        if count < 2:
            return torch.zeros_like(part[name])
        x = (part[name].double() - mean) / (math.sqrt(squares / (count - 1)) + eps)
        return x.where(part["loss_mask"].bool(), 0.0).float()

    return map_tokens(batch, normed, [name, "loss_mask"])
