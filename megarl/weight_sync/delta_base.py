"""What the servers hold, as the sender remembers it."""

from __future__ import annotations

import torch

from megarl.wire.buckets import Bucket
from megarl.wire.delta import Delta, encode

# A delta longer than this part of its bucket does not pay: whole buckets are received in place.
PAYS = 0.75


class DeltaBase:
    """Copies of the buckets of the last sync that all servers acknowledged. On the owner only.

    id:   the servers' name for it. None before the first, during and after one that failed.
    plan: digest of the plan that made the buckets.
    Memory: all weights in the dtypes they are sent in, pinned host memory or beside the parameters.
    """

    def __init__(self) -> None:
        self._held: dict[int, torch.Tensor] = {}
        self.id: str | None = None
        self.plan = ""

    def forget(self) -> None:
        self._held.clear()
        self.id = None

    def begin(self, plan: str) -> str | None:
        """The id changes are made against in the sync that begins, None for whole buckets."""
        base, self.id, self.plan = self.id, None, plan
        return base

    def changes(self, bucket: Bucket, flat: torch.Tensor) -> Delta:
        sizes = [(m.dtype.itemsize, m.nbytes) for m in bucket.members]
        return encode(flat, self._held[bucket.index], sizes)

    def keep(self, bucket: Bucket, flat: torch.Tensor, *, on_host: bool) -> None:
        held = self._held.get(bucket.index)
        if held is None:
            held = self._held[bucket.index] = _empty_like(flat, on_host=on_host)
        held.copy_(flat, non_blocking=True)


def _empty_like(flat: torch.Tensor, *, on_host: bool) -> torch.Tensor:
    if on_host and flat.device.type == "cuda":
        return torch.empty_like(flat, device="cpu", pin_memory=True)
    return torch.empty_like(flat)
