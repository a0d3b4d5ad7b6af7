"""Fills a rank's parameters from whatever gives boxes of HF tensors: files, a random generator."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megarl.models.piece_table import HfTensor, Piece, PieceTable
from megarl.parallel.layout import Coords

# (HF tensor, box) -> its numbers, of the box's shape, any dtype, on the host
ReadSlice = Callable[[HfTensor, tuple[slice, ...]], Tensor]


def local_view(param: Tensor, piece: Piece) -> Tensor:
    """Returns the strided view of `param` that `piece` names; no copy, no autograd. Raises
    AssertionError for a parameter that is not contiguous."""
    assert param.is_contiguous(), f"{piece.param}: parameters are contiguous"
    data = param.detach()
    view = piece.view
    return data.as_strided(view.shape, view.strides, data.storage_offset() + view.offset)


@torch.no_grad()
def load_params(
    table: PieceTable, c: Coords, params: Mapping[str, Tensor], read: ReadSlice
) -> None:
    """Writes every element of the rank's parameters: pieces from `read`, padding rows with zero.

    Reads each box once and one at a time, casting to the parameter's dtype on the way. Raises
    AssertionError unless `params` are the table's.
    """
    table.check_params(c, {n: p.shape for n, p in params.items()})
    for name, local in table.local_params(c).items():
        params[name].detach()[slice(*local.padding)].zero_()
    for tensor in table.tensors:
        for piece in tensor.held_by(c):
            data = read(tensor, piece.box)
            local_view(params[piece.param], piece).copy_(data.reshape(piece.view.shape))


def init_params(table: PieceTable, c: Coords, params: Mapping[str, Tensor], *, seed: int) -> None:
    """Fills the rank's parameters as HF initialises: N(0, initializer_range) matrices, unit norms,
    zero biases.

    The numbers are keyed by (seed, HF name), so the model does not depend on the layout. Every rank
    draws each tensor it holds a piece of in full, on the host.
    """
    std = table.model.initializer_range
    drawn: tuple[str, Tensor] = ("", torch.empty(0))

    def read(tensor: HfTensor, box: tuple[slice, ...]) -> Tensor:
        nonlocal drawn
        if drawn[0] != tensor.name:
            drawn = (tensor.name, draw(tensor, seed, std))
        return drawn[1][box]

    load_params(table, c, params, read)


def draw(tensor: HfTensor, seed: int, std: float) -> Tensor:
    """Returns the whole tensor as `init_params` makes it, in fp32 on the host."""
    if len(tensor.shape) == 1:
        return torch.zeros(tensor.shape) if "bias" in tensor.name else torch.ones(tensor.shape)
    key = zlib.crc32(f"{seed}:{tensor.name}".encode())
    generator = torch.Generator(device="cpu").manual_seed(key)
    return torch.empty(tensor.shape).normal_(std=std, generator=generator)
