"""Encodes a gathered bucket for sending: as it is, in FP8, or as changes alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megarl.transfer.gather import Bucket, Member
from megarl.wire import block_fp8
from megarl.wire.delta import Delta, encode

# A delta longer than this part of its bucket does not pay: whole buckets are received in place.
PAYS = 0.75
Spec = tuple[str, tuple[int, ...], torch.dtype]


@dataclass
class Ready:
    """A gathered bucket, ready to be sent.

    flat: its bytes. tensors: what is sent of it, none where nothing changed. changes: how a server
    applies a bucket of changes. compared, changed: how many numbers were compared with the version
    before, and how many differ.
    """

    bucket: Bucket
    flat: torch.Tensor
    tensors: Sequence[torch.Tensor] = ()
    changes: dict[str, Any] | None = None
    compared: int = 0
    changed: int = 0

    def extra_bytes(self, buffers: Sequence[torch.Tensor]) -> int:
        """Returns the bytes of memory that lies outside of `buffers`: FP8, changes."""
        storages = {
            s.data_ptr(): s for t in (self.flat, *self.tensors) if (s := t.untyped_storage())
        }
        for buffer in buffers:
            storages.pop(buffer.untyped_storage().data_ptr(), None)
        return sum(s.nbytes() for s in storages.values())


class DeltaBase:
    """Keeps copies of the buckets of the last sync that all servers acknowledged. On senders only.

    id: the servers' name for it; None before the first sync, and during and after one that failed.
    plan: digest of the plan that made the buckets. Memory: all weights in the dtypes they are sent
    in, pinned host memory or beside the parameters.
    """

    def __init__(self) -> None:
        self._held: dict[int, torch.Tensor] = {}
        self.id: str | None = None
        self.plan = ""

    def forget(self) -> None:
        """Drops the copies: the next sync sends whole buckets."""
        self._held.clear()
        self.id = None

    def begin(self, plan: str) -> str | None:
        """Returns the id that the new sync's changes are against, None for whole buckets."""
        base, self.id, self.plan = self.id, None, plan
        return base

    def changes(self, bucket: Bucket, flat: torch.Tensor) -> Delta:
        """Returns how `flat`, uint8 [nbytes], differs from its copy, which must have been kept."""
        sizes = [(m.dtype.itemsize, m.nbytes) for m in bucket.members]
        return encode(flat, self._held[bucket.index], sizes)

    def keep(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Copies `flat` into host memory, pinned where it comes from a GPU."""
        held = self._held.get(bucket.index)
        if held is None:
            pin = flat.device.type == "cuda"
            held = self._held[bucket.index] = torch.empty_like(flat, device="cpu", pin_memory=pin)
        held.copy_(flat, non_blocking=True)


@dataclass(frozen=True)
class Changes:
    """The copies that senders keep, where all servers can apply changes to the same weights.

    base: the servers' name for what they hold, None where it is something else; id: the name for
    what they will hold.
    """

    remembered: DeltaBase
    base: str | None
    id: str

    def encode(self, ready: Ready, *, last: bool) -> Ready:
        """Returns `ready` with its changes alone where that pays, and remembers its bytes. The last
        bucket is sent in any case, for it carries the version."""
        bucket, flat = ready.bucket, ready.flat
        if self.base is not None:
            delta = self.remembered.changes(bucket, flat)
            ready.compared, ready.changed = delta.count, delta.changed
            if not delta.changed and not last:
                ready.tensors = ()
                return ready
            if delta.payload.numel() < PAYS * bucket.nbytes:
                ready.tensors = [delta.payload]
                ready.changes = {"base": self.base, "chunks": delta.body()}
        self.remembered.keep(bucket, flat)
        return ready


def quantized(bucket: Bucket) -> Bucket:
    """Returns the bucket with its linear maps in block-wise FP8, their scales beside them."""
    specs = sorted(_specs(bucket), key=lambda s: -s[2].itemsize)  # keeps offsets aligned
    members, end = [], 0
    for name, shape, dtype in specs:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        members.append(Member(name, shape, dtype, end, nbytes))
        end += nbytes
    return Bucket(bucket.index, tuple(members), end)


def quantize_bucket(bucket: Bucket, flat: torch.Tensor) -> tuple[Bucket, torch.Tensor]:
    """Returns `quantized(bucket)` and its bytes, uint8 [nbytes] in memory of their own."""
    target = quantized(bucket)
    out = torch.empty(target.nbytes, dtype=torch.uint8, device=flat.device)
    views = dict(target.views(out))
    linear = {m.name for m in bucket.members if m.linear}
    for name, tensor in bucket.views(flat):
        if name in linear:
            q, s = block_fp8.quantize(tensor)
            views[name].copy_(q)
            views[name + block_fp8.SUFFIX].copy_(s)
        else:
            views[name].copy_(tensor)
    return target, out


def _specs(bucket: Bucket) -> Iterator[Spec]:
    for m in bucket.members:
        if m.linear:
            yield m.name, m.shape, torch.float8_e4m3fn
            yield m.name + block_fp8.SUFFIX, block_fp8.scale_shape(m.shape), torch.float32
        else:
            yield m.name, m.shape, m.dtype
