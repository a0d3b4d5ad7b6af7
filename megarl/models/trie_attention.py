"""Computes attention over a packed trie: a query attends to its ancestors' tokens and to its own
segment's up to itself. No mask of [T,T] exists.

A TriePlan, which is pure except for index tensors, makes it a few dense calls.
The segments of a trie stand depth-first, so every subtree is one range of tokens, and so is every
chain, which is a segment with its first child, that one's first child, and so on. A query attends
to its own chain up to itself, and in each chain that its path left, to the tokens before it left.
That makes two kinds of blocks:

own    queries and keys [a, b) of one chain, causal; these hold every token once
seen   queries [a, b) and keys [c, d), all with all: what comes after the first child of a segment,
       with the chain up to the segment's end; or a later tile of a chain, with the tiles before it

The answers of one query over several blocks are joined by their log-sum-exps. Their number is that
of the turns its path takes into a child that is not the first, and one more: a trie whose heaviest
child comes first has few. torch's CPU kernel computes all pairs of a causal block of up to 512
keys, of which half are used: long chains are cut into tiles, which need no more pairs than they use
but in the tile itself.

T packed tokens, nq query and nk key heads of this rank, d the size of a head.

On CPUs the blocks of a TriePlan go one by one through torch's flash kernel, which also returns the
log-sum-exp of the scores, and partial answers are joined by them (Dao et al., 2022, arXiv
2205.14135, section 3.1). The backward kernel computes a block's part of the gradients from the
joined answer and its log-sum-exp, so parts need only be added. On GPUs FlexAttention (Dong et al.,
2024, arXiv 2412.05496) does the same in one kernel, by a mask of blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megarl.models.attention_batching import SHORT
from megarl.parallel.packing import Segment
from megarl.parallel.worlds import pinned

TILE = 192


@dataclass(frozen=True)
class Own:
    """Describes n own blocks of `length` tokens each, one right after another from `start`."""

    start: int
    length: int
    n: int

    @property
    def end(self) -> int:
        """Returns where the last of the blocks ends."""
        return self.start + self.n * self.length

    def take(self, x: Tensor) -> Tensor:
        """Returns x [T,h,...] as these blocks, [n,h,length,...], a view."""
        return x[self.start : self.end].unflatten(0, (self.n, self.length)).transpose(1, 2)

    take_grad = take

    def put(self, total: Tensor, part: Tensor) -> None:
        """Writes the blocks [n,h,length,...] to their tokens in `total` [T,h,...]."""
        self.take(total).copy_(part)


@dataclass(frozen=True)
class Seen:
    """Describes queries [q_start, q_end) that attend to all keys [k_start, k_end)."""

    q_start: int
    q_end: int
    k_start: int
    k_end: int


@dataclass(frozen=True)
class Short:
    """Holds `n` short own blocks, padded to `length` tokens each by repeating the last.

    index [n * length]: the token of every row. rows [m]: the rows that are no padding, and tokens
    [m] their tokens.
    """

    n: int
    length: int
    index: Tensor
    rows: Tensor
    tokens: Tensor

    def take(self, x: Tensor) -> Tensor:
        """Returns x [T,h,...] as these blocks, [n,h,length,...]."""
        return x.index_select(0, self.index).unflatten(0, (self.n, -1)).transpose(1, 2)

    def take_grad(self, grad: Tensor) -> Tensor:
        """Returns the answers' gradient [T,h,d] as these blocks. That of padding is zero, and no
        other query sees padding, so padding adds nothing to any gradient."""
        padded = grad.new_zeros(len(self.index), *grad.shape[1:])
        padded.index_copy_(0, self.rows, grad.index_select(0, self.tokens))
        return padded.unflatten(0, (self.n, -1)).transpose(1, 2)

    def put(self, total: Tensor, part: Tensor) -> None:
        """Writes the blocks [n,h,length,...] to their tokens in `total` [T,h,...]."""
        rows = part.transpose(1, 2).flatten(0, 1).index_select(0, self.rows)
        total.index_copy_(0, self.tokens, rows.to(total.dtype))


@dataclass(frozen=True)
class TriePlan:
    """Says by which blocks the queries of `tokens` tokens meet their keys: `own`, and after them
    `seen`."""

    tokens: int
    own: tuple[Own | Short, ...]
    seen: tuple[Seen, ...]


def subtree_ends(segments: Sequence[Segment]) -> list[int]:
    """Returns where the subtree of each segment ends. Raises AssertionError for segments that do
    not stand depth-first, one right after another."""
    ends: list[int] = []
    path: list[int] = []  # from a root to the segment before
    for i, s in enumerate(segments):
        at = segments[i - 1].end if i else 0
        assert s.start == at <= s.end, f"segment {i} begins at {s.start} instead of {at}"
        while path and path[-1] != s.parent:
            path.pop()
        assert path or s.parent is None, f"segment {i} does not stand below {s.parent}"
        path.append(i)
        ends.append(s.end)
        for above in path:
            ends[above] = s.end
    return ends


def visible_until(segments: Sequence[Segment]) -> Tensor:
    """Returns for each token the end of its segment's subtree, int64 [T]. Token q attends to token
    k if and only if k <= q < visible_until[k]."""
    ends = torch.tensor(subtree_ends(segments))
    return torch.repeat_interleave(ends, torch.tensor([s.end - s.start for s in segments]))


def make_trie_plan(
    segments: Sequence[Segment], device: torch.device, *, tile: int = TILE, short: int = SHORT
) -> TriePlan:
    """Makes the plan of a trie of `segments`. Chains longer than 1.5 * `tile` tokens are cut into
    tiles of about that length; own blocks of up to `short` tokens are computed together. Raises
    AssertionError for segments that do not stand depth-first."""
    chains, seen = _chains(segments)
    own: list[tuple[int, int]] = []
    for start, end in chains:
        cuts = _tiles(start, end, tile)
        own += pairwise(cuts)
        seen += [Seen(a, b, start, a) for a, b in pairwise(cuts[1:])]
    runs = _runs(sorted(own))
    blocks: list[Own | Short] = [*runs]
    few = [run for run in runs if run.length <= short]
    if len(few) > 1:
        blocks = [*(run for run in runs if run.length > short), _short(few, device)]
    tokens = segments[-1].end if segments else 0
    return TriePlan(tokens, tuple(blocks), tuple(seen))


def _chains(segments: Sequence[Segment]) -> tuple[list[tuple[int, int]], list[Seen]]:
    """Returns the chains as ranges of tokens, and the blocks of what comes after first children."""
    ends = subtree_ends(segments)
    begins: list[int] = []  # of each segment, the start of its chain
    chains: dict[int, int] = {}
    seen: list[Seen] = []
    for i, s in enumerate(segments):
        follows = s.parent is not None and s.parent == i - 1
        begins.append(begins[i - 1] if follows else s.start)
        chains[begins[i]] = s.end
        first = i + 1 if i + 1 < len(segments) and segments[i + 1].parent == i else None
        if first is not None and ends[first] < ends[i] and s.end > begins[i]:
            seen.append(Seen(ends[first], ends[i], begins[i], s.end))
    return [(a, b) for a, b in chains.items() if b > a], seen


def _tiles(start: int, end: int, tile: int) -> list[int]:
    """Returns the borders of nearly equal tiles of [start, end)."""
    n = max(1, round((end - start) / tile))
    return [start + (end - start) * i // n for i in range(n + 1)]


def _runs(blocks: Sequence[tuple[int, int]]) -> list[Own]:
    """Returns blocks, which are in order, with those of one length that are neighbours as one."""
    runs: list[Own] = []
    for a, b in blocks:
        last = runs[-1] if runs else None
        if last is not None and (last.end, last.length) == (a, b - a):
            runs[-1] = Own(last.start, last.length, last.n + 1)
        else:
            runs.append(Own(a, b - a, 1))
    return runs


def _short(runs: Sequence[Own], device: torch.device) -> Short:
    starts = [r.start + i * r.length for r in runs for i in range(r.n)]
    lengths = [r.length for r in runs for _ in range(r.n)]
    start, length = torch.tensor([starts, lengths])[..., None]
    longest = max(lengths)
    at = torch.arange(longest)
    index = (start + torch.minimum(at, length - 1)).flatten()
    rows = (at < length).flatten().nonzero()[:, 0]
    parts = (pinned(x).to(device, non_blocking=True) for x in (index, rows, index[rows]))
    return Short(len(starts), longest, *parts)


BLOCK = 128  # tokens on a side of FlexAttention's blocks
VARIANTS = 64  # of the compiled kernel, at most

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def prepare(segments: Sequence[Segment], device: torch.device) -> Attend:
    """Returns attention over a trie of `segments`, as a function of q [T,nq,d], k [T,nk,d], v
    [T,nk,v] and the scale of the scores that returns [T,nq,v]; every layer can use it. Raises
    AssertionError for segments that do not stand depth-first."""
    if device.type == "cpu":
        return functools.partial(attend_by_blocks, make_trie_plan(segments, device))
    return functools.partial(_compiled_flex(), block_mask(segments, device))


def attend_by_blocks(plan: TriePlan, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Returns attention [T,nq,v] by the plan's blocks, on a CPU; see `prepare`. Equal to attention
    under a dense mask but for rounding; in bf16 parts are rounded before they are joined."""
    assert plan.tokens == len(q), f"a trie of {plan.tokens} tokens for {len(q)} queries"
    width = v.shape[-1]
    if width < k.shape[-1]:  # the kernel takes values of the keys' size
        v = F.pad(v, (0, k.shape[-1] - width))
    out: Tensor = _Blocks.apply(q, k, v, plan, scale)
    return out[..., :width]


