"""Computes log-probabilities, entropy, greedy match and top k from hidden states over a sharded
vocabulary.

The full logits never exist: tokens go through the vocabulary projection in chunks, and every chunk
is reduced over the shards to a few numbers per token. With logits l (already divided by the
temperature), Z = sum_j exp(l_j), p = exp(l) / Z:

    logprob(y) = l_y - log Z              d/dl_j = [j = y] - p_j
    entropy    = log Z - sum_j p_j l_j    d/dl_j = -p_j (log p_j + entropy)

No library's fused kernel gives these: the cross entropies of megatron-core 0.16
(fused_vocab_parallel_cross_entropy) and Transformer Engine take whole logits, keep as much for
backward, and know neither entropy nor temperature; Liger's starts from hidden states, but wants the
whole vocabulary on one rank.

T tokens, V vocabulary, v this rank's share of it (padding cut off), H hidden, k of the top, K
numbers per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

TOP_LOGPROBS, TOP_IDS = "topk_logprobs", "topk_ids"  # k numbers a token, the others one
TOKEN_OUTPUTS = ("logprobs", "entropy", "greedy_match", TOP_LOGPROBS, TOP_IDS)
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


def _logits(h: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """Returns the logits [c,v] in fp32 (or fp64): the product in the model's dtype, as in
    inference, then widened.

    The result is fresh memory, so that callers may change it in place.
    """
    product = h @ weight.t()
    wide = product.to(torch.promote_types(product.dtype, torch.float32))
    return wide if temperature == 1.0 else wide.div_(temperature)


def _local_target(labels: torch.Tensor, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns this shard's row of every label (else 0), and whether it is here, both [c]."""
    row = labels - shard.start
    here = (row >= 0) & (row < shard.real_rows)
    return row.masked_fill(~here, 0), here


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


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Maps a float's int32 bits to an int32 of the same order, and back: negatives are mirrored."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


def _top(logits: torch.Tensor, shard: VocabShard, k: int) -> tuple[torch.Tensor, torch.Tensor]:
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


def columns(outputs: Sequence[str], topk: int) -> dict[str, slice]:
    """Returns where each output stands among the K numbers of a token."""
    found, end = {}, 0
    for name in outputs:
        width = topk if name in (TOP_LOGPROBS, TOP_IDS) else 1
        found[name] = slice(end, end + width)
        end += width
    return found


