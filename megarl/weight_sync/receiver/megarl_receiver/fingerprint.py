"""Hashes weights where they lie, so that the hash does not depend on how they are cut.

The hash of a tensor is the sum of its elements' bits, each times an odd number that depends on the
element's place in the tensor, modulo 2^64. So the hashes of boxes that make up a tensor add up to
its own: every holder sums over what it has, on its own device, and no weight travels. For a [2, 2]
tensor of bits b, with an odd number r for each row and c for each column:

    hash = b00 r0 c0 + b01 r0 c1 + b10 r1 c0 + b11 r1 c1
           `- the box of row 0 -'  `- the box of row 1 -'

A tensor with one changed element never has the same hash: a difference that is not 0, times an odd
number, is not 0 modulo 2^64. It finds what differs by accident, and is no defence against somebody
who wants it to be equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# elements whose bits are widened to 64 at once: those of a cache, and more
ON_HOST, ON_DEVICE = 1 << 16, 1 << 22
_GOLDEN, _MIX, _MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685


@torch.no_grad()
def tensor_hash(
    values: Tensor, start: Sequence[int] = (), casts: Sequence[torch.dtype] = ()
) -> Tensor:
    """Returns the hash, [] int64, of the box of a tensor that begins at `start` (at its first
    element by default). casts: dtypes that the values are cast to before, one after the other."""
    if values.ndim == 0:
        values, start = values[None], ()
    start = start or (0,) * values.ndim
    most = ON_HOST if values.device.type == "cpu" else ON_DEVICE
    rows, sums = max(1, most // max(1, prod(values.shape[1:]))), []
    for part in values.split(rows):
        for dtype in casts:
            part = part.to(dtype)
        wide = part.contiguous().view(BITS[part.element_size()]).to(torch.int64)
        for dim in range(wide.ndim - 1, 0, -1):
            wide = (wide * _odd(start[dim], wide.shape[dim], dim, wide.device)).sum(-1)
        sums.append(wide)
    return (torch.cat(sums) * _odd(start[0], len(values), 0, values.device)).sum()


def hash_text(number: Tensor | int) -> str:
    """Returns a hash as 16 hex digits."""
    return f"{int(number) % (1 << 64):016x}"


@lru_cache(maxsize=64)
def _odd(start: int, count: int, dim: int, device: torch.device) -> Tensor:
    """Returns the odd numbers of `count` places along a dimension, from `start` on: [count]."""
    places = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device)
    x = (places ^ (dim << 56)) * _GOLDEN
    for shift, factor in ((30, _MIX), (27, _MIX_2)):
        x = (x ^ _shifted(x, shift)) * factor
    return (x ^ _shifted(x, 31)) | 1


def _shifted(x: Tensor, by: int) -> Tensor:
    """Returns x >> by of the unsigned number."""
    return (x >> by) & ((1 << (64 - by)) - 1)


@dataclass
class Holding:
    """Says what weights a rank holds, whoever has brought others since. id: the trainers' name for
    them. hashes: of the parameters when they had arrived."""

    id: str | None = None
    hashes: Mapping[str, int] | None = None

    def note(self, id_: str, params: Mapping[str, Tensor], names: Iterable[str]) -> None:
        """Notes that the parameters `names`, and those in the same memory, hold the weights of this
        name."""
        homes = {params[n].untyped_storage().data_ptr() for n in names}
        filled = {n: p for n, p in params.items() if p.untyped_storage().data_ptr() in homes}
        self.id, self.hashes = id_, {n: int(tensor_hash(p)) for n, p in filled.items()}

    def look(self, params: Mapping[str, Tensor]) -> str | None:
        """Returns the name of the weights that the parameters still hold, None for others."""
        for name, known in (self.hashes or {}).items():
            if name not in params or int(tensor_hash(params[name])) != known:
                self.forget()
                break
        return self.id

    def forget(self) -> None:
        """Knows nothing of the weights any more."""
        self.id = self.hashes = None
