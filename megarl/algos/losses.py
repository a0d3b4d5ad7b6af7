"""Losses over per-token log-probabilities or values, in the engine's contract.

`loss_fn(outputs, batch) -> (loss_sum, stats)`: tensors are padded [b,S], loss_sum is a scalar sum
with gradient, stats maps a name to (sum, weight), both detached scalars. The engine adds sums and
weights over the whole batch before it divides, so no metric depends on how the batch was cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megarl.algos.kl import kl_estimate, safe_exp
from megarl.algos.specs import LossSpec, Metrics
from megarl.api.batch import Padded
from megarl.config.algo import PPOActorConfig

Stats = dict[str, tuple[Tensor, Tensor]]


def token_weight(batch: Padded) -> float:
    """Counts the trained tokens of loss_mask [b,S]."""
    return float(batch["loss_mask"].sum())


def sequence_weight(batch: Padded) -> float:
    """Counts the sequences of loss_mask [b,S] with at least one trained token."""
    return float(batch["loss_mask"].bool().any(1).sum())


def rollout_weight(batch: Padded) -> float:
    """Counts the rollouts of loss_mask [b,S] by the share of each rollout's trained tokens
    (rollout_tokens [b]) that a row has, so that the rows of one add up to 1."""
    return float(_denominator(batch, "rollout-mean"))


LOSS_WEIGHTS: dict[str, Callable[[Padded], float]] = {
    "token-mean": token_weight,
    "sequence-mean": sequence_weight,
    "rollout-mean": rollout_weight,
}


def aggregate(per_token: Tensor, batch: Padded, loss_agg: str) -> Tensor:
    """Returns the sum over [b,S] that, divided by LOSS_WEIGHTS[loss_agg], is the wanted mean.
    Raises ValueError for an unknown `loss_agg`.

    token-mean: the sum over trained tokens. sequence-mean: the sum over sequences of the mean over
    their trained tokens, so a long answer counts as much as a short one. rollout-mean: the same
    over rollouts, whose trained tokens (rollout_tokens [b]) may stand in several sequences.
    """
    mask = batch["loss_mask"].bool()
    masked = torch.where(mask, per_token, 0.0)
    if loss_agg == "token-mean":
        return masked.sum()
    if loss_agg == "sequence-mean":
        return (masked.sum(1) / mask.sum(1).clamp(min=1)).sum()
    if loss_agg == "rollout-mean":
        return (masked.sum(1) / batch["rollout_tokens"].clamp(min=1)).sum()
    raise ValueError(f"loss_agg={loss_agg!r}: use one of {', '.join(LOSS_WEIGHTS)}")


def _denominator(batch: Padded, loss_agg: str) -> Tensor:
    """Returns LOSS_WEIGHTS[loss_agg] of the batch as a scalar tensor."""
    mask = batch["loss_mask"].bool()
    if loss_agg == "token-mean":
        return mask.sum()
    if loss_agg == "sequence-mean":
        return mask.any(1).sum()
    return (mask.sum(1).double() / batch["rollout_tokens"].clamp(min=1)).sum()


def sft_loss(outputs: Padded, batch: Padded) -> tuple[Tensor, Stats]:
    """Returns the summed cross entropy of the trained tokens, and stats; weight: `token_weight`.

    With the output "greedy_match" [b,S] (1 where x_t is the argmax) also token_accuracy, and
    exact_match: the fraction of sequences whose every trained token is the argmax, which is what
    greedy decoding would have written.
    """
    mask = batch["loss_mask"].bool()
    loss = -torch.where(mask, outputs["logprobs"], 0.0).sum()
    stats: Stats = {}
    if "greedy_match" in outputs:
        hit = outputs["greedy_match"].detach() > 0.5
        trained = mask.any(1)
        right = (hit | ~mask).all(1) & trained
        stats["token_accuracy"] = ((hit & mask).sum(), mask.sum())
        stats["exact_match"] = (right.sum(), trained.sum())
    return loss, stats


def grpo_loss(
    outputs: Padded,
    batch: Padded,
    *,
    eps_clip: float = 0.2,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
    old_logp: str = "prox_logp",
    decoupled: bool = False,
    behav_imp_weight_cap: float | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    loss_agg: str = "token-mean",
) -> tuple[Tensor, Stats]:
    """Returns the summed clipped policy gradient of PPO/GRPO, and stats; weight:
    `LOSS_WEIGHTS[loss_agg]`.

    outputs: logprobs [b,S] with gradient, optionally entropy [b,S] (a metric only).
    batch: loss_mask, advantages, logprobs (behaviour policy), `old_logp`, with kl_coef ref_logp.

    With u = exp(logp - old) the loss of a token is
      -min(u A, clip(u, 1 - eps_clip, 1 + eps_clip_higher) A)            (PPO, arXiv 1707.06347)
    * eps_clip_higher: asymmetric clip (DAPO, arXiv 2503.14476); None is eps_clip.
    * c_clip > 1: where A < 0 the loss is bounded by -c_clip A (dual clip, arXiv 1912.09729).
    * decoupled: times exp(old - behaviour), where old is the proximal policy (AReaL, arXiv
      2505.24298, eq. 5): the clip keeps the step near the proximal policy, the weight corrects for
      who wrote the token. Tokens whose weight exceeds behav_imp_weight_cap give no gradient; they
      stay in the mean's denominator, which must not depend on the model.
    * kl_coef: adds kl_coef * KL(policy || reference) per token (GRPO, arXiv 2402.03300).
    """
    mask = batch["loss_mask"].bool()
    adv = batch["advantages"]
    logp, old = outputs["logprobs"], batch[old_logp]
    high = eps_clip if eps_clip_higher is None else eps_clip_higher

    ratio = safe_exp(torch.where(mask, logp - old, 0.0))
    pg = torch.maximum(-adv * ratio, -adv * ratio.clamp(1.0 - eps_clip, 1.0 + high))
    if c_clip is not None:
        pg = torch.where(adv < 0, torch.minimum(pg, -adv * c_clip), pg)

    # who wrote the token against the policy the ratio starts from; 1 where they are the same
    behav_weight = safe_exp(torch.where(mask, old - batch["logprobs"], 0.0)).detach()
    dropped = torch.zeros_like(mask)
    if decoupled:
        if behav_imp_weight_cap is not None:
            dropped = mask & (behav_weight > behav_imp_weight_cap)
        pg = torch.where(dropped, 0.0, pg * behav_weight)

    pg_sum = loss = aggregate(pg, batch, loss_agg)
    stats = _policy_stats(logp.detach(), ratio.detach(), batch, eps_clip, high, c_clip)
    stats["pg_loss"] = (pg_sum.detach(), _denominator(batch, loss_agg))
    tokens = mask.sum()
    stats["behav_imp_weight"] = (torch.where(mask, behav_weight, 0.0).sum(), tokens)
    stats["behav_imp_weight_sq"] = (torch.where(mask, behav_weight.square(), 0.0).sum(), tokens)
    stats["behav_dropped_frac"] = (dropped.sum(), tokens)
    if "entropy" in outputs:
        stats["entropy"] = (torch.where(mask, outputs["entropy"].detach(), 0.0).sum(), tokens)
    if kl_coef:
        kl = kl_estimate(logp, batch["ref_logp"], kl_estimator)
        loss = loss + kl_coef * aggregate(kl, batch, loss_agg)
    if "ref_logp" in batch:
        kl = kl_estimate(logp.detach(), batch["ref_logp"], "k3")
        stats["kl_ref"] = (torch.where(mask, kl, 0.0).sum(), tokens)
    return loss, stats


def grpo(config: PPOActorConfig) -> LossSpec:
    """Returns `grpo_loss` with the settings of the actor's section."""
    old = config.old_logp
    return LossSpec(
        fn=partial(
            grpo_loss,
            eps_clip=config.eps_clip,
            eps_clip_higher=config.eps_clip_higher,
            c_clip=config.c_clip,
            old_logp=old,
            decoupled=config.use_decoupled_loss,
            behav_imp_weight_cap=config.behav_imp_weight_cap,
            kl_coef=config.kl_coef,
            kl_estimator=config.kl_estimator,
            loss_agg=config.loss_agg,
        ),
        weight=LOSS_WEIGHTS[config.loss_agg],
        outputs=("logprobs", "entropy"),
        needs=(
            *("logprobs", "advantages", old),
            *(["ref_logp"] if config.kl_coef else []),
            *(["rollout_tokens"] if config.loss_agg == "rollout-mean" else []),
        ),
        uses=("ref_logp",),
        derive=_grpo_metrics,
    )


