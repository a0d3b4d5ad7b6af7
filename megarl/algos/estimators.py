"""Published ways to turn the rewards of a batch into advantages, beside GRPO's (advantages.py).

Each is a pure function of rewards and group_ids, both [R], one number a rollout, and returns [R]
float32; below them are the functions that `actor.advantages` names. In a group of one, and where
all rewards are equal, nothing says which sample is better: there the group estimators give exactly
0. r_i is a reward, n the group's size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megarl.algos.advantages import Groups, grpo_advantages, levels_advantages, shape_rewards
from megarl.algos.batches import need
from megarl.algos.specs import AdvantageSpec
from megarl.api.tokens import REWARD_PART
from megarl.config.algo import PPOActorConfig


def rloo_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Returns r_i less the mean of the group's other rewards (RLOO, arXiv 2402.14740).

    >>> r, g = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    >>> rloo_advantages(r, g).tolist()
    [1.0, -0.5, -0.5, 0.0, 0.0, 0.0]
    """
    return levels_advantages(rewards, group_ids, "leave_one_out", "none")


def opo_advantages(rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    """Returns r_i less the group's mean weighted by `lengths` [R], the trained tokens: the baseline
    of least variance on policy (OPO, arXiv 2505.23585).

    >>> r, g, n = torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([1, 3])
    >>> opo_advantages(r, g, n).tolist()
    [0.75, -0.25]
    """
    groups, weight = Groups(rewards, group_ids), lengths.double()
    baseline = groups.of(weight * groups.rewards, "sum") / groups.of(weight, "sum").clamp(min=1)
    return torch.where(groups.tied, 0.0, groups.rewards - baseline).float()


def pass_at_k_advantages(
    rewards: Tensor, group_ids: Tensor, k: int, threshold: float = 0.0
) -> Tensor:
    """Returns the advantages of answers drawn k at a time, where a draw earns 1 if one of its
    answers is right (r > threshold), in closed form (Pass@k training, arXiv 2508.10751, sec. 2.4).
    With N answers of which N_w are wrong, R = 1 - C(N_w, k) / C(N, k) and s = sqrt(R (1 - R)):
      right  (1 - R) / s        wrong  (1 - R - C(N_w - 1, k - 1) / C(N - 1, k - 1)) / s
    0 where s is 0. Raises ValueError for a group smaller than k.

    >>> r, g = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.long)
    >>> [round(a, 4) for a in pass_at_k_advantages(r, g, k=2).tolist()]
    [1.0, -0.3333, -0.3333, -0.3333]
    """
    groups = Groups(rewards, group_ids)
    n, right = groups.size, groups.rewards > threshold
    if (n < k).any():
        raise ValueError(
            f"pass_at_k: k={k}, and a group has {int(n.min())} samples; lower k or raise "
            "gconfig.n_samples"
        )
    wrong = groups.of((~right).double(), "sum")
    fails = _choose_ratio(wrong, n, k)  # C(N_w, k) / C(N, k) = 1 - R
    spread = (fails * (1.0 - fails)).sqrt()
    others = _choose_ratio(wrong - 1, n - 1, k - 1)
    above = torch.where(right, fails, fails - others)
    return torch.where(spread > 0, above / spread.clamp(min=1e-300), 0.0).float()


def _choose_ratio(m: Tensor, n: Tensor, k: int) -> Tensor:
    """Returns C(m, k) / C(n, k), 0 where m < k; product over i < k of (m - i) / (n - i)."""
    ratio = torch.ones_like(m)
    for i in range(k):
        ratio = ratio * (m - i).clamp(min=0) / (n - i).clamp(min=1)
    return ratio


def max_at_k_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Returns, for the best sample of a group, its reward less the second best, 0 for the others:
    what the best of n would lose without it (arXiv 2503.19595, leave-one-out).

    >>> max_at_k_advantages(torch.tensor([0.2, 1.0, 0.5]), torch.tensor([0, 0, 0])).tolist()
    [0.0, 0.5, 0.0]
    """
    groups = Groups(rewards, group_ids)
    best = groups.rewards == groups.of(groups.rewards, "amax")
    below = torch.where(best, -torch.inf, groups.rewards)
    second = groups.of(below, "amax")
    alone = best & (groups.of(best.double(), "sum") == 1) & (groups.size > 1)
    return torch.where(alone, groups.rewards - second, 0.0).float()


def gpg_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Returns alpha (r_i - mean), alpha the number of rollouts over those in groups whose rewards
    differ (GPG, arXiv 2504.02546, eq. 7 with F_norm = 1): groups without a gradient do not shrink
    that of the others.

    >>> r, g = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    >>> gpg_advantages(r, g).tolist()
    [1.0, -1.0, 0.0, 0.0]
    """
    groups = Groups(rewards, group_ids)
    telling = int((~groups.tied).sum())
    return (groups.centred() * len(rewards) / max(1, telling)).float()


def asymre_advantages(rewards: Tensor, group_ids: Tensor, delta: float) -> Tensor:
    """Returns r_i - (mean + delta) (AsymRE, arXiv 2506.20520): a baseline below the mean,
    delta < 0, leans on good answers where samples are off policy.

    >>> asymre_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), delta=-0.5).tolist()
    [1.0, 0.0]
    """
    groups = Groups(rewards, group_ids)
    return (groups.rewards - groups.of(groups.rewards, "mean") - delta).float()


def gdpo_advantages(
    parts: Tensor, weights: Sequence[float], group_ids: Tensor, batch: bool, eps: float = 1e-6
) -> Tensor:
    """Returns s / (std of all s + eps), where s adds up K rewards, each normalised within its group
    as by `grpo_advantages` and times its weight (GDPO, arXiv 2601.05242). With batch=False it is s:
    then one reward of weight 1 is GRPO to the bit, which the std of all scales by a factor.

    parts: [K,R], NaN where a rollout has no such reward: it is in no mean and no std of that reward
    and gets nothing of it; one without any has 0. The mean of s is 0, as that of each group, and so
    it is not subtracted: groups whose rewards are equal have exactly 0.

    >>> parts, g = torch.tensor([[1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]), torch.zeros(4)
    >>> gdpo_advantages(parts, [1.0, 1.0], g, batch=True)
    tensor([ 1.3321, -0.7691,  0.2061, -0.7691])
    >>> gdpo_advantages(parts[:1], [1.0], g, batch=False)
    tensor([ 0.8660, -0.8660,  0.8660, -0.8660])
    """
    s, has = torch.zeros(len(group_ids), dtype=torch.float64), ~parts.isnan()
    for values, weight, own in zip(parts, weights, has, strict=True):
        s[own] += weight * grpo_advantages(values[own], group_ids[own], eps=eps)
    if batch:
        s /= Groups(s[has.any(0)], group_ids[has.any(0)]).std_of_all() + eps
    return s.float()


# ---- by the actor's section, as `actor.advantages` names them ----------------------------------


def rloo(config: PPOActorConfig) -> AdvantageSpec:
    """Returns `rloo_advantages`."""
    return _by_group(rloo_advantages)


def opo(config: PPOActorConfig) -> AdvantageSpec:
    """Returns `opo_advantages`."""

    def per_sample(batch: dict[str, Tensor]) -> Tensor:
        return opo_advantages(batch["rewards"], batch["group_ids"], batch["trained_tokens"])

    return AdvantageSpec(per_sample=per_sample, needs_groups=True)


def gdpo(
    config: PPOActorConfig, *, parts: dict[str, Any], batch: bool | None = None
) -> AdvantageSpec:
    """Returns `gdpo_advantages`. parts: by the name of a part of the reward its weight, or what the
    reward `weighted` says of it. The reward itself, and what shapes it, is not read; with kl_ctl
    the KL to the reference is taken from each token's advantage. A part that no sample of a batch
    has is left out of it. Raises ValueError for a weight that is no number.

    batch: whether the std of all divides (TRL: always); None: with two parts or more, as in the
    authors' code (NVlabs/GDPO). One part is then `grpo_advantages` of the part times its weight."""
    weights = [_weight_of_part(name, part) for name, part in parts.items()]
    names = [f"{REWARD_PART}{name}" for name in parts]

    def per_sample(samples: dict[str, Tensor]) -> Tensor:
        if not any(name in samples for name in names):
            need(samples, names, what="actor.advantages=gdpo")
        lacking = torch.full(samples["group_ids"].shape, torch.nan)
        rewards = torch.stack([samples.get(name, lacking) for name in names])
        if batch is None and len(names) == 1:  # rounded as the reward that has no other part
            rewards = (rewards.double() * weights[0]).float()
            return gdpo_advantages(rewards, [1.0], samples["group_ids"], batch=False)
        return gdpo_advantages(rewards, weights, samples["group_ids"], batch is not False)

    return AdvantageSpec(per_sample=per_sample, kl_to_go=True, needs_groups=True)


def _weight_of_part(name: str, part: Any) -> float:
    if isinstance(part, str) and part[:1].isalpha():
        return 1.0  # a reward's name
    section = part if isinstance(part, dict) else {"weight": part}
    weight = section.get("weight", 1.0)
    number = type(weight) in (int, float) and math.isfinite(weight)
    if not number or section.keys() - {"type", "options", "weight"}:
        raise ValueError(
            f"actor.advantages.options.parts.{name}={part!r}: use a number, or what "
            "train_dataset.reward of type weighted says of the part"
        )
    return float(weight)


def pass_at_k(config: PPOActorConfig, *, k: int, threshold: float = 0.0) -> AdvantageSpec:
    """Returns `pass_at_k_advantages`. threshold: a shaped reward above it is a right answer. Raises
    ValueError for k < 1."""
    if k < 1:
        raise ValueError(f"actor.advantages.options.k={k}: draw at least one answer")
    return _by_group(partial(pass_at_k_advantages, k=k, threshold=threshold))


def max_at_k(config: PPOActorConfig) -> AdvantageSpec:
    """Returns `max_at_k_advantages`; k is the group's size."""
    return _by_group(max_at_k_advantages)


def gpg(config: PPOActorConfig) -> AdvantageSpec:
    """Returns `gpg_advantages`."""
    return _by_group(gpg_advantages)


def asymre(config: PPOActorConfig, *, delta: float = -0.1) -> AdvantageSpec:
    """Returns `asymre_advantages`; the default is the paper's for language models (section 5.2)."""
    return _by_group(partial(asymre_advantages, delta=delta))


def remax(config: PPOActorConfig) -> AdvantageSpec:
    """Returns ReMax (arXiv 2310.10505): the reward less that of the greedy answer to the
    same prompt, which RLVRWorkflow brings with greedy_baseline."""

    def per_sample(batch: dict[str, Tensor]) -> Tensor:
        if "baseline" not in batch:
            raise ValueError(
                "actor.advantages=remax: the batch has no 'baseline'; set "
                "rollout.workflow.options.greedy_baseline=true, or have the workflow bring it"
            )
        return batch["rewards"] - shape_rewards(batch["baseline"], config)

    return AdvantageSpec(per_sample=per_sample)


def reinforce_pp(config: PPOActorConfig, *, baseline: str = "none") -> AdvantageSpec:
    """Returns REINFORCE++ (arXiv 2501.03262): the reward to go, with kl_ctl less the KL to the
    reference of the tokens that follow, whitened over the batch.

    baseline: "group" takes the group's mean from rewards first (REINFORCE++ with baseline). Raises
    ValueError for another.
    """
    if baseline not in ("none", "group"):
        raise ValueError(
            f"actor.advantages.options.baseline={baseline!r}: use none, or group (the group's mean)"
        )

    def per_sample(batch: dict[str, Tensor]) -> Tensor:
        if baseline == "none":
            return batch["rewards"].float()
        return Groups(batch["rewards"], batch["group_ids"]).centred().float()

    return AdvantageSpec(
        per_sample=per_sample, kl_to_go=True, whiten=True, needs_groups=baseline == "group"
    )


def _by_group(fn: Callable[[Tensor, Tensor], Tensor]) -> AdvantageSpec:
    return AdvantageSpec(
        per_sample=lambda batch: fn(batch["rewards"], batch["group_ids"]), needs_groups=True
    )
