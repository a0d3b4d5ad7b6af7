"""Computes log-probabilities, entropy, greedy match and top k from hidden states over a sharded
vocabulary, and log-probabilities of given tokens and of all others as one.

The full logits never exist: tokens go through the vocabulary projection in chunks, and every chunk
is reduced over the shards to a few numbers per token. With logits l (already divided by the
temperature), Z = sum_j exp(l_j), p = exp(l) / Z, and G the ids given at a position:

    logprob(y)   = l_y - log Z                    d/dl_j = [j = y] - p_j
    entropy      = log Z - sum_j p_j l_j          d/dl_j = -p_j (log p_j + entropy)
    tail         = log sum_{j not in G} p_j       d/dl_j = [j not in G] p_j / exp(tail) - p_j

The tail is a sum over what is not in G, not 1 less what is: a model that is sure of itself leaves
1e-9 to the tail, which float32 could not tell from 0. An id that is no token of the vocabulary has
probability 0. Ids of a position are distinct, except -1, which pads.

No library's fused kernel gives these: the cross entropies of megatron-core 0.16
(fused_vocab_parallel_cross_entropy) and Transformer Engine take whole logits, keep as much for
backward, and know neither entropy nor temperature; Liger's starts from hidden states, but wants the
whole vocabulary on one rank.

T tokens, c of them in a chunk, V vocabulary, v this rank's share of it (padding cut off), H hidden,
k of the top, n given ids per token, K numbers per token.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.api.engine import GIVEN, OUTPUTS
from megarl.parallel import cpu_kernels as products

_CACHED = 1 << 17  # numbers that fit a CPU's cache
_LOW = (1 << 32) - 1


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """This rank's rows [start, start + rows) of a vocabulary whose `vocab_size` first are real."""

    start: int
    rows: int
    vocab_size: int
    group: dist.ProcessGroup | None = None

    @property
    def real_rows(self) -> int:
        """Returns how many of the shard's rows are real vocabulary, without padding."""
        return max(0, min(self.rows, self.vocab_size - self.start))

    def all_reduce(self, x: torch.Tensor, op: Any) -> torch.Tensor:
        """Reduces `x` over the shards in place and returns it; one shard sends nothing."""
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(x, op=op, group=self.group)
        return x


