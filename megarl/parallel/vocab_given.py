"""Log-probabilities of given tokens, and of all others as one, over a sharded vocabulary.

For ids G given at a position, with p = softmax(l) (`vocab_parallel`):

    logprob(i)   = l_i - log Z                    d/dl_j = [j = i] - p_j
    tail         = log sum_{j not in G} p_j       d/dl_j = [j not in G] p_j / exp(tail) - p_j

The tail is a sum over what is not in G, not 1 less what is: a model that is sure of itself leaves
1e-9 to the tail, which float32 could not tell from 0. An id that is no token of the vocabulary (-1
stands for none) has probability 0. The ids of a position are distinct, but for those.

c tokens of a chunk, v this rank's share of the vocabulary, n ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.parallel.vocab_shard import VocabShard, local_target, rows_in_cache

_MOST = 80.0  # exp of it, times any gradient in use, is finite in float32


def own_logits(centred: Tensor, ids: Tensor, shard: VocabShard) -> Tensor:
    """Returns [n,c]: the entries of centred [c,v] at ids [c,n], 0 where another shard has them.
    Their sum over the shards is the whole."""
    if not shard.real_rows:
        return centred.new_zeros(ids.shape[::-1])
    row, here = local_target(ids.long(), shard)
    return torch.where(here, centred.gather(-1, row), 0.0).t()


def outside_sums(centred: Tensor, ids: Tensor, shard: VocabShard) -> Tensor:
    """Returns [c]: the sum of exp(centred [c,v]) over this shard's tokens that are not in ids
    [c,n]. It takes the rows that fit a cache at a time."""
    if not shard.real_rows:
        return centred.new_zeros(len(centred))
    rows, sums = rows_in_cache(centred), []
    for part, some in zip(centred.split(rows), ids.split(rows), strict=True):
        sums.append(_without(part.exp(), *local_target(some.long(), shard)).sum(-1))
    return torch.cat(sums)


def _without(x: Tensor, row: Tensor, here: Tensor) -> Tensor:
    """Sets x [c,v], nowhere negative, to 0 at those of row [c,n] that are here, and returns it."""
    zero = torch.where(here, 0.0, torch.inf).to(x.dtype)
    return x.scatter_reduce_(-1, row, zero, "amin")


def _known(ids: Tensor, shard: VocabShard) -> Tensor:
    return (ids >= 0) & (ids < shard.vocab_size)


def of_given(own: Tensor, ids: Tensor, log_total: Tensor, shard: VocabShard) -> Tensor:
    """Returns log p of ids [c,n] by their summed own_logits [n,c]; -inf for what is no token."""
    return torch.where(_known(ids, shard), own.t() - log_total[:, None], -torch.inf)


def tail(outside: Tensor, ids: Tensor, log_total: Tensor, shard: VocabShard) -> Tensor:
    """Returns [c]: log of the mass outside of ids [c,n] by the summed outside_sums [c]; -inf where
    the ids are the whole vocabulary, and only there."""
    least = torch.finfo(outside.dtype).tiny
    rest = _known(ids, shard).sum(-1) < shard.vocab_size
    return torch.where(rest, outside.clamp(min=least).log() - log_total, -torch.inf)


@dataclass(frozen=True)
class GivenGrad:
    """Holds what backward needs of a chunk's given tokens: ids [c,n], the log tail [c], and the
    gradients of the tokens [c,n] and of the tail [c]."""

    ids: Tensor
    tail: Tensor
    g_ids: Tensor
    g_tail: Tensor

    def logits_grad(self, log_p: Tensor, factor: Tensor, shard: VocabShard) -> Tensor:
        """Returns the gradient [c,v] of the logits: -p factor, for what other outputs take
        (`factor` [c,1] or [c,v]), and the given tokens' and the tail's. Overwrites log_p and
        factor."""
        g_ids = torch.where(_known(self.ids, shard), self.g_ids, 0.0)
        ends = torch.isinf(self.tail)  # a tail of nothing
        g_tail = torch.where(ends, 0.0, self.g_tail)
        factor += (g_ids.sum(-1) + g_tail)[:, None]
        if not shard.real_rows:
            return log_p
        row, here = local_target(self.ids.long(), shard)
        at_ids = factor.gather(-1, row) if factor.shape[1] > 1 else factor
        there = torch.where(here, g_ids - log_p.gather(-1, row).exp() * at_ids, 0.0)
        of_tail = g_tail * torch.where(ends, 0.0, -self.tail).clamp(max=_MOST).exp()
        out = _without(log_p.exp_(), row, here).mul_(factor.sub_(of_tail[:, None]).neg_())
        return out.scatter_add_(-1, row, there)
