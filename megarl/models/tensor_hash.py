"""Hashes the weights of a model where they lie, so that the hash does not depend on the layout.

The hash of a tensor is the sum of its elements' bits, each times an odd number that depends on the
element's place in the HF tensor, modulo 2^64. So every rank sums over its own pieces, on its own
device, and no weight travels. A tensor with one changed element never has the same hash: a
difference that is not 0, times an odd number, is not 0 modulo 2^64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from megarl.models.param_loading import local_view
from megarl.models.piece_table import PieceTable

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22  # elements, whose bits are widened to 64 at once
_GOLDEN, _MIX, _MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685


def tensor_hash(values: Tensor, start: Sequence[int] = ()) -> Tensor:
    """Returns the hash, [] int64, of the box of a tensor that begins at `start` (at its first
    element by default). The hashes of boxes that make up a tensor add up to its own."""
    start = start or (0,) * values.ndim
    bits = values.detach().contiguous().view(_BITS[values.itemsize])
    rows = max(1, _CHUNK // max(1, bits[0].numel()))
    parts = []
    for part in bits.split(rows):
        wide = part.to(torch.int64)
        for dim in range(wide.ndim - 1, 0, -1):
            wide = (wide * _odd(start[dim], wide.shape[dim], dim, wide.device)).sum(-1)
        parts.append(wide)
    return (torch.cat(parts) * _odd(start[0], len(bits), 0, bits.device)).sum()


def weight_hashes(
    table: PieceTable, rank: int, params: Mapping[str, Tensor], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns, for every tensor of the table, what this rank's pieces add to its hash [N] int64 and
    to the square of its norm [N] float64. Summed over the ranks of the layout, they are the
    tensors'."""
    hashes = torch.zeros(len(table.tensors), dtype=torch.int64, device=device)
    squares = torch.zeros(len(table.tensors), dtype=torch.float64, device=device)
    for i, tensor in enumerate(table.tensors):
        for piece in tensor.pieces:
            if piece.place.rank(table.layout) != rank:
                continue
            extent = [stop - begin for begin, stop in zip(piece.start, piece.stop, strict=True)]
            values = local_view(params[piece.param], piece).reshape(extent)
            hashes[i] += tensor_hash(values, piece.start)
            squares[i] += torch.linalg.vector_norm(values, dtype=torch.float32).double().square()
    return hashes, squares


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
