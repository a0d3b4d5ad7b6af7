"""Monte-Carlo estimators of the KL divergence from per-token log-probabilities, the KL of a batch
to the reference, and a weight that adapts to it.

J. Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html

b rows at hand of B, S positions, R rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from megarl.algos.advantages import discounted_sums
from megarl.algos.rows import reduce_rows, rollouts_of, total, trained_tokens
from megarl.api.batch import Batch, Padded
from megarl.config.algo import PPOActorConfig

KL_ESTIMATORS = ("k1", "k2", "k3")

# exp(20) = 4.9e8. Beyond it a ratio says nothing more, and exp must not overflow: an infinite value
# in a branch that min/max/where does not take still turns the gradient into NaN (0 * inf).
MAX_LOG_RATIO = 20.0


def safe_exp(log_ratio: Tensor) -> Tensor:
    """Returns exp(log_ratio) with log_ratio bounded above by MAX_LOG_RATIO, any shape."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def kl_estimate(logp_q: Tensor, logp_p: Tensor, kind: str = "k3") -> Tensor:
    """Estimates KL(q || p) per token, at tokens drawn from q, any shape. Raises ValueError for an
    unknown `kind`.

    With log r = log p(x) - log q(x):
      k1 = -log r           unbiased, high variance, may be negative
      k2 = (log r)^2 / 2    biased, always positive
      k3 = r - 1 - log r    unbiased, always positive

    As terms of a loss, differentiated through q, they are different things: the expected gradient
    of k1 is zero, that of k2 is the gradient of KL(q || p), and that of k3 is the gradient of
    KL(p || q).

    >>> from megarl.algos.example import mask, new, ref
    >>> kl_estimate(new, ref, "k1")[mask]
    tensor([-0.0000,  0.9163, -0.6931, -0.0000, -1.3863])
    >>> kl_estimate(new, ref, "k2")[mask]
    tensor([0.0000, 0.4198, 0.2402, 0.0000, 0.9609])
    >>> kl_estimate(new, ref, "k3")[mask]
    tensor([0.0000, 0.3163, 0.3069, 0.0000, 1.6137])
    """
    log_r = logp_p - logp_q
    if kind == "k1":
        return -log_r
    if kind == "k2":
        return 0.5 * torch.square(log_r)
    if kind == "k3":
        # expm1: near r = 1 the plain form loses all its digits, and its sign
        return log_r.clamp(max=MAX_LOG_RATIO).expm1() - log_r
    raise ValueError(f"KL estimator {kind!r}: use one of {', '.join(KL_ESTIMATORS)}")


KL_TERMS = (*KL_ESTIMATORS, "k1+", "k3+", "k3-weighted")


def kl_term(logp: Tensor, ref: Tensor, old: Tensor, kind: str = "k3") -> Tensor:
    """Returns KL(policy || reference) per token as a term of a loss over logp, which has gradient,
    any shape; tokens were drawn from the policy of `old`. Raises ValueError for an unknown `kind`.

    k1, k2, k3    kl_estimate, differentiated as it is
    k1+, k3+      the value of k1 or k3 with the gradient of k2, which is unbiased on policy
    k3-weighted   u k3 with u = exp(logp - old): value and gradient are unbiased where the
                  tokens come from `old` (DeepSeek-V3.2, arXiv 2512.02556, sec. 3.1)

    >>> from megarl.algos.example import mask, new, old, ref
    >>> kl_term(new, ref, old, "k3-weighted")[mask]
    tensor([0.0000, 0.4744, 0.2301, 0.0000, 0.4034])
    """
    if kind not in KL_TERMS:
        raise ValueError(f"KL estimator {kind!r}: use one of {', '.join(KL_TERMS)}")
    if kind == "k3-weighted":
        return safe_exp(logp - old) * kl_estimate(logp, ref, "k3")
    if not kind.endswith("+"):
        return kl_estimate(logp, ref, kind)
    slope = kl_estimate(logp, ref, "k2")
    return slope - slope.detach() + kl_estimate(logp.detach(), ref, kind[:-1])


