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

On GPUs, Triton kernels (megarl/kernels/lm_head.py) read a chunk's logits in the model's dtype once,
and write their gradient over them; the torch functions here are their twins, which widen them to
fp32. Collectives are the same.

No library's fused kernel gives these: the cross entropies of megatron-core 0.16
(fused_vocab_parallel_cross_entropy) and Transformer Engine take whole logits, keep as much for
backward, and know neither entropy nor temperature; Liger's starts from hidden states, but wants the
whole vocabulary on one rank.

T tokens, c of them in a chunk, V vocabulary, v this rank's share of it (padding cut off), H hidden,
k of the top, n given ids per token, K numbers per token.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.api.engine import GIVEN, OUTPUTS
from megarl.kernels import given_tokens
from megarl.parallel import cpu_kernels as products

log = logging.getLogger(__name__)

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


def _rows(ids: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """Returns this shard's row of every id, -1 where another has it."""
    row, here = local_target(ids.long(), shard)
    return row.masked_fill_(~here, -1).contiguous()


def by_kernels(x: torch.Tensor) -> bool:
    """Returns whether Triton kernels reduce logits of x's dtype on x's device: on a GPU where
    triton is installed, on a CPU under its interpreter (TRITON_INTERPRET=1, set before anything
    imports triton). fp64 is torch's."""
    if x.dtype == torch.float64:
        return False
    return (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1") and _has_triton()


@cache
def _has_triton() -> bool:
    installed = find_spec("triton") is not None
    if not installed:
        log.warning("triton is not installed: torch reduces the logits, in several reads")
    return installed


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


def own_logits(centred: Tensor, ids: Tensor, shard: VocabShard) -> Tensor:
    """Returns [n,c]: the entries of centred [c,v] at ids [c,n], 0 where another shard has them.
    Their sum over the shards is the whole."""
    if not shard.real_rows:
        return centred.new_zeros(ids.shape[::-1])
    row, here = local_target(ids.long(), shard)
    return torch.where(here, centred.gather(-1, row), 0.0).t()


_TAILS = ("topk_tail", "given_tail")


class Kept(NamedTuple):
    """Holds what backward keeps of every token, [c] or [T] each: entropy and tail are 0 where they
    are not asked for."""

    log_z: torch.Tensor
    entropy: torch.Tensor
    tail: torch.Tensor


def _logits(
    h: torch.Tensor, weight: torch.Tensor, temperature: float, rows: int, kernels: bool = False
) -> torch.Tensor:
    """Returns the logits [c,v] of the first rows of the weight: the product in the model's dtype,
    as in inference, then in fp32 (or fp64) and divided by the temperature; for kernels as it is.

    The result is fresh memory, so that callers may change it in place.
    """
    if kernels:  # with the padding: each token's logits begin at a multiple of 16 bytes
        return products.linear(h, weight)[:, :rows]
    product = products.linear(h, weight[:rows])
    wide = product.to(torch.promote_types(product.dtype, torch.float32))
    return wide if temperature == 1.0 else wide.div_(temperature)


def _greedy_match(
    here: torch.Tensor, where: torch.Tensor, labels: torch.Tensor, shard: VocabShard
) -> torch.Tensor:
    """Returns whether the label is the argmax, [c]; of equals the lowest id wins. here [c]: whether
    this shard has the largest logit; `where`: its row."""
    winner = torch.where(here, where + shard.start, shard.vocab_size)
    return shard.all_reduce(winner.to(labels.dtype), dist.ReduceOp.MIN) == labels


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
    scale: float | None,
) -> tuple[torch.Tensor, Kept]:
    """Reduces [c,v] logits to [c,K] outputs and what backward keeps. ids [c,n]: the given ones.
    scale: what kernels multiply logits by; None: they are scaled, and torch changes them in place
    to log p.

    There are two collectives, one more for greedy_match and one for the top k.
    """
    values = {}
    if any(name.startswith("topk_") for name in outputs):
        highest, top_ids = top_k(logits, shard, topk)
        values["topk_logprobs"] = highest if scale is None else highest * scale
        exact = torch.promote_types(logits.dtype, torch.float32)  # ids are below 2^24
        values["topk_ids"] = top_ids.to(exact)
    # ids whose logits are wanted beside the sums over the vocabulary, by the names of their parts
    wanted = {"target": labels[:, None]}
    wanted |= {name: ids if name == "given_tail" else top_ids for name in _TAILS if name in outputs}
    if "given_logprobs" in outputs:
        wanted["given_logprobs"] = ids
    weighted, greedy = "entropy" in outputs, "greedy_match" in outputs
    if scale is None:
        largest, winner = _largest(logits, shard, greedy=greedy)
    else:
        from megarl.kernels import lm_head

        rows = {name: _rows(about, shard) for name, about in wanted.items()}
        read = lm_head.read(logits, rows, _TAILS, scale, entropy=weighted, greedy=greedy)
        largest, winner = read.largest, read.winner
    top = shard.all_reduce(largest.clone(), dist.ReduceOp.MAX)
    if winner is not None:
        match = _greedy_match(largest == top, winner, labels, shard)
        values["greedy_match"] = match.to(top.dtype)
    if scale is None:
        parts = _parts(logits.sub_(top[:, None]), wanted, shard, weighted=weighted)
    else:
        parts = read.parts(top)
    sizes = [len(part) for part in parts.values()]
    whole = shard.all_reduce(torch.cat(list(parts.values())), dist.ReduceOp.SUM)
    summed = dict(zip(parts, whole.split(sizes), strict=True))
    total, *weighted_sum = summed["sums"]
    log_total = total.log()
    values["logprobs"] = summed["target"][0] - log_total
    zero = torch.zeros_like(total)
    values["entropy"] = log_total - weighted_sum[0] / total if weighted_sum else zero
    for name in wanted.keys() & _TAILS:
        ends = _known(wanted[name], shard).sum(-1) >= shard.vocab_size
        values[name] = given_tokens.tail_logprob(summed[name][0], ends, log_total)
    if "given_logprobs" in outputs:
        own = summed["given_logprobs"].t() - log_total[:, None]
        values["given_logprobs"] = torch.where(_known(ids, shard), own, -torch.inf)
    if scale is None:
        logits.sub_(log_total[:, None])
    log_z = log_total + top
    if "topk_logprobs" in values:
        values["topk_logprobs"] = values["topk_logprobs"] - log_z[:, None]
    numbers = [v if (v := values[o]).ndim == 2 else v[:, None] for o in outputs]
    tail = values.get("given_tail", zero)
    return torch.cat(numbers, -1), Kept(log_z, values["entropy"], tail)


def _known(ids: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    return (ids >= 0) & (ids < shard.vocab_size)


def _parts(
    centred: torch.Tensor, wanted: dict[str, torch.Tensor], shard: VocabShard, *, weighted: bool
) -> dict[str, torch.Tensor]:
    """Returns this shard's part of what is summed over the shards, [.,c] each."""
    parts = {"sums": _exp_sums(centred, weighted=weighted)}
    for name, ids in wanted.items():
        if name in _TAILS:
            row, here = local_target(ids.long(), shard)
            rows = rows_in_cache(centred)
            parts[name] = given_tokens.outside_sums(centred, row, here, rows)[None]
        else:
            parts[name] = own_logits(centred, ids, shard)
    return parts


def _largest(
    logits: torch.Tensor, shard: VocabShard, *, greedy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the largest of this shard's [c,v] logits, [c], and if asked for its lowest row."""
    if not shard.real_rows:
        least = logits.new_full(logits.shape[:1], float("-inf"))
        return least, least.long() if greedy else None
    if greedy:
        return logits.max(-1)
    return logits.amax(-1), None


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
        scale = 1.0 / temperature if by_kernels(hidden) else None
        parts, about, ctx.kept = [], [], []
        wide = torch.promote_types(hidden.dtype, torch.float32)
        size = (hidden.dtype if scale else wide).itemsize
        keep = any(ctx.needs_input_grad) and len(hidden) * shard.real_rows * size <= keep_bytes
        x = None
        cut = zip(hidden.split(chunk), labels.split(chunk), given.split(chunk), strict=True)
        for h, y, ids in cut:
            x = None  # the chunk before is freed before this one is made
            x = _logits(h, weight, temperature, shard.real_rows, scale is not None)
            part, of_chunk = _reduce_chunk(x, y, ids, shard, outputs, topk, scale)
            parts.append(part)
            about.append(of_chunk)
            if keep:
                ctx.kept.append(x)
        whole = [torch.cat(each) for each in zip(*about, strict=True)]
        ctx.save_for_backward(hidden, weight, labels, given, *whole)
        ctx.how = shard, columns(outputs, topk, given.shape[1]), temperature, chunk, used, scale
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        hidden, weight, labels, given, *whole = ctx.saved_tensors
        about = Kept(*whole)
        shard, at, temperature, chunk, used, scale = ctx.how
        at = {name: where for name, where in at.items() if name != "entropy" or name in used}
        real = weight[: shard.real_rows]
        g_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        g_weight = None
        if ctx.needs_input_grad[1]:
            g_weight = weight.new_zeros(weight.shape, dtype=about.log_z.dtype)
        logits, ctx.kept = ctx.kept, []  # they are overwritten
        for i, lo in enumerate(range(0, len(hidden), chunk)):
            s = slice(lo, lo + chunk)
            x = g = None  # the chunk before is freed before this one is made
            if logits:
                x, logits[i] = logits[i], None
            else:
                x = _logits(hidden[s], weight, temperature, len(real), scale is not None)
                x = x.sub_(about.log_z[s, None]) if scale is None else x
            of_chunk = Kept(*(numbers[s] for numbers in about))
            targets = labels[s], given[s], of_chunk
            g = _grad_logits(x, *targets, grad[s] / temperature, shard, at, scale).to(hidden.dtype)
            if g_hidden is not None:
                g_hidden[s] = products.linear(g, real.t())
            if g_weight is not None:
                products.accumulate(hidden[s], g, g_weight[: shard.real_rows])
        if g_weight is not None:
            g_weight = g_weight.to(weight.dtype)
        return g_hidden, g_weight, *[None] * 9


def _grad_logits(
    x: torch.Tensor,
    labels: torch.Tensor,
    ids: torch.Tensor,
    about: Kept,
    grad: torch.Tensor,
    shard: VocabShard,
    at: dict[str, slice],
    scale: float | None,
) -> torch.Tensor:
    """Returns the gradient [c,v] of the divided logits, for `grad` [c,K] of the outputs, which
    stand `at` columns. Overwrites x: log p, or with a scale the logits, of which kernels take it.
    """

    def of(name: str) -> torch.Tensor:
        return grad[:, at[name].start] if name in at else torch.zeros_like(grad[:, 0])

    g_logprob, g_entropy = of("logprobs"), of("entropy")
    given = None
    if not at.keys().isdisjoint(GIVEN):
        g_ids = grad[:, at["given_logprobs"]] if "given_logprobs" in at else torch.zeros_like(ids)
        g_tokens = torch.where(_known(ids, shard), g_ids, 0.0)
        given = given_tokens.grads(g_tokens, about.tail, of("given_tail"))
    if scale is not None:
        from megarl.kernels import lm_head

        grads = g_logprob.contiguous(), g_entropy.contiguous() if "entropy" in at else None
        rows, by_ids = _rows(labels, shard), given and (_rows(ids, shard), given)
        return lm_head.gradient_(x, rows, about.log_z, about.entropy, *grads, scale, by_ids)
    if "entropy" in at:
        factor = x + about.entropy[:, None]
        factor.mul_(g_entropy[:, None]).add_(g_logprob[:, None])
    else:
        factor = g_logprob[:, None].clone()
    if given is not None:
        out = given_tokens.logits_grad(x, factor, *local_target(ids.long(), shard), given)
    else:
        out = x.exp_().mul_(factor.neg_())
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
    memory is one chunk of logits [chunk_tokens, v] in fp32 with its softmax, with kernels in the
    model's dtype alone, whatever T is, and `keep_bytes` for logits that backward finds again where
    those of all T fit. used: outputs
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
    local = _logits(hidden, weight, temperature, len(weight))
    if shard.group is not None and shard.group.size() > 1:
        parts = [torch.empty_like(local) for _ in range(shard.group.size())]
        dist.all_gather(parts, local.contiguous(), group=shard.group)
        local = torch.cat(parts, -1)
    return local[:, : shard.vocab_size]
