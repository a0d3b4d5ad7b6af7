"""The loss of a policy: importance ratio x surrogate x correction + KL - entropy, aggregated.

Each part is a small function of its own (surrogates.py, kl.py, losses.py, and here the correction),
chosen by the actor's section; docs/algorithms.md says which choices are which published algorithm.
b sequences of a micro-batch, S positions.

A correction weighs tokens that another policy wrote: an older one, or the same one as a server
rounds it. w_t = exp(old_t - behaviour_t), where `old` is the proximal policy, which the trainer
computed, and `behaviour` what the server reported. [b,S], n trained tokens in a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from megarl.algos.batches import interpolated
from megarl.algos.kl import kl_estimate, kl_term, safe_exp
from megarl.algos.losses import (
    LOSS_WEIGHTS,
    Stats,
    aggregate,
    aggregation_needs,
    token_means,
    weight_of,
)
from megarl.algos.specs import LossSpec, Metrics, Surrogate, SurrogateFn, surrogate_of
from megarl.algos.surrogates import RATIOS, Clip, row_mean
from megarl.api.batch import Padded
from megarl.config.algo import PPOActorConfig

Level = Literal["token", "sequence", "geometric", "none"]


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Multiplies the loss of a token by a bounded weight, and drops tokens or rows that are too far
    from the policy that trains.

    weight: "token", w_t (decoupled PPO, AReaL, arXiv 2505.24298); "sequence", the product of w over
    the row, which is unbiased and of high variance; "geometric", their geometric mean; "none", 1.
    weight_cap: the weight is at most this (truncated importance sampling, arXiv 1802.01561).
    mask: what is dropped below `mask_low` or above `mask_high`: "token", by w_t; a whole row by
    the product of its w ("sequence") or by their geometric mean ("geometric"); "none".
    veto: drops a row of which one token has w_t below it.

    A dropped token gives no gradient. It stays in the mean's denominator, which must not depend on
    the model.

    >>> from megarl.algos.example import behaviour, mask, old
    >>> weight, _ = Correction(weight="token", weight_cap=1.5).of_tokens(old, behaviour, mask)
    >>> weight[mask]
    tensor([1.0000, 1.5000, 0.8000, 0.5000, 1.0000])
    >>> _, dropped = Correction(mask="geometric", mask_low=0.9).of_tokens(old, behaviour, mask)
    >>> dropped[mask]
    tensor([False, False, False,  True,  True])
    >>> _, dropped = Correction(veto=0.6).of_tokens(old, behaviour, mask)
    >>> dropped[mask]
    tensor([False, False, False,  True,  True])
    """

    weight: Level = "token"
    weight_cap: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    mask: Level = "none"
    mask_low: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    mask_high: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    veto: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def __post_init__(self) -> None:
        if self.mask == "none" and (self.mask_low or self.mask_high is not None):
            raise ValueError("mask_low and mask_high bound nothing with mask=none; set mask")
        if self.weight == "none" and self.weight_cap is not None:
            raise ValueError(f"weight_cap={self.weight_cap}: caps nothing with weight=none")

    def of_tokens(self, old: Tensor, behaviour: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights [b,S], without gradient, and which tokens are dropped, [b,S] bool."""
        log_w = torch.where(mask, old - behaviour, 0.0).detach()
        weight = self._at(self.weight, log_w, mask)
        if self.weight_cap is not None:
            weight = weight.clamp(max=self.weight_cap)
        far = torch.zeros_like(mask)
        if self.mask != "none":
            by = self._at(self.mask, log_w, mask)
            high = math.inf if self.mask_high is None else self.mask_high
            far = (by < self.mask_low) | (by > high)
        if self.veto:
            far = far | (log_w < math.log(self.veto)).any(1, keepdim=True)
        return weight, far & mask

    def _at(self, level: str, log_w: Tensor, mask: Tensor) -> Tensor:
        """Returns exp of `log_w` [b,S] at a level, [b,S] or [b,1]."""
        if level == "token":
            return safe_exp(log_w)
        if level == "none":
            return torch.ones_like(log_w)
        of_row = log_w.sum(1) if level == "sequence" else row_mean(log_w, mask)
        return safe_exp(of_row)[:, None].expand_as(log_w)


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """Sums the loss of a policy, and its figures; weight: `LOSS_WEIGHTS[loss_agg]`.

    outputs: logprobs [b,S] with gradient, optionally entropy [b,S].
    batch: loss_mask, advantages, logprobs (behaviour policy), `old_logp`, with kl_coef ref_logp.

    interpolates: the ratio starts from batches.interpolated logprobs; old_logp are the behaviour
    policy's, and the field prox_share [b,S] says how far from these.
    ratio: a name of RATIOS. surrogate: see surrogates.py. correction: None is none.
    kl_coef: adds kl_coef * KL(policy || reference) per token (GRPO, arXiv 2402.03300, eq. 3), by
    `kl_estimator` (kl.kl_term); with kl_adapts, times the field kl_scale [b].
    entropy_coef: subtracts entropy_coef * entropy per token.
    scale: multiplies the loss (1 / actor.loss_agg_length).

    >>> from megarl.algos.example import batch, new
    >>> PolicyLoss()({"logprobs": new}, batch)[0]
    tensor(2.6500)
    >>> PolicyLoss(kl_coef=0.1, loss_agg="sequence-mean")({"logprobs": new}, batch)[0]
    tensor(1.9181)
    """

    old_logp: str = "prox_logp"
    interpolates: bool = False
    ratio: str = "token"
    surrogate: SurrogateFn = field(default_factory=Clip)
    correction: Correction | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_adapts: bool = False
    entropy_coef: float = 0.0
    loss_agg: str = "token-mean"
    scale: float = 1.0

    def __call__(self, outputs: Padded, batch: Padded) -> tuple[Tensor, Stats]:
        """Returns the summed loss, and {figure: (sum, weight)}."""
        mask, old = batch["loss_mask"].bool(), batch[self.old_logp]
        if self.interpolates:
            old = interpolated(outputs["logprobs"], old, batch["prox_share"])
        # where nothing is trained, anything may stand, and its gradient must not come through
        logp, adv = (torch.where(mask, x, 0.0) for x in (outputs["logprobs"], batch["advantages"]))
        found = self.surrogate(RATIOS[self.ratio](logp, old, mask), adv, logp, mask)
        loss, dropped = found.loss, torch.zeros_like(mask)
        if self.correction is not None:
            weight, dropped = self.correction.of_tokens(old, batch["logprobs"], mask)
            loss = torch.where(dropped, 0.0, loss * weight)
        pg_sum = total = self.scale * aggregate(loss, batch, self.loss_agg)
        stats = policy_stats(outputs, batch, old, surrogate=found, dropped=dropped)
        stats["pg_loss"] = (pg_sum.detach(), weight_of(batch, self.loss_agg))
        if self.entropy_coef:
            bonus = aggregate(outputs["entropy"], batch, self.loss_agg)
            total = total - self.scale * self.entropy_coef * bonus
        if self.kl_coef:
            kl = kl_term(logp, batch["ref_logp"], old, self.kl_estimator)
            if self.kl_adapts:
                kl = kl * batch["kl_scale"][:, None]
            total = total + self.scale * self.kl_coef * aggregate(kl, batch, self.loss_agg)
        return total, stats


def policy(config: PPOActorConfig) -> LossSpec:
    """Returns the PolicyLoss of the settings of the actor's section."""
    adapts = config.kl_coef > 0 and config.kl_controller is not None
    surrogate, old_logp = surrogate_of(config), config.old_logp
    loss = PolicyLoss(
        old_logp=old_logp,
        interpolates=config.recompute_logprob == "interpolate",
        ratio=config.ratio,
        surrogate=surrogate,
        correction=None if config.correction is None else Correction(**config.correction),
        kl_coef=config.kl_coef,
        kl_estimator=config.kl_estimator,
        kl_adapts=adapts,
        entropy_coef=config.entropy_coef,
        loss_agg=config.loss_agg,
        scale=1.0 / config.loss_agg_length,
    )
    return LossSpec(
        fn=loss,
        weight=LOSS_WEIGHTS[config.loss_agg],
        outputs=("logprobs", "entropy"),
        needs=(
            *("logprobs", "advantages", old_logp),
            *(["prox_share"] if loss.interpolates else []),
            *(["ref_logp"] if config.kl_coef else []),
            *(["kl_scale"] if adapts else []),
            *aggregation_needs(config.loss_agg),
        ),
        uses=("ref_logp",),
        derive=derived_policy_stats,
        own_prox=True,
    )


def derived_policy_stats(mean: Metrics, first: Metrics) -> Metrics:
    """Returns what LossSpec.derive makes of policy_stats: adds the ratio's deviation at the first
    step, its root mean square and the effective sample size."""
    rest = {k: v for k, v in mean.items() if k not in ("ratio_sq_dev", "behav_imp_weight_sq")}
    square = mean["behav_imp_weight_sq"]
    return rest | {
        "first_ratio_abs_dev": first["ratio_abs_dev"],
        "ratio_rms_dev": math.sqrt(mean["ratio_sq_dev"]),
        # Kish's effective sample size, as a fraction of the tokens
        "behav_ess": mean["behav_imp_weight"] ** 2 / square if square else 0.0,
    }


@torch.no_grad()
def policy_stats(
    outputs: Padded,
    batch: Padded,
    old_logp: str | Tensor,
    *,
    surrogate: Surrogate | None = None,
    dropped: Tensor | None = None,
) -> Stats:
    """Returns the figures of a policy's update, as means over trained tokens; any loss can add them
    to its own, with derived_policy_stats as its LossSpec.derive.

    outputs: logprobs [b,S], optionally entropy [b,S]. batch: loss_mask, advantages, logprobs
    (behaviour policy), optionally ref_logp. old_logp: the field of the logprobs that the ratio
    starts from, or they themselves [b,S]. surrogate: has the ratio and the tokens that a bound
    acted on, which clip_frac counts; None is the ratio to `old_logp`, without bounds.
    dropped: tokens that a correction left out, [b,S] bool.

    approx_kl is the k3 estimate of KL(behaviour || policy) (tokens were drawn from the behaviour
    policy). behav_imp_weight is exp(old - behaviour): who wrote the token against the policy the
    ratio starts from.
    """
    mask, behav = batch["loss_mask"].bool(), batch["logprobs"]
    old = batch[old_logp] if isinstance(old_logp, str) else old_logp
    logp, none = torch.where(mask, outputs["logprobs"], 0.0), torch.zeros_like(mask)
    if surrogate is None:
        surrogate = Surrogate(none.float(), safe_exp(torch.where(mask, logp - old, 0.0)))
    low, high, dual = (surrogate.bounded.get(name, none) for name in ("low", "high", "dual"))
    weight, ratio = safe_exp(torch.where(mask, old - behav, 0.0)), surrogate.ratio
    figures = {
        "logp": logp,
        "advantage": batch["advantages"],
        "ratio": ratio,
        "ratio_abs_dev": (ratio - 1.0).abs(),
        "ratio_sq_dev": (ratio - 1.0).square(),
        "approx_kl": kl_estimate(behav, logp, "k3"),
        "approx_kl_k1": kl_estimate(behav, logp, "k1"),
        "clip_frac": low | high | dual,
        "clip_frac_low": low,
        "clip_frac_high": high,
        "clip_frac_dual": dual,
        "behav_imp_weight": weight,
        "behav_imp_weight_sq": weight.square(),
        "behav_dropped_frac": none if dropped is None else dropped,
    }
    if "entropy" in outputs:
        figures["entropy"] = outputs["entropy"]
    if "ref_logp" in batch:
        figures["kl_ref"] = kl_estimate(logp, batch["ref_logp"], "k3")
    return token_means(figures, mask)
