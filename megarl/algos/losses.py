"""Losses of supervised training and of values, in the engine's contract.

`loss_fn(outputs, batch) -> (loss_sum, stats)`: tensors are padded [b,S], loss_sum is a scalar sum
with gradient, stats maps a name to (sum, weight), both detached scalars. The engine adds sums and
weights over the whole batch before it divides, so no metric depends on how the batch was cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algos.aggregation import Stats, aggregate, token_means
from megarl.api.batch import Padded


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
