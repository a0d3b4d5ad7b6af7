"""Changes and FP8 blocks are the same bits on a GPU as on a host."""

from __future__ import annotations

import pytest
import torch

from megarl.weight_sync.receiver.megarl_receiver.messages import encode, land
from megarl.wire import block_fp8

SHAPE = (3000, 3000)


@pytest.mark.parametrize("part", (0.0, 0.01, 0.3, 1.0))
def test_changes_against_what_was_kept(part: float) -> None:
    torch.manual_seed(0)
    old = torch.randn(SHAPE, dtype=torch.bfloat16, device="cuda")
    new = torch.where(torch.rand(SHAPE, device="cuda") < part, -old, old)
    sizes, kept = [(2, old.nbytes)], old.cpu().flatten().view(torch.uint8)
    d = encode(new.flatten().view(torch.uint8), kept, sizes)
    on_cpu = encode(new.cpu().flatten().view(torch.uint8), kept, sizes)
    assert d.rows == on_cpu.rows and d.changed == on_cpu.changed
    assert d.payload.is_cuda and torch.equal(d.payload.cpu(), on_cpu.payload)
    if d.changed:
        view = (0, old.nbytes, torch.bfloat16, "w", 0, list(SHAPE), [SHAPE[1], 1])
        land({"w": old}, [view], d.message(), len(d.rows))
    assert torch.equal(old, new)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_blocks_are_a_hosts(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(SHAPE) * torch.logspace(-6, 3, SHAPE[1])).to(dtype)
    q, s = block_fp8.quantize(weight)
    on_gpu_q, on_gpu_s = block_fp8.quantize(weight.cuda())
    assert torch.equal(on_gpu_s.cpu(), s)
    assert torch.equal(on_gpu_q.cpu().view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(block_fp8.dequantize(on_gpu_q, on_gpu_s).cpu(), block_fp8.dequantize(q, s))