class _Blocks(torch.autograd.Function):
    """Attends by the blocks of a plan: q [T,nq,d], k [T,nk,d], v [T,nk,d] -> [T,nq,d]."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, scale: float
    ) -> Tensor:
        out, lse = _forward(q, k, v, plan, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return (*_backward(grad, q, k, v, out, lse, ctx.plan, ctx.scale), None, None)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns the answers [T,nq,d] and their log-sum-exps [T,nq], float32."""
    # parts are joined in fp32; alone they are what the kernel returns
    out = q.new_empty(q.shape, dtype=torch.float32 if plan.seen else q.dtype)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    for block in plan.own:
        parts = _flash(*(block.take(x) for x in (q, k, v)), 0.0, True, scale=scale)
        for total, part in zip((out, lse), parts, strict=True):
            block.put(total, part)
    heads = [_heads(x) for x in (q, k, v)]
    for s in plan.seen:
        rows = slice(s.q_start, s.q_end)
        part, part_lse = _flash(*_of(s, *heads), 0.0, False, scale=scale)
        mine, other = lse[rows], part_lse[0].T
        out[rows].lerp_(_tokens(part).to(out.dtype), torch.sigmoid(other - mine)[..., None])
        lse[rows] = torch.logaddexp(mine, other)
    return out.to(q.dtype), lse


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: TriePlan,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v."""
    sums = [x.new_empty(x.shape, dtype=torch.float32 if plan.seen else x.dtype) for x in (q, k, v)]
    for block in plan.own:
        taken = (block.take_grad(grad), *(block.take(x) for x in (q, k, v, out, lse)))
        parts = _flash_backward(*taken, 0.0, True, scale=scale)
        for total, part in zip(sums, parts, strict=True):
            block.put(total, part)
    g_heads, q_heads, k_heads, v_heads, o_heads = (_heads(x) for x in (grad, q, k, v, out))
    l_heads = lse.T[None]
    for s in plan.seen:
        queries, keys = slice(s.q_start, s.q_end), slice(s.k_start, s.k_end)
        parts = _flash_backward(
            g_heads[:, :, queries],
            *_of(s, q_heads, k_heads, v_heads),
            *(o_heads[:, :, queries], l_heads[:, :, queries]),
            *(0.0, False),
            scale=scale,
        )
        for total, rows, part in zip(sums, (queries, keys, keys), parts, strict=True):
            total[rows] += _tokens(part)
    d_q, d_k, d_v = (total.to(q.dtype) for total in sums)
    return d_q, d_k, d_v


def _heads(x: Tensor) -> Tensor:
    """Returns x [T,n,d] as [1,n,T,d], a view."""
    return x.transpose(0, 1)[None]


def _tokens(x: Tensor) -> Tensor:
    """Returns x [1,n,L,d] as [L,n,d], a view."""
    return x[0].transpose(0, 1)


def _of(s: Seen, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keys = slice(s.k_start, s.k_end)
    return q[:, :, s.q_start : s.q_end], k[:, :, keys], v[:, :, keys]


def attend_by_mask(
    mask: BlockMask, q: Tensor, k: Tensor, v: Tensor, scale: float, flex: Any = flex_attention
) -> Tensor:
    """Returns attention [T,nq,v] by FlexAttention under `mask`; see `prepare`."""
    out = flex(
        *(_heads(x) for x in (q, k, v)),
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        # the kernel for few queries does not take every number of heads
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
    )
    return _tokens(out).contiguous()


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    """Returns attend_by_mask with the compiled kernel. Without the compiler FlexAttention computes
    all scores, and so it would after as many variants as the compiler makes of a function by
    default: several models of a process have several each (some tokens, any number, one block;
    with and without gradients). `fullgraph` makes that an error."""
    dynamo: Any = torch._dynamo.config
    dynamo.cache_size_limit = max(dynamo.cache_size_limit, VARIANTS)
    return functools.partial(attend_by_mask, flex=torch.compile(flex_attention, fullgraph=True))


def block_mask(segments: Sequence[Segment], device: torch.device) -> BlockMask:
    """Returns FlexAttention's mask of a trie: key k is seen by the queries q with k <= q <
    visible_until[k]. Which blocks are empty or full is found from the ends of subtrees, block by
    block: no mask of [T,T] exists. Raises AssertionError for segments that do not stand
    depth-first."""
    until = visible_until(segments)
    tokens = len(until)
    n = -(-tokens // BLOCK)
    ends = F.pad(until, (0, n * BLOCK - tokens), value=-1).view(n, BLOCK)
    begin = torch.arange(n) * BLOCK
    before = begin[None] < begin[:, None]  # [query block, key block]
    diagonal = torch.eye(n, dtype=torch.bool)
    some = (before & (ends.max(1).values > begin[:, None])) | diagonal
    # a block that reaches beyond the last token is left to the mask
    whole = begin + BLOCK <= tokens
    full = before & (ends.min(1).values >= (begin + BLOCK)[:, None]) & whole[:, None]
    # kernels may ask for keys beyond the last token
    on_device = pinned(ends.flatten()).to(device, non_blocking=True)

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < on_device[k])

    number, where, full_number, full_where = (
        pinned(x).to(device, non_blocking=True) for x in (*_listed(some & ~full), *_listed(full))
    )
    mask: BlockMask = BlockMask.from_kv_blocks(
        number,
        where,
        full_number,
        full_where,
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(tokens, tokens),
    )
    return mask


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Returns of each row of `chosen` [n,n] how many are true, [1,1,n], and where these are, before
    the others, [1,1,n,n]; int32."""
    order = torch.argsort(chosen.int(), dim=1, descending=True, stable=True)
    return chosen.sum(1).int()[None, None], order.int()[None, None]
