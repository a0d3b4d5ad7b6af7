"""A gathered bucket in the form it is sent in, where that is not the trainer's."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megarl.wire import block_fp8
from megarl.wire.buckets import Bucket, Member

Spec = tuple[str, tuple[int, ...], torch.dtype]


def quantized(bucket: Bucket) -> Bucket:
    """The bucket with its linear maps in block-wise FP8, their scales beside them."""
    specs = sorted(_specs(bucket), key=lambda s: -s[2].itemsize)  # keeps offsets aligned
    members, end = [], 0
    for name, shape, dtype in specs:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        members.append(Member(name, shape, dtype, end, nbytes))
        end += nbytes
    return Bucket(bucket.index, tuple(members), end)


def quantize_bucket(bucket: Bucket, flat: torch.Tensor) -> tuple[Bucket, torch.Tensor]:
    """`flat` as `quantized(bucket)`, in memory of its own."""
    target = quantized(bucket)
    out = torch.empty(target.nbytes, dtype=torch.uint8, device=flat.device)
    views = dict(target.views(out))
    for name, tensor in bucket.views(flat):
        if block_fp8.is_linear(name):
            q, s = block_fp8.quantize(tensor)
            views[name].copy_(q)
            views[name + block_fp8.SUFFIX].copy_(s)
        else:
            views[name].copy_(tensor)
    return target, out


def _specs(bucket: Bucket) -> Iterator[Spec]:
    for m in bucket.members:
        if block_fp8.is_linear(m.name):
            yield m.name, m.shape, torch.float8_e4m3fn
            yield m.name + block_fp8.SUFFIX, block_fp8.scale_shape(m.shape), torch.float32
        else:
            yield m.name, m.shape, m.dtype
