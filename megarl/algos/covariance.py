"""Picks tokens of a whole batch by their part in the covariance of logprobs and advantages, which
is what lowers the policy's entropy (arXiv 2505.22617).

It is done once for an update, before the batch is cut: the numbers are those of the policy before
the update, and which tokens are picked depends neither on micro-batches, packing or ranks nor on
the number of mini-batches. B rows, T tokens of the held rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megarl.algos.rows import map_tokens, moments, reduce_rows, total
from megarl.api.batch import Batch, Padded, Tokens

_ORDER = "order"  # the field of integers by which tokens are picked, meanwhile
_NEVER = -(1 << 63)


def covariances(batch: Batch, old_logp: str) -> Tokens:
    """Returns (logp - mean of logp) (A - mean of A) of every trained token, [T] float64, -inf of
    others; means over the trained tokens of the whole batch. Collective.

    old_logp: the field with logp, of the policy before the update.
    """

    def mean(name: str) -> float:
        return moments(batch, lambda part: part[name], [name])[1]

    logp, advantage = mean(old_logp), mean("advantages")

    def product(part: Padded) -> Tensor:
        found = (part[old_logp].double() - logp) * (part["advantages"].double() - advantage)
        return found.where(part["loss_mask"].bool(), -torch.inf)

    return map_tokens(batch, product, [old_logp, "advantages", "loss_mask"])


def shuffled(batch: Batch, among: Tokens, seed: int) -> Tokens:
    """Returns a random number from 0 to 1 for each token of `among` [T] bool, -inf for others, [T]
    float64: a function of the seed, the token's row and its place there."""
    rows = batch.rows.tolist()
    drawn = [torch.empty(0, dtype=torch.float64)]
    for row, n in zip(rows, among.lengths.tolist(), strict=True):
        generator = torch.Generator().manual_seed((seed * 1_000_003 + row) % 2**32)
        drawn.append(torch.rand(n, generator=generator, dtype=torch.float64))
    return Tokens(torch.cat(drawn).where(among.values, -torch.inf), among.lengths)


def largest(batch: Batch, scores: Tokens, count: int) -> Tokens:
    """Returns which tokens have the `count` largest `scores` [T] float64 of the whole batch, [T]
    bool; of equal ones those that stand first. Scores of -inf are never taken. Collective."""
    order = torch.where(scores.values == -torch.inf, _NEVER, _as_integers(scores.values))
    batch[_ORDER] = Tokens(order, scores.lengths)
    try:
        bound = _bound(batch, count)
        above = int(total(_counts(batch, lambda order: order > bound)))
        equal = _counts(batch, lambda order: order == bound)
    finally:
        batch.pop(_ORDER)
    room = (count - above - (equal.cumsum(0) - equal)).clamp(min=0)  # for equal ones, by row
    picked, start = order > bound, 0
    for n, most in zip(scores.lengths.tolist(), room[batch.rows].long().tolist(), strict=True):
        at = start + (order[start : start + n] == bound).nonzero().flatten()[:most]
        picked[at] = bound > _NEVER
        start += n
    return Tokens(picked, scores.lengths)


def _bound(batch: Batch, count: int) -> int:
    """Returns the `count`-th largest integer of the field, the lowest there is if there are not so
    many. It is found bit by bit, each from the number of tokens that are not below a candidate, so
    that no rank learns more of the others' tokens than counts."""
    found = 0  # above the lowest
    for bit in reversed(range(64)):
        candidate = found + (1 << bit)
        if total(_counts(batch, _at_least(candidate + _NEVER))) >= count:
            found = candidate
    return found + _NEVER


def _counts(batch: Batch, test: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns of how many tokens of each row the field passes the test, [B] float64."""
    return reduce_rows(batch, lambda part: [test(part[_ORDER])], [_ORDER])[:, 0]


def _at_least(bound: int) -> Callable[[Tensor], Tensor]:
    return lambda order: order >= bound


def _as_integers(values: Tensor) -> Tensor:
    """Returns integers [T] int64 in the order of float64 `values` [T] without NaN."""
    bits = (values + 0.0).view(torch.int64)  # + 0.0: of both zeros the positive one
    return torch.where(bits < 0, bits ^ ((1 << 63) - 1), bits)
