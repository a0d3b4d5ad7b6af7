"""Attention over packed tries by FlexAttention's compiled kernels, against a dense mask."""

from __future__ import annotations

import pytest
import torch

from megarl.models.trie_attention import prepare
from tests.unit.test_trie_attention import by_dense_mask, dense, draw, random_trie

# the second and third trie take the kernel for any number of tokens, the last has one block
TRIES = [random_trie(1, 150), random_trie(2, 90), random_trie(3, 40), random_trie(4, 4, depth=1)]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_kernels_equal_a_dense_mask(dtype: torch.dtype) -> None:
    """In fp32 to 1e-4 of the largest number; in bf16 as near to fp32 as the dense mask in bf16, but
    for half of that."""
    device = torch.device("cuda")
    for segments in TRIES:
        *qkv, grad = (x.to(device) for x in draw(segments[-1].end, 4, 2, 64, 64, dtype))
        mask, attend = dense(segments).to(device), prepare(segments, device)

        def run(attend, how, dtype):  # type: ignore[no-untyped-def]
            leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in qkv]  # noqa: B023
            out = attend(*how, *leaves, 0.125)
            parts = torch.autograd.grad(out, leaves, grad.to(dtype))  # noqa: B023
            return [x.float() for x in (out, *parts)]

        exact = run(by_dense_mask, [mask], torch.float32)
        theirs = run(by_dense_mask, [mask], dtype)
        for x, y, z in zip(exact, theirs, run(attend, [], dtype), strict=True):
            assert (z - x).norm() <= max(1e-4 * x.norm(), 1.5 * (y - x).norm())


def test_without_gradients() -> None:
    device = torch.device("cuda")
    *qkv, _ = (x.to(device) for x in draw(TRIES[0][-1].end, 4, 2, 64, 64, torch.bfloat16))
    with torch.no_grad():
        got = prepare(TRIES[0], device)(*qkv, 0.125)
        want = by_dense_mask(dense(TRIES[0]).to(device), *qkv, 0.125)
    assert (got - want).norm() <= 0.01 * want.norm()