MAX_ERROR = 0.2  # of the KL to its target, as a fraction: how strongly one step can count


def adapted(coef: float, kl: float, *, target: float, rate: float) -> float:
    """Returns the coefficient after a step whose KL was `kl`: coef (1 + rate e) with e =
    clip(kl / target - 1, -0.2, 0.2) (Ziegler et al., arXiv 1909.08593, sec. 2.2).

    rate: K of the paper, at most 1.

    >>> [round(adapted(0.1, kl, target=6.0, rate=0.1), 5) for kl in (3.0, 6.0, 6.6, 60.0)]
    [0.098, 0.1, 0.101, 0.102]
    """
    error = min(max(kl / target - 1.0, -MAX_ERROR), MAX_ERROR)
    return coef * (1.0 + min(rate, 1.0) * error)


@dataclass(frozen=True, kw_only=True)
class KLTarget:
    """Says how the weights of the KL to the reference follow it: after each step they are
    multiplied as in `adapted`.

    target: KL to the reference that is aimed at, in nats.
    horizon: rollouts in which a weight changes by at most a fifth.
    per: the KL is the mean over trained tokens, or over rollouts of their sums, which grows with
        the answers.
    """

    target: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    horizon: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10000.0
    per: Literal["token", "rollout"] = "token"


class KLController:
    """Holds the factor by which a run has changed its weights of the KL, that in the loss
    (`actor.kl_coef`) and that in the reward (`kl_ctl`): 1 unless `actor.kl_controller` adapts it.
    """

    def __init__(self, config: PPOActorConfig) -> None:
        self.config, self.scale = config, 1.0
        self._target = None if config.kl_controller is None else KLTarget(**config.kl_controller)
        self._in_reward = 0.0

    def in_reward(self, kl_ctl: float) -> float:
        """Returns the weight of the KL in the reward for this step, of which `kl_ctl` is the
        first."""
        self._in_reward = self.scale * kl_ctl
        return self._in_reward

    def after_update(self, batch: Batch) -> dict[str, float]:
        """Adapts the factor to the KL of a batch before its update, estimated by k1 over the
        trained tokens; returns the weights that the step had ("kl_coef", "kl_ctl"), where they are
        not 0, and that KL ("kl_observed"). Raises KeyError without ref_logp. Collective."""
        used = {"kl_coef": self.scale * self.config.kl_coef, "kl_ctl": self._in_reward}
        metrics = {name: weight for name, weight in used.items() if weight}
        how = self._target
        if how is None or self.config.old_logp not in batch:  # of a refused update nothing is known
            return metrics
        rollouts = len(rollouts_of(batch))
        count = rollouts if how.per == "rollout" else total(trained_tokens(batch))
        kl = total(kl_of_rows(batch, self.config.old_logp)) / max(1.0, count)
        self.scale = adapted(self.scale, kl, target=how.target, rate=rollouts / how.horizon)
        return metrics | {"kl_observed": kl}

    def state_dict(self) -> dict[str, float]:
        """Returns what a checkpoint keeps."""
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continues from what `state_dict` returned. Without kl_controller the factor stays 1: the
        weights are then what the configuration says."""
        if self._target is not None:
            self.scale = state["scale"]


def kl_of_rows(batch: Batch, old_logp: str) -> Tensor:
    """Returns the KL to the reference (k1 of the field `old_logp` and ref_logp) summed over each
    row's trained tokens, [B] float64. Collective."""

    def column(part: Padded) -> list[Tensor]:
        kl = kl_estimate(part[old_logp], part["ref_logp"], "k1")
        return [kl.where(part["loss_mask"].bool(), 0.0)]

    return reduce_rows(batch, column, [old_logp, "ref_logp", "loss_mask"])[:, 0]


def kl_to_go(part: Padded, old_logp: str) -> Tensor:
    """Returns the KL to the reference from each trained token on, [b,S]; 0 at others."""
    mask = part["loss_mask"].bool()
    kl = kl_estimate(part[old_logp], part["ref_logp"], "k1").where(mask, 0.0)
    return discounted_sums(kl.double(), 1.0).float().where(mask, 0.0)