def _grpo_metrics(mean: Metrics, first: Metrics) -> Metrics:
    """Adds the ratio's deviation at the first step, its root mean square and the sample size."""
    rest = {k: v for k, v in mean.items() if k not in ("ratio_sq_dev", "behav_imp_weight_sq")}
    square = mean["behav_imp_weight_sq"]
    return rest | {
        "first_ratio_abs_dev": first["ratio_abs_dev"],
        "ratio_rms_dev": math.sqrt(mean["ratio_sq_dev"]),
        # Kish's effective sample size, as a fraction of the tokens
        "behav_ess": mean["behav_imp_weight"] ** 2 / square if square else 0.0,
    }


def critic_loss(
    outputs: Padded, batch: Padded, *, value_clip: float | None = 0.2, loss_agg: str = "token-mean"
) -> tuple[Tensor, Stats]:
    """Returns half the summed squared error of values [b,S] against batch["returns"], and stats;
    weight: `LOSS_WEIGHTS[loss_agg]`.

    value_clip: with v_old = batch["values"], a token's error is the larger one of v and of v kept
    within value_clip of v_old, so that no step gains by moving farther (the value clipping of
    OpenAI baselines' PPO2; arXiv 2005.12729, sec. 3).
    """
    mask = batch["loss_mask"].bool()
    values, old, returns = outputs["values"], batch["values"], batch["returns"]
    error = (values - returns).square()
    clipped = torch.zeros_like(mask)
    if value_clip is not None:
        near = old + (values - old).clamp(-value_clip, value_clip)
        near_error = (near - returns).square()
        clipped = mask & (near_error > error)
        error = torch.maximum(error, near_error)
    loss = 0.5 * aggregate(error, batch, loss_agg)
    metrics = {
        "value": values.detach(),
        "return": returns,
        "value_error": (values.detach() - returns).abs(),
        "value_clip_frac": clipped,
    }
    return loss, _token_means(metrics, mask)


