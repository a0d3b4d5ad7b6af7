"""The loss of a policy: importance ratio x surrogate x correction + KL - entropy, aggregated.

Each part is a small function of its own (ratios, surrogates, correction, kl, aggregation), chosen
by the actor's section; docs/algorithms.md says which choices are which published algorithm.
b sequences of a micro-batch, S positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megarl.algos.aggregation import (
    LOSS_WEIGHTS,
    Stats,
    aggregate,
    aggregation_needs,
    token_means,
    weight_of,
)
from megarl.algos.correction import Correction
from megarl.algos.kl import kl_estimate, kl_term, safe_exp
from megarl.algos.proximal import interpolated
from megarl.algos.ratios import RATIOS
from megarl.algos.specs import LossSpec, Metrics, Surrogate, SurrogateFn, surrogate_of
from megarl.algos.surrogates import Clip
from megarl.api.batch import Padded
from megarl.config.algo import PPOActorConfig


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """Sums the loss of a policy, and its figures; weight: `LOSS_WEIGHTS[loss_agg]`.

    outputs: logprobs [b,S] with gradient, optionally entropy [b,S].
    batch: loss_mask, advantages, logprobs (behaviour policy), `old_logp`, with kl_coef ref_logp.

    interpolates: the ratio starts from proximal.interpolated logprobs; old_logp are the behaviour
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
