"""The reduce-scatter of sequence parallelism over gloo against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.parallel.cpu_collectives import reduce_scatter


def both_ways(dtype: torch.dtype, async_op: bool) -> tuple[torch.Tensor, torch.Tensor]:
    n, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(rank)
    whole = torch.randn(3 * n, 2, 5).to(dtype).transpose(1, 2)  # not contiguous
    mine, torchs = (torch.empty(3, 5, 2, dtype=dtype) for _ in range(2))
    later = reduce_scatter(mine, whole, async_op=async_op)
    assert (later is not None) == async_op
    if later is not None:
        later.wait()
        later.wait()
    dist.reduce_scatter_tensor(torchs, whole.contiguous())
    return mine, torchs


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_rank_gets_its_part_of_the_sum(worlds: Any, dtype: Any, async_op: bool) -> None:
    # bf16: torch rounds the sum at every step, here it is rounded once; four terms below ten
    bound = 1e-6 if dtype == torch.float32 else 0.1
    for mine, torchs in worlds(4).run(both_ways, dtype, async_op):
        torch.testing.assert_close(mine, torchs, atol=bound, rtol=1e-6 if bound < 0.1 else 0.02)
