"""Sums what is outside of given tokens, and shares a gradient between them and the rest, in torch.

Formulas: megarl/parallel/vocab_parallel.py. c tokens, v columns of a shard, n given ids per token,
as row [c,n], their columns, and here [c,n], whether this shard has them (else the column is 0).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_MOST = 80.0  # exp of it, times any gradient in use, is finite in float32


def outside_sums(centred: Tensor, row: Tensor, here: Tensor, rows: int) -> Tensor:
    """Returns [c]: the sum of exp(centred [c,v]) over the columns that are not given, so many rows
    at a time."""
    if not centred.shape[1]:
        return centred.new_zeros(len(centred))
    cut = zip(centred.split(rows), row.split(rows), here.split(rows), strict=True)
    return torch.cat([_without(x.exp(), *at).sum(-1) for x, *at in cut])


def _without(x: Tensor, row: Tensor, here: Tensor) -> Tensor:
    """Sets x [c,v], nowhere negative, to 0 at those of row [c,n] that are here, and returns it."""
    zero = torch.where(here, 0.0, torch.inf).to(x.dtype)
    return x.scatter_reduce_(-1, row, zero, "amin")


def tail_logprob(outside: Tensor, ends: Tensor, log_total: Tensor) -> Tensor:
    """Returns [c]: log of the mass outside of the given tokens by its sum `outside` [c]; -inf where
    they are the whole vocabulary (`ends` [c]), and only there."""
    least = torch.finfo(outside.dtype).tiny
    return torch.where(ends, -torch.inf, outside.clamp(min=least).log() - log_total)


class GivenGrad(NamedTuple):
    """Holds the gradient of the given tokens' logprobs [c,n]; `more` [c], what it and the tail's
    add to the factor of -p; `less` [c], what that is less outside of the given tokens."""

    given: Tensor
    more: Tensor
    less: Tensor


def grads(given: Tensor, tail: Tensor, g_tail: Tensor) -> GivenGrad:
    """Returns what the gradients of given tokens [c,n] and of their tail [c], of the value `tail`,
    are for the logits."""
    ends = torch.isinf(tail)  # a tail of nothing
    g_tail = torch.where(ends, 0.0, g_tail)
    less = g_tail * torch.where(ends, 0.0, -tail).clamp(max=_MOST).exp()
    return GivenGrad(given, given.sum(-1) + g_tail, less)


def logits_grad(
    log_p: Tensor, factor: Tensor, row: Tensor, here: Tensor, grad: GivenGrad
) -> Tensor:
    """Returns the gradient [c,v] of the logits: -p factor, for what other outputs take (`factor`
    [c,1] or [c,v]), and the given tokens' and the tail's. Overwrites log_p and factor."""
    factor += grad.more[:, None]
    if not log_p.shape[1]:
        return log_p
    at_ids = factor.gather(-1, row) if factor.shape[1] > 1 else factor
    there = torch.where(here, grad.given - log_p.gather(-1, row).exp() * at_ids, 0.0)
    out = _without(log_p.exp_(), row, here).mul_(factor.sub_(grad.less[:, None]).neg_())
    return out.scatter_add_(-1, row, there)
