"""Defines flat buckets: HF tensors one after another in one buffer of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Member:
    """Places an HF tensor at bytes [offset, offset + nbytes) of its bucket. `linear`: it is a
    linear map of a layer, which may be sent in FP8."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    nbytes: int
    linear: bool = False


@dataclass(frozen=True, slots=True)
class Bucket:
    """Lists `members` in HF order, without overlaps, in `nbytes` bytes."""

    index: int
    members: tuple[Member, ...]
    nbytes: int

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yields (HF name, view) of the flat uint8 bucket, in HF order, without copies."""
        for m in self.members:
            data = flat[m.offset : m.offset + m.nbytes]
            yield m.name, data.view(m.dtype).view(m.shape)