@torch.no_grad()
def _policy_stats(
    logp: Tensor, ratio: Tensor, batch: Padded, low: float, high: float, c_clip: float | None
) -> Stats:
    """Metrics of the step, as means over trained tokens.

    A clip fraction counts tokens whose gradient the clip removes. approx_kl is the k3 estimate of
    KL(behaviour || policy) (tokens were drawn from the behaviour policy).
    """
    mask, adv, behav = batch["loss_mask"].bool(), batch["advantages"], batch["logprobs"]
    clip_low = (adv < 0) & (ratio < 1.0 - low)
    clip_high = (adv > 0) & (ratio > 1.0 + high)
    dual = (adv < 0) & (ratio > c_clip) if c_clip is not None else torch.zeros_like(mask)
    metrics = {
        "logp": logp,
        "advantage": adv,
        "ratio": ratio,
        "ratio_abs_dev": (ratio - 1.0).abs(),
        "ratio_sq_dev": (ratio - 1.0).square(),
        "approx_kl": kl_estimate(behav, logp, "k3"),
        "approx_kl_k1": kl_estimate(behav, logp, "k1"),
        "clip_frac": clip_low | clip_high | dual,
        "clip_frac_low": clip_low,
        "clip_frac_high": clip_high,
        "clip_frac_dual": dual,
    }
    return _token_means(metrics, mask)


def _token_means(metrics: dict[str, Tensor], mask: Tensor) -> Stats:
    tokens = mask.sum()
    return {k: (torch.where(mask, v.float(), 0.0).sum(), tokens) for k, v in metrics.items()}