def rows_in_cache(x: torch.Tensor) -> int:
    """Returns how many rows of x [c,v] fit a CPU's cache, at least 1; on a GPU all of them."""
    return max(1, len(x) if x.is_cuda else _CACHED // max(1, x.shape[1]))


def local_target(labels: torch.Tensor, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns this shard's row of every label (else 0), and whether it is here, both as
    labels, any shape."""
    row = labels - shard.start
    here = (row >= 0) & (row < shard.real_rows)
    return row.masked_fill(~here, 0), here


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Maps a float's int32 bits to an int32 of the same order, and back: negatives are mirrored."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


def top_k(logits: torch.Tensor, shard: VocabShard, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the k largest of all shards' [c,v] logits, in fp32, and their ids, both [c,k]:
    largest first, of equal ones the lowest id first. One collective, of 8 * k bytes per token and
    shard.

    torch.topk leaves the order of equals open. So it is given integers that differ: the logit's
    bits above, the id's complement below. They also carry both through the collective. They are
    made for an eighth of the chunk at a time, since they take several times the logits' memory.
    """
    real = shard.real_rows
    below = _LOW - torch.arange(shard.start, shard.start + real, device=logits.device)
    keys = torch.full((len(logits), k), torch.iinfo(torch.long).min, device=logits.device)
    rows = -(-len(logits) // 8)
    for part, out in zip(logits.split(rows), keys.split(rows), strict=True):
        bits = part.float().add(0.0).view(torch.int32)  # -0.0 becomes 0.0
        key = _ordered(bits).long().bitwise_left_shift_(32).bitwise_or_(below)
        out[:, : min(k, real)] = key.topk(min(k, real)).values
    if shard.group is not None and shard.group.size() > 1:
        everyones = [torch.empty_like(keys) for _ in range(shard.group.size())]
        dist.all_gather(everyones, keys, group=shard.group)
        keys = torch.cat(everyones, -1).topk(k).values
    values = _ordered((keys >> 32).int()).view(torch.float32)
    return values, _LOW - (keys & _LOW)


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


def tail_logprob(outside: Tensor, ids: Tensor, log_total: Tensor, shard: VocabShard) -> Tensor:
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


_TAILS = ("topk_tail", "given_tail")


class Kept(NamedTuple):
    """Holds what backward keeps of every token, [c] or [T] each: entropy and tail are 0 where they
    are not asked for."""

    log_z: torch.Tensor
    entropy: torch.Tensor
    tail: torch.Tensor


def _logits(h: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """Returns the logits [c,v] in fp32 (or fp64): the product in the model's dtype, as in
    inference, then widened.

    The result is fresh memory, so that callers may change it in place.
    """
    product = products.linear(h, weight)
    wide = product.to(torch.promote_types(product.dtype, torch.float32))
    return wide if temperature == 1.0 else wide.div_(temperature)


def _greedy_match(
    logits: torch.Tensor, top: torch.Tensor, labels: torch.Tensor, shard: VocabShard
) -> torch.Tensor:
    """Returns 1.0 where the label is the argmax, else 0.0, [c]; of equals the lowest id wins."""
    winner = torch.full_like(labels, shard.vocab_size)
    if shard.real_rows:
        best, where = logits.max(-1)
        winner = torch.where(best == top, where + shard.start, winner)
    shard.all_reduce(winner, dist.ReduceOp.MIN)
    return (winner == labels).to(logits.dtype)


def columns(outputs: Sequence[str], topk: int, given: int = 0, vocab: int = 0) -> dict[str, slice]:
    """Returns where each output stands among the K numbers of a token; `given` is n."""
    sizes, at, end = {"topk": topk, "given": given, "vocab": vocab}, {}, 0
    for name in outputs:
        start, end = end, end + sizes.get(OUTPUTS[name].width, 1)
        at[name] = slice(start, end)
    return at


def _reduce_chunk(
    logits: torch.Tensor,
    labels: torch.Tensor,
    ids: torch.Tensor,
    shard: VocabShard,
    outputs: Sequence[str],
    topk: int,
) -> tuple[torch.Tensor, Kept]:
    """Reduces [c,v] logits, changed in place to log p, to [c,K] outputs and what backward keeps.
    ids [c,n]: the given ones.

    There are two collectives, one more for greedy_match and one for the top k.
    """
    top = _largest(logits, shard)
    values = {}
    if "greedy_match" in outputs:
        values["greedy_match"] = _greedy_match(logits, top, labels, shard)
    if any(name.startswith("topk_") for name in outputs):
        values["topk_logprobs"], top_ids = top_k(logits, shard, topk)
        values["topk_ids"] = top_ids.to(top.dtype)  # exact: below 2^24
    centred = logits.sub_(top[:, None])
    tails = {name: ids if name == "given_tail" else top_ids for name in _TAILS if name in outputs}
    summed = _summed(_parts(centred, labels, ids, tails, shard, outputs), shard)
    total, *weighted = summed["sums"]
    log_total = total.log()
    values["logprobs"] = summed["target"][0] - log_total
    values["entropy"] = log_total - weighted[0] / total if weighted else torch.zeros_like(total)
    for name, beside in tails.items():
        values[name] = tail_logprob(summed[name][0], beside, log_total, shard)
    if "given_logprobs" in outputs:
        values["given_logprobs"] = of_given(summed["given_logprobs"], ids, log_total, shard)
    centred.sub_(log_total[:, None])
    log_z = log_total + top
    if "topk_logprobs" in values:
        values["topk_logprobs"] = values["topk_logprobs"] - log_z[:, None]
    numbers = [v if (v := values[o]).ndim == 2 else v[:, None] for o in outputs]
    tail = values.get("given_tail", torch.zeros_like(log_z))
    return torch.cat(numbers, -1), Kept(log_z, values["entropy"], tail)


def _parts(
    centred: torch.Tensor,
    labels: torch.Tensor,
    ids: torch.Tensor,
    tails: dict[str, torch.Tensor],
    shard: VocabShard,
    outputs: Sequence[str],
) -> dict[str, torch.Tensor]:
    """Returns this shard's part of what is summed over the shards, [.,c] each. tails: by name the
    ids beside which there is one."""
    parts = {"sums": _exp_sums(centred, weighted="entropy" in outputs)}
    parts["target"] = own_logits(centred, labels[:, None], shard)
    for name, beside in tails.items():
        parts[name] = outside_sums(centred, beside, shard)[None]
    if "given_logprobs" in outputs:
        parts["given_logprobs"] = own_logits(centred, ids, shard)
    return parts


def _largest(logits: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """Returns the largest of all shards' [c,v] logits, [c]."""
    if shard.real_rows:
        top = logits.amax(-1)
    else:
        top = logits.new_full(logits.shape[:1], float("-inf"))
    return shard.all_reduce(top, dist.ReduceOp.MAX)


def _summed(parts: dict[str, torch.Tensor], shard: VocabShard) -> dict[str, torch.Tensor]:
    """Returns the sums over the shards of each of parts [.,c], by one collective."""
    sizes = [len(part) for part in parts.values()]
    whole = shard.all_reduce(torch.cat(list(parts.values())), dist.ReduceOp.SUM)
    return dict(zip(parts, whole.split(sizes), strict=True))


def _exp_sums(x: torch.Tensor, *, weighted: bool) -> torch.Tensor:
    """Returns [1 or 2, c] for x [c,v]: sum_j exp(x_j), and if asked for sum_j exp(x_j) x_j.

    It takes the rows that fit a cache at a time, so that the exponentials stay there.
    """
    sums = []
    for part in x.split(rows_in_cache(x)):
        e = part.exp()
        sums.append(torch.stack([e.sum(-1), *([e.mul_(part).sum(-1)] if weighted else [])]))
    return torch.cat(sums, -1)


class _TokenOutputs(torch.autograd.Function):
    """Computes outputs [T,K] from hidden [T,H] and weight [rows,H], a chunk of tokens at a time.

    Backward computes each chunk's logits again, except when those of all tokens fit `keep_bytes`:
    then they are kept. The gradient of `hidden` is this shard's part only (its sum over the group
    is the caller's business); the weight's is summed over chunks in fp32 and rounded once.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        given: torch.Tensor,
        shard: VocabShard,
        outputs: tuple[str, ...],
        temperature: float,
        chunk: int,
        keep_bytes: int,
        topk: int,
        used: Container[str],
    ) -> torch.Tensor:
        real = weight[: shard.real_rows]
        parts, about, ctx.kept = [], [], []
        wide = torch.promote_types(hidden.dtype, torch.float32).itemsize
        keep = any(ctx.needs_input_grad) and len(hidden) * len(real) * wide <= keep_bytes
        log_p = None
        cut = zip(hidden.split(chunk), labels.split(chunk), given.split(chunk), strict=True)
        for h, y, ids in cut:
            log_p = None  # the chunk before is freed before this one is made
            log_p = _logits(h, real, temperature)
            part, of_chunk = _reduce_chunk(log_p, y, ids, shard, outputs, topk)
            parts.append(part)
            about.append(of_chunk)
            if keep:
                ctx.kept.append(log_p)
        whole = [torch.cat(each) for each in zip(*about, strict=True)]
        ctx.save_for_backward(hidden, weight, labels, given, *whole)
        ctx.how = shard, columns(outputs, topk, given.shape[1]), temperature, chunk, used
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        hidden, weight, labels, given, *whole = ctx.saved_tensors
        about = Kept(*whole)
        shard, at, temperature, chunk, used = ctx.how
        at = {name: where for name, where in at.items() if name != "entropy" or name in used}
        real = weight[: shard.real_rows]
        g_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        g_weight = None
        if ctx.needs_input_grad[1]:
            g_weight = weight.new_zeros(weight.shape, dtype=about.log_z.dtype)
        logits, ctx.kept = ctx.kept, []  # they are overwritten
        for i, lo in enumerate(range(0, len(hidden), chunk)):
            s = slice(lo, lo + chunk)
            log_p = g = None  # the chunk before is freed before this one is made
            if logits:
                log_p, logits[i] = logits[i], None
            else:
                log_p = _logits(hidden[s], real, temperature).sub_(about.log_z[s, None])
            of_chunk = Kept(*(numbers[s] for numbers in about))
            targets = labels[s], given[s], of_chunk
            g = _grad_logits(log_p, *targets, grad[s] / temperature, shard, at).to(hidden.dtype)
            if g_hidden is not None:
                g_hidden[s] = products.linear(g, real.t())
            if g_weight is not None:
                products.accumulate(hidden[s], g, g_weight[: shard.real_rows])
        if g_weight is not None:
            g_weight = g_weight.to(weight.dtype)
        return g_hidden, g_weight, *[None] * 9


def _grad_logits(
    log_p: torch.Tensor,
    labels: torch.Tensor,
    ids: torch.Tensor,
    about: Kept,
    grad: torch.Tensor,
    shard: VocabShard,
    at: dict[str, slice],
) -> torch.Tensor:
    """Returns the gradient [c,v] of the logits, for `grad` [c,K] of the outputs, which stand `at`
    columns. Overwrites log_p."""

    def of(name: str) -> torch.Tensor:
        return grad[:, at[name].start] if name in at else torch.zeros_like(grad[:, 0])

    g_logprob, g_entropy = of("logprobs"), of("entropy")
    if "entropy" in at:
        factor = log_p + about.entropy[:, None]
        factor.mul_(g_entropy[:, None]).add_(g_logprob[:, None])
    else:
        factor = g_logprob[:, None].clone()
    if not at.keys().isdisjoint(GIVEN):
        g_ids = grad[:, at["given_logprobs"]] if "given_logprobs" in at else torch.zeros_like(ids)
        out = GivenGrad(ids, about.tail, g_ids, of("given_tail")).logits_grad(log_p, factor, shard)
    else:
        out = log_p.exp_().mul_(factor.neg_())
    if shard.real_rows:
        row, here = local_target(labels, shard)
        out.scatter_add_(-1, row[:, None], torch.where(here, g_logprob, 0.0)[:, None])
    return out


def token_outputs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    shard: VocabShard,
    outputs: Sequence[str] = ("logprobs",),
    temperature: float = 1.0,
    chunk_tokens: int = 4096,
    keep_bytes: int = 0,
    topk: int = 1,
    given: torch.Tensor | None = None,
    used: Container[str] = OUTPUTS,
) -> torch.Tensor:
    """Returns per-token outputs [T,K] in fp32 in the order of `outputs` (OUTPUTS of the head
    "lm", but logits); `columns` says where each stands. logprobs, entropy and those of GIVEN have
    gradients.

    hidden [T,H], weight [rows,H] of this shard, labels [T]; given [T,n]: the ids of GIVEN. Peak
    memory is one chunk of logits [chunk_tokens, v] in fp32 with its softmax, whatever T is, and
    `keep_bytes` for logits that backward finds again where those of all T fit. used: outputs
    whose gradients backward looks at, asked as it begins: an entropy that is not among them costs
    it nothing. Raises
    AssertionError for an unknown output, a weight of another number of rows, or a `topk` beyond the
    vocabulary.
    """
    allowed = {name for name, output in OUTPUTS.items() if output.head == "lm"} - {"logits"}
    assert outputs and set(outputs) <= allowed, outputs
    assert weight.shape[0] == shard.rows, (weight.shape, shard)
    assert topk <= shard.vocab_size < 1 << 24, (topk, shard)
    assert given is not None or set(GIVEN).isdisjoint(outputs), outputs
    return _TokenOutputs.apply(
        hidden,
        weight,
        labels,
        labels.new_empty(len(labels), 0) if given is None else given,
        shard,
        tuple(outputs),
        float(temperature),
        chunk_tokens,
        keep_bytes,
        topk,
        used,
    )


def gathered_logits(
    hidden: torch.Tensor, weight: torch.Tensor, *, shard: VocabShard, temperature: float = 1.0
) -> torch.Tensor:
    """Returns the full logits [T,V] on every rank. For tests: nothing else can afford them."""
    local = _logits(hidden, weight, temperature)
    if shard.group is not None and shard.group.size() > 1:
        parts = [torch.empty_like(local) for _ in range(shard.group.size())]
        dist.all_gather(parts, local.contiguous(), group=shard.group)
        local = torch.cat(parts, -1)
    return local[:, : shard.vocab_size]
