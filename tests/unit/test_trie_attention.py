"""Attention over packed tries, against a dense mask: forward and gradients."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.models.trie_attention import (
    TriePlan,
    attend_by_blocks,
    attend_by_mask,
    block_mask,
    make_trie_plan,
)
from megarl.parallel.packing import Segment

CPU = torch.device("cpu")


def random_trie(seed: int, longest: int, children: int = 3, depth: int = 3) -> list[Segment]:
    """Several roots; segments of 1 to `longest` tokens with up to `children` children each."""
    rng, out = random.Random(seed), list[Segment]()

    def grow(parent: int | None, left: int) -> None:
        start = out[-1].end if out else 0
        out.append(Segment(start, start + rng.randint(1, longest), parent))
        me = len(out) - 1
        for _ in range(rng.randint(0, children) if left else 0):
            grow(me, left - 1)

    for _ in range(3):
        grow(None, depth)
    return out


TRIES = {
    "flat": [Segment(0, 5, None), Segment(5, 6, None), Segment(6, 40, None)],
    "group": [Segment(0, 50, None), *(Segment(50 + 9 * i, 59 + 9 * i, 0) for i in range(6))],
    "chain": [Segment(0, 200, None), Segment(200, 230, 0), Segment(230, 500, 1)],
    "random": random_trie(1, 40),
    "short": random_trie(2, 3, depth=5),
    "long": random_trie(3, 150, depth=2),
}


def dense(segments: list[Segment]) -> Tensor:
    """The mask [T,T] by its definition."""
    mask = torch.zeros(segments[-1].end, segments[-1].end, dtype=torch.bool)
    for s in segments:
        mask[s.start : s.end, s.start : s.end] = torch.ones(s.end - s.start, s.end - s.start).tril()
        above = s.parent
        while above is not None:
            mask[s.start : s.end, segments[above].start : segments[above].end] = True
            above = segments[above].parent
    return mask


def draw(tokens: int, nq: int, nk: int, d: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((nq, d), (nk, d), (nk, width), (nq, width))
    return [torch.randn(tokens, *s).to(dtype) for s in shapes]


def by_dense_mask(mask: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def blocks(plan: TriePlan) -> Iterator[tuple[slice, slice, bool]]:
    for o in plan.own:
        for at in range(o.start, o.end, o.length):
            yield slice(at, at + o.length), slice(at, at + o.length), True
    yield from ((slice(s.q_start, s.q_end), slice(s.k_start, s.k_end), False) for s in plan.seen)


@pytest.mark.parametrize("segments", TRIES.values(), ids=TRIES)
def test_blocks_hold_every_pair_of_query_and_key_once(segments: list[Segment]) -> None:
    want = dense(segments)
    plan = make_trie_plan(segments, CPU, tile=64, short=0)
    count = torch.zeros(want.shape, dtype=torch.long)
    for queries, keys, causal in blocks(plan):
        part = torch.ones_like(count[queries, keys])
        count[queries, keys] += part.tril() if causal else part
    assert torch.equal(count, want.long())


@pytest.mark.parametrize("heads", ((4, 2, 16, 16), (2, 2, 24, 16)), ids=("grouped", "values"))
@pytest.mark.parametrize("name", TRIES)
def test_blocks_equal_a_dense_mask(name: str, heads: tuple[int, int, int, int]) -> None:
    """To 1e-5 of the largest number: sums of up to some hundred terms in another order."""
    segments = TRIES[name]
    *qkv, grad = draw(segments[-1].end, *heads, torch.float32)
    plan = make_trie_plan(segments, CPU, tile=64)
    scale = 1 / math.sqrt(heads[2])
    results = []
    for attend, how in ((attend_by_blocks, plan), (by_dense_mask, dense(segments))):
        leaves = [x.clone().requires_grad_() for x in qkv]
        out = attend(how, *leaves, scale)  # type: ignore[operator]
        results.append((out, *torch.autograd.grad(out, leaves, grad)))
    for got, want in zip(*results, strict=True):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("name", ("random", "long"))
def test_blocks_in_bf16_are_as_near_as_one_kernel(name: str) -> None:
    """Distances to fp32 are compared: joining parts may not cost more than half of what the dense
    mask in bf16 loses itself."""
    segments = TRIES[name]
    *qkv, grad = draw(segments[-1].end, 4, 2, 16, 16, torch.bfloat16)
    plan, mask = make_trie_plan(segments, CPU, tile=64), dense(segments)

    def run(attend, how, dtype):  # type: ignore[no-untyped-def]
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in qkv]
        out = attend(how, *leaves, 0.25)
        return [x.float() for x in (out, *torch.autograd.grad(out, leaves, grad.to(dtype)))]

    exact = run(by_dense_mask, mask, torch.float32)
    theirs = run(by_dense_mask, mask, torch.bfloat16)
    ours = run(attend_by_blocks, plan, torch.bfloat16)
    for x, y, z in zip(exact, theirs, ours, strict=True):
        assert (z - x).norm() <= 1.5 * (y - x).norm()


@pytest.mark.parametrize("name", TRIES)
def test_flex_attention_s_mask_is_the_dense_one(name: str) -> None:
    segments = TRIES[name]
    mask = block_mask(segments, CPU)
    n = segments[-1].end
    at = torch.arange(n)
    zero = torch.tensor(0)
    assert torch.equal(mask.mask_mod(zero, zero, at[:, None], at[None]), dense(segments))
    *qkv, _ = draw(n, 4, 2, 16, 16, torch.float32)
    got, want = attend_by_mask(mask, *qkv, 0.25), by_dense_mask(dense(segments), *qkv, 0.25)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_blocks_that_flex_attention_skips_or_takes_whole() -> None:
    """Not seen by the eager kernel above, which asks the mask for every pair."""
    for segments in (random_trie(4, 200), random_trie(5, 400, depth=1), TRIES["chain"]):
        mask, want = block_mask(segments, CPU), dense(segments)
        pad = -len(want) % 128
        tiles = F.pad(want, (0, pad, 0, pad)).unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        some, every = tiles.any(3).any(1), tiles.all(3).all(1)
        full = torch.zeros_like(some)
        for listed, number, index in (
            (some & ~every, mask.kv_num_blocks, mask.kv_indices),
            (every, mask.full_kv_num_blocks, mask.full_kv_indices),
        ):
            assert number is not None and index is not None
            for row in range(len(some)):
                full[row] = False
                full[row, index[0, 0, row, : number[0, 0, row]].long()] = True
                assert torch.equal(full[row], listed[row])


def test_segments_out_of_order_are_an_error() -> None:
    with pytest.raises(AssertionError, match="segment 1 begins at 6 instead of 5"):
        make_trie_plan([Segment(0, 5, None), Segment(6, 7, 0)], CPU)
    with pytest.raises(AssertionError, match="segment 2 does not stand below 0"):
        make_trie_plan([Segment(0, 5, None), Segment(5, 7, None), Segment(7, 8, 0)], CPU)
