"""Computes log-probabilities, entropy, greedy match and top k from hidden states over a sharded
vocabulary.

The full logits never exist: tokens go through the vocabulary projection in chunks, and every chunk
is reduced over the shards to a few numbers per token. With logits l (already divided by the
temperature), Z = sum_j exp(l_j), p = exp(l) / Z:

    logprob(y) = l_y - log Z              d/dl_j = [j = y] - p_j
    entropy    = log Z - sum_j p_j l_j    d/dl_j = -p_j (log p_j + entropy)

Given tokens and the tail are in vocab_given.

No library's fused kernel gives these: the cross entropies of megatron-core 0.16
(fused_vocab_parallel_cross_entropy) and Transformer Engine take whole logits, keep as much for
backward, and know neither entropy nor temperature; Liger's starts from hidden states, but wants the
whole vocabulary on one rank.

T tokens, V vocabulary, v this rank's share of it (padding cut off), H hidden, k of the top, n given
ids per token, K numbers per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megarl.parallel import cpu_products as products
from megarl.parallel import vocab_given
from megarl.parallel.vocab_given import GivenGrad
from megarl.parallel.vocab_shard import VocabShard, local_target, rows_in_cache, top_k

# k numbers a token, n, all others one
TOP_LOGPROBS, TOP_IDS, TOP_TAIL = "topk_logprobs", "topk_ids", "topk_tail"
GIVEN_LOGPROBS, GIVEN_TAIL = "given_logprobs", "given_tail"
TOP = (TOP_LOGPROBS, TOP_IDS, TOP_TAIL)
GIVEN = (GIVEN_LOGPROBS, GIVEN_TAIL)  # about batch["given_ids"]
TAILS = (TOP_TAIL, GIVEN_TAIL)
TOKEN_OUTPUTS = ("logprobs", "entropy", "greedy_match", *TOP, *GIVEN)


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


def columns(outputs: Sequence[str], topk: int, given: int = 0) -> dict[str, slice]:
    """Returns where each output stands among the K numbers of a token; `given` is n."""
    widths, found, end = {TOP_LOGPROBS: topk, TOP_IDS: topk, GIVEN_LOGPROBS: given}, {}, 0
    for name in outputs:
        width = widths.get(name, 1)
        found[name] = slice(end, end + width)
        end += width
    return found


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
    if not set(TOP).isdisjoint(outputs):
        values[TOP_LOGPROBS], top_ids = top_k(logits, shard, topk)
        values[TOP_IDS] = top_ids.to(top.dtype)  # exact: below 2^24
    centred = logits.sub_(top[:, None])
    tails = {name: ids if name == GIVEN_TAIL else top_ids for name in TAILS if name in outputs}
    found = _summed(_parts(centred, labels, ids, tails, shard, outputs), shard)
    total, *weighted = found["sums"]
    log_total = total.log()
    values["logprobs"] = found["target"][0] - log_total
    values["entropy"] = log_total - weighted[0] / total if weighted else torch.zeros_like(total)
    for name, beside in tails.items():
        values[name] = vocab_given.tail(found[name][0], beside, log_total, shard)
    if GIVEN_LOGPROBS in outputs:
        values[GIVEN_LOGPROBS] = vocab_given.of_given(found[GIVEN_LOGPROBS], ids, log_total, shard)
    centred.sub_(log_total[:, None])
    log_z = log_total + top
    if TOP_LOGPROBS in values:
        values[TOP_LOGPROBS] = values[TOP_LOGPROBS] - log_z[:, None]
    numbers = [v if (v := values[o]).ndim == 2 else v[:, None] for o in outputs]
    tail = values.get(GIVEN_TAIL, torch.zeros_like(log_z))
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
    parts["target"] = vocab_given.own_logits(centred, labels[:, None], shard)
    for name, beside in tails.items():
        parts[name] = vocab_given.outside_sums(centred, beside, shard)[None]
    if GIVEN_LOGPROBS in outputs:
        parts[GIVEN_LOGPROBS] = vocab_given.own_logits(centred, ids, shard)
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
        ctx.how = shard, columns(outputs, topk, given.shape[1]), temperature, chunk
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        hidden, weight, labels, given, *whole = ctx.saved_tensors
        about = Kept(*whole)
        shard, at, temperature, chunk = ctx.how
        real = weight[: shard.real_rows]
        g_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        g_weight = None
        if ctx.needs_input_grad[1]:
            g_weight = weight.new_zeros(weight.shape, dtype=about.log_z.dtype)
        kept, ctx.kept = ctx.kept, []  # they are overwritten
        for i, lo in enumerate(range(0, len(hidden), chunk)):
            s = slice(lo, lo + chunk)
            log_p = g = None  # the chunk before is freed before this one is made
            if kept:
                log_p, kept[i] = kept[i], None
            else:
                log_p = _logits(hidden[s], real, temperature).sub_(about.log_z[s, None])
            of_chunk = Kept(*(numbers[s] for numbers in about))
            said = labels[s], given[s], of_chunk
            g = _grad_logits(log_p, *said, grad[s] / temperature, shard, at).to(hidden.dtype)
            if g_hidden is not None:
                g_hidden[s] = products.linear(g, real.t())
            if g_weight is not None:
                accumulate(g_weight[: shard.real_rows], g, hidden[s])
        if g_weight is not None:
            g_weight = g_weight.to(weight.dtype)
        return g_hidden, g_weight, *[None] * 8


def accumulate(total: torch.Tensor, g: torch.Tensor, h: torch.Tensor) -> None:
    """Adds g [c,v] transposed times h [c,H] to total [v,H]: a weight's gradient. The product has
    the dtype of its factors, the sum that of `total`."""
    if total.dtype == h.dtype and not products.takes(g, h):
        total.addmm_(g.t(), h)
    else:
        total += products.transposed_product(g, h)


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
    # an entropy that is only watched costs nothing, where looking does not stall the device
    if "entropy" in at and (grad.is_cuda or g_entropy.any()):
        factor = log_p + about.entropy[:, None]
        factor.mul_(g_entropy[:, None]).add_(g_logprob[:, None])
    else:
        factor = g_logprob[:, None].clone()
    if not at.keys().isdisjoint(GIVEN):
        g_ids = grad[:, at[GIVEN_LOGPROBS]] if GIVEN_LOGPROBS in at else torch.zeros_like(ids)
        out = GivenGrad(ids, about.tail, g_ids, of(GIVEN_TAIL)).logits_grad(log_p, factor, shard)
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
) -> torch.Tensor:
    """Returns per-token outputs [T,K] in fp32 in the order of `outputs` (names of TOKEN_OUTPUTS);
    `columns` says where each stands. logprobs, entropy and those of GIVEN have
    gradients.

    hidden [T,H], weight [rows,H] of this shard, labels [T]; given [T,n]: the ids of GIVEN. Peak
    memory is one chunk of logits [chunk_tokens, v] in fp32 with its softmax, whatever T is, and
    `keep_bytes` for logits that backward finds again where those of all T fit. Raises
    AssertionError for an unknown output, a weight of another number of rows, or a `topk` beyond the
    vocabulary.
    """
    assert outputs and set(outputs) <= set(TOKEN_OUTPUTS), outputs
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