def _reduce_chunk(
    logits: torch.Tensor, labels: torch.Tensor, shard: VocabShard, outputs: Sequence[str], topk: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reduces [c,v] logits, changed in place to log p, to ([c,K] outputs, [c] log Z, [c] entropy).

    There are two collectives, one more for greedy_match and one for the top k. Entropy is 0 where
    it is not asked for.
    """
    if shard.real_rows:
        top = logits.amax(-1)
    else:
        top = logits.new_full(logits.shape[:1], float("-inf"))
    shard.all_reduce(top, dist.ReduceOp.MAX)
    values = {}
    if "greedy_match" in outputs:
        values["greedy_match"] = _greedy_match(logits, top, labels, shard)
    highest = None
    if TOP_LOGPROBS in outputs or TOP_IDS in outputs:
        highest, ids = _top(logits, shard, topk)
        values[TOP_IDS] = ids.to(top.dtype)  # exact: below 2^24
    centred = logits.sub_(top[:, None])
    row, here = _local_target(labels, shard)
    target = torch.zeros_like(top)
    if shard.real_rows:
        target = torch.where(here, centred.gather(-1, row[:, None])[:, 0], target)
    sums = _exp_sums(centred, weighted="entropy" in outputs)
    total, *weighted, target = shard.all_reduce(torch.cat([sums, target[None]]), dist.ReduceOp.SUM)
    log_total = total.log()
    values["logprobs"] = target - log_total
    values["entropy"] = log_total - weighted[0] / total if weighted else torch.zeros_like(total)
    centred.sub_(log_total[:, None])
    log_z = log_total + top
    if highest is not None:
        values[TOP_LOGPROBS] = highest - log_z[:, None]
    numbers = [v if (v := values[o]).ndim == 2 else v[:, None] for o in outputs]
    return torch.cat(numbers, -1), log_z, values["entropy"]


def _exp_sums(x: torch.Tensor, *, weighted: bool) -> torch.Tensor:
    """Returns [1 or 2, c] for x [c,v]: sum_j exp(x_j), and if asked for sum_j exp(x_j) x_j.

    On a CPU it takes a few rows at a time, so that the exponentials stay in its cache.
    """
    rows = len(x) if x.is_cuda else max(1, _CACHED // max(1, x.shape[1]))
    sums = []
    for part in x.split(max(1, rows)):
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
        shard: VocabShard,
        outputs: tuple[str, ...],
        temperature: float,
        chunk: int,
        keep_bytes: int,
        topk: int,
    ) -> torch.Tensor:
        real = weight[: shard.real_rows]
        parts, log_zs, entropies, ctx.kept = [], [], [], []
        wide = torch.promote_types(hidden.dtype, torch.float32).itemsize
        keep = any(ctx.needs_input_grad) and len(hidden) * len(real) * wide <= keep_bytes
        log_p = None
        for h, y in zip(hidden.split(chunk), labels.split(chunk), strict=True):
            log_p = None  # the chunk before is freed before this one is made
            log_p = _logits(h, real, temperature)
            part, log_z, entropy = _reduce_chunk(log_p, y, shard, outputs, topk)
            parts.append(part)
            log_zs.append(log_z)
            entropies.append(entropy)
            if keep:
                ctx.kept.append(log_p)
        ctx.save_for_backward(hidden, weight, labels, torch.cat(log_zs), torch.cat(entropies))
        ctx.how = shard, columns(outputs, topk), temperature, chunk
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        hidden, weight, labels, log_z, entropy = ctx.saved_tensors
        shard, at, temperature, chunk = ctx.how
        real = weight[: shard.real_rows]
        g_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        g_weight = None
        if ctx.needs_input_grad[1]:
            g_weight = weight.new_zeros(weight.shape, dtype=log_z.dtype)
        kept, ctx.kept = ctx.kept, []  # they are overwritten
        for i, lo in enumerate(range(0, len(hidden), chunk)):
            s = slice(lo, lo + chunk)
            log_p = g = None  # the chunk before is freed before this one is made
            if kept:
                log_p, kept[i] = kept[i], None
            else:
                log_p = _logits(hidden[s], real, temperature).sub_(log_z[s, None])
            g = _grad_logits(log_p, labels[s], entropy[s], grad[s] / temperature, shard, at)
            g = g.to(hidden.dtype)
            if g_hidden is not None:
                torch.mm(g, real, out=g_hidden[s])
            if g_weight is not None:
                accumulate(g_weight[: shard.real_rows], g, hidden[s])
        if g_weight is not None:
            g_weight = g_weight.to(weight.dtype)
        return g_hidden, g_weight, *[None] * 7


def accumulate(total: torch.Tensor, g: torch.Tensor, h: torch.Tensor) -> None:
    """Adds g [c,v] transposed times h [c,H] to total [v,H]: a weight's gradient. The product has
    the dtype of its factors, the sum that of `total`."""
    if total.dtype == h.dtype:
        total.addmm_(g.t(), h)
    else:
        total += g.t() @ h


def _grad_logits(
    log_p: torch.Tensor,
    labels: torch.Tensor,
    entropy: torch.Tensor,
    grad: torch.Tensor,
    shard: VocabShard,
    at: dict[str, slice],
) -> torch.Tensor:
    """Returns the gradient [c,v] of the logits, for `grad` [c,K] of the outputs, which stand `at`
    columns. Overwrites log_p."""

    def of(name: str) -> torch.Tensor:
        return grad[:, at[name].start] if name in at else torch.zeros_like(grad[:, 0])

    g_logprob, g_entropy = of("logprobs"), of("entropy")
    # an entropy that is only watched costs nothing, where looking does not stall the device
    if "entropy" in at and (grad.is_cuda or g_entropy.any()):
        factor = log_p + entropy[:, None]
        factor.mul_(g_entropy[:, None]).add_(g_logprob[:, None])
        out = log_p.exp_().mul_(factor).neg_()
    else:
        out = log_p.exp_().mul_(-g_logprob[:, None])
    if shard.real_rows:
        row, here = _local_target(labels, shard)
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
) -> torch.Tensor:
    """Returns per-token outputs [T,K] in fp32 in the order of `outputs` (names of TOKEN_OUTPUTS);
    `columns` says where each stands. logprobs and entropy have gradients.

    hidden [T,H], weight [rows,H] of this shard, labels [T]. Peak memory is one chunk of logits
    [chunk_tokens, v] in fp32 with its softmax, whatever T is, and `keep_bytes` for logits that
    backward finds again where those of all T fit. Raises AssertionError for an unknown output, a
    weight of another number of rows, or a `topk` beyond the vocabulary.
    """
    assert outputs and set(outputs) <= set(TOKEN_OUTPUTS), outputs
    assert weight.shape[0] == shard.rows, (weight.shape, shard)
    assert topk <= shard.vocab_size < 1 << 24, (topk, shard)
    return _TokenOutputs.apply(
        hidden,
        weight,
        labels,
        shard,
        tuple(outputs),
        float(temperature),
        chunk_tokens,
        keep_bytes,
        topk,
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
