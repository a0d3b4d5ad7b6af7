"""Sums per-token losses [b,S] into the mean that a configuration names (`actor.loss_agg`), and the
losses of supervised training and of values.

`loss_fn(outputs, batch) -> (loss_sum, stats)`: tensors are padded [b,S], loss_sum is a scalar sum
with gradient, stats maps a name to (sum, weight), both detached scalars. A loss divides by nothing
of the batch; the engine adds sums and weights over the whole batch before it divides, so no number
depends on how the batch was cut. So a mean here is two functions: `aggregate`, the sum, and
LOSS_WEIGHTS, what it is divided by. b rows, S positions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megarl.api.batch import Padded

Stats = dict[str, tuple[Tensor, Tensor]]  # by name a sum, and what it is divided by


def token_weight(batch: Padded) -> float:
    """Counts the trained tokens of loss_mask [b,S]."""
    return float(batch["loss_mask"].sum())


def sequence_weight(batch: Padded) -> float:
    """Counts the sequences of loss_mask [b,S] with at least one trained token."""
    return float(batch["loss_mask"].bool().any(1).sum())


def rollout_weight(batch: Padded) -> float:
    """Counts the rollouts of loss_mask [b,S] by the share of each rollout's trained tokens
    (rollout_tokens [b]) that a row has, so that the rows of one add up to 1."""
    return float(weight_of(batch, "rollout-mean"))


def batch_weight(batch: Padded) -> float:
    """Adds the rows' shares of their mini-batch (batch_share [b]): 1 for the whole of it."""
    return float(weight_of(batch, "token-sum"))


LOSS_WEIGHTS: dict[str, Callable[[Padded], float]] = {
    "token-mean": token_weight,
    "sequence-mean": sequence_weight,
    "rollout-mean": rollout_weight,
    "sequence-sum": sequence_weight,
    "token-sum": batch_weight,
}


def aggregate(per_token: Tensor, batch: Padded, loss_agg: str) -> Tensor:
    """Returns the sum over [b,S] that, divided by LOSS_WEIGHTS[loss_agg], is what its name says.
    Raises ValueError for an unknown `loss_agg`.

    token-mean     the mean over trained tokens (DAPO, arXiv 2503.14476)
    sequence-mean  the mean over sequences of the mean over their trained tokens, so a long answer
                   counts as much as a short one (GRPO, arXiv 2402.03300)
    rollout-mean   the same over rollouts, whose trained tokens (rollout_tokens [b]) may stand in
                   several sequences
    sequence-sum   the mean over sequences of the sum over their trained tokens; over a constant
                   length, it is Dr. GRPO's (arXiv 2503.20783)
    token-sum      the sum over trained tokens

    >>> from megarl.algos.example import batch, values
    >>> [round(float(aggregate(values, batch, a)) / w(batch), 4) for a, w in LOSS_WEIGHTS.items()]
    [0.6, 0.5833, 0.5833, 1.5, 3.0]
    """
    mask = batch["loss_mask"].bool()
    masked = torch.where(mask, per_token, 0.0)
    if loss_agg in ("token-mean", "token-sum", "sequence-sum"):
        return masked.sum()
    if loss_agg == "sequence-mean":
        return (masked.sum(1) / mask.sum(1).clamp(min=1)).sum()
    if loss_agg == "rollout-mean":
        return (masked.sum(1) / batch["rollout_tokens"].clamp(min=1)).sum()
    raise ValueError(f"loss_agg={loss_agg!r}: use one of {', '.join(LOSS_WEIGHTS)}")


def weight_of(batch: Padded, loss_agg: str) -> Tensor:
    """Returns LOSS_WEIGHTS[loss_agg] of the batch as a scalar tensor."""
    mask = batch["loss_mask"].bool()
    if loss_agg == "token-mean":
        return mask.sum()
    if loss_agg == "rollout-mean":
        return (mask.sum(1).double() / batch["rollout_tokens"].clamp(min=1)).sum()
    if loss_agg == "token-sum":
        return batch["batch_share"].double().sum()
    return mask.any(1).sum()


def aggregation_needs(loss_agg: str) -> tuple[str, ...]:
    """Returns the fields [B] that `loss_agg` reads beside loss_mask."""
    return {"rollout-mean": ("rollout_tokens",), "token-sum": ("batch_share",)}.get(loss_agg, ())


def token_means(metrics: dict[str, Tensor], mask: Tensor) -> Stats:
    """Returns {name: (sum over trained tokens, their number)} of [b,S] metrics."""
    tokens = mask.sum()
    return {k: (torch.where(mask, v.float(), 0.0).sum(), tokens) for k, v in metrics.items()}


def sft_loss(outputs: Padded, batch: Padded) -> tuple[Tensor, Stats]:
    """Returns the summed cross entropy of the trained tokens, and stats; weight: `token_weight`.

    With the output "greedy_match" [b,S] (1 where x_t is the argmax) also token_accuracy, and
    exact_match: the fraction of sequences whose every trained token is the argmax, which is what
    greedy decoding would have written.

    >>> from megarl.algos.example import batch, new
    >>> sft_loss({"logprobs": new}, batch)[0]
    tensor(5.4037)
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


def critic_loss(
    outputs: Padded,
    batch: Padded,
    *,
    value_clip: float | None = 0.2,
    huber: float | None = None,
    loss_agg: str = "token-mean",
) -> tuple[Tensor, Stats]:
    """Returns half the summed squared error of values [b,S] against batch["returns"], and stats;
    weight: `LOSS_WEIGHTS[loss_agg]`.

    value_clip: with v_old = batch["values"], a token's error is the larger one of v and of v kept
    within value_clip of v_old, so that no step gains by moving farther (the value clipping of
    OpenAI baselines' PPO2; arXiv 2005.12729, sec. 3).
    huber: with e the error, e^2 becomes huber (2 |e| - huber) where |e| > huber (Huber 1964), so
    that a few wild returns do not rule the gradient.

    >>> from megarl.algos.example import batch, values
    >>> outputs = {"values": values - 0.5}
    >>> critic_loss(outputs, batch, value_clip=None)[0]
    tensor(2.3750)
    >>> critic_loss(outputs, batch)[0]  # x: 0.8, within 0.2 of the old 1, errs by 1.8, not 1.5
    tensor(3.0650)
    >>> critic_loss(outputs, batch, value_clip=None, huber=0.5)[0]
    tensor(1.6250)
    """
    mask = batch["loss_mask"].bool()
    values, old, returns = outputs["values"], batch["values"], batch["returns"]
    error = _cost(values - returns, huber)
    clipped = torch.zeros_like(mask)
    if value_clip is not None:
        near = old + (values - old).clamp(-value_clip, value_clip)
        near_error = _cost(near - returns, huber)
        clipped = mask & (near_error > error)
        error = torch.maximum(error, near_error)
    loss = 0.5 * aggregate(error, batch, loss_agg)
    metrics = {
        "value": values.detach(),
        "return": returns,
        "value_error": (values.detach() - returns).abs(),
        "value_clip_frac": clipped,
    }
    return loss, token_means(metrics, mask)


def _cost(error: Tensor, huber: float | None) -> Tensor:
    """Returns the square of an error, or what is linear beyond `huber`, any shape."""
    if huber is None:
        return error.square()
    size = error.abs()
    return torch.where(size > huber, huber * (2.0 * size - huber), error.square())
