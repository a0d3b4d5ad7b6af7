"""Makes slices of block-wise FP8, bit for bit those of the whole tensors (see wire.block_fp8).

A block may lie on several ranks: tensor parallelism cuts where it likes. So every rank takes the
largest magnitude of what it holds of each block, and one all-reduce makes these the blocks' own.
Then all ranks know all scales, and each quantises what it sends.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from megarl.models.ops import Shape
from megarl.models.piece_table import HfTensor, Piece, PieceTable, View
from megarl.transfer.boxes import Box, numel
from megarl.transfer.gather import export_dtype
from megarl.weight_sync.transports import WeightSource
from megarl.wire.block_fp8 import BLOCK, LARGEST, STRIP, SUFFIX, scale_shape

FP8 = torch.float8_e4m3fn
Read = Callable[[torch.Tensor], object]  # copies numbers of a parameter into a flat tensor


class BlockFp8:
    """Quantises a source's weights, or those in `names`. table: of what is sent: linear maps in
    FP8, and the scales of each, which all ranks have that hold any of it.

    Memory: a number for each block of the model, and STRIP rows of a slice in fp32.
    """

    def __init__(self, source: WeightSource, names: Collection[str] | None = None) -> None:
        self._source = source
        chosen = (t for t in source.table.tensors if names is None or t.name in names)
        linear = [t for t in chosen if t.linear]
        self.table = replace(source.table, tensors=tuple(_with_scales(source.table)))
        coords = source.layout.coords(source.rank)
        self._held = [(t, list(t.held_by(coords))) for t in linear]
        sizes = [numel(((0, 0), scale_shape(t.shape))) for t in linear]
        self._starts = dict(zip((t.name for t in linear), accumulate(sizes, initial=0)))
        self._flat = torch.empty(sum(sizes), device=source.device)

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype that a tensor of `table` is sent in."""
        if name.endswith(SUFFIX):
            return torch.float32
        linear = self._source.table.by_name[name].linear
        return FP8 if linear else self.plain_dtype(name)

    def plain_dtype(self, name: str) -> torch.dtype:
        """Returns the dtype that the source's tensor would be sent in without FP8."""
        return export_dtype(self._source.table.by_name[name], self._source.dtype)

    @torch.no_grad()
    def measure(self) -> None:
        """Computes the scales of all blocks. Collective."""
        self._flat.zero_()
        for t, pieces in self._held:
            for piece in pieces:
                self._largest(t, piece)
        if self._source.layout.world_size > 1:
            dist.all_reduce(self._flat, op=dist.ReduceOp.MAX, group=self._source.group)
        self._flat.clamp_(min=1e-12).div_(LARGEST)

    def params(self) -> Mapping[str, torch.Tensor]:
        """Returns the source's parameters, looked up as they are asked for, and, by the names of
        their tensors, the scales."""
        scales = {t.name + SUFFIX: self._scales(t.name, t.shape) for t, _ in self._held}
        return ChainMap(scales, cast(Any, self._source.params))

    def quantize(self, name: str, box: Box, read: Read, out: torch.Tensor) -> None:
        """Writes box `box` of a linear map into `out`, FP8 [numbers of the box]; read: copies its
        numbers, in the dtype they are sent in without FP8, into a flat tensor."""
        (top, left), (bottom, right) = box
        values = torch.empty(numel(box), dtype=self.plain_dtype(name), device=self._flat.device)
        read(values)
        width = right - left
        for first in range(0, bottom - top, STRIP):
            last = min(first + STRIP, bottom - top)
            strip = slice(first * width, last * width)
            steps = self._steps(name, ((top + first, left), (top + last, right))).flatten()
            out[strip].copy_((values[strip].float() / steps).clamp_(-LARGEST, LARGEST).to(FP8))

    def products(self, name: str, box: Box, values: torch.Tensor) -> torch.Tensor:
        """Returns what a server holds of box `box` of a linear map that multiplies what it receives
        by the scales: float32 [rows, columns]. values: the source's numbers there."""
        out = torch.empty(numel(box), dtype=FP8, device=values.device)
        self.quantize(name, box, lambda flat: flat.copy_(values.reshape(-1)), out)
        return out.view(values.shape).float() * self._steps(name, box)

    def _steps(self, name: str, box: Box) -> torch.Tensor:
        """Returns the scale of each number of a box, [rows, columns]."""
        scales = self._scales(name, self._source.table.by_name[name].shape)
        rows, columns = (
            torch.arange(a, b, device=scales.device) // BLOCK for a, b in zip(*box, strict=True)
        )
        return scales[rows][:, columns]

    def _scales(self, name: str, shape: Shape) -> torch.Tensor:
        start, size = self._starts[name], scale_shape(shape)
        return self._flat[start : start + numel(((0, 0), size))].view(size)

    def _largest(self, t: HfTensor, piece: Piece) -> None:
        """Raises the blocks' largest magnitudes to those of a piece."""
        cells, param = self._scales(t.name, t.shape), self._source.params[piece.param].detach()
        view, (top, left), (bottom, right) = piece.view, piece.start, piece.stop
        local = param.as_strided(view.shape, view.strides, param.storage_offset() + view.offset)
        values = local.to(self.plain_dtype(t.name)).reshape(bottom - top, right - left)
        for first in range(top - top % BLOCK, bottom, STRIP):
            low, high = max(first, top), min(first + STRIP, bottom)
            part = values[low - top : high - top].float().abs()
            edges = (left % BLOCK, -right % BLOCK, low - first, -high % BLOCK)
            blocks = pad(part, edges).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
            found = blocks.amax((1, 3))
            i, j = first // BLOCK, left // BLOCK
            target = cells[i : i + len(found), j : j + found.shape[1]]
            torch.maximum(target, found, out=target)


def _with_scales(table: PieceTable) -> Iterator[HfTensor]:
    """Yields the table's tensors, and after each linear map its scales."""
    for t in table.tensors:
        yield t
        if t.linear:
            name, shape = t.name + SUFFIX, scale_shape(t.shape)
            view = View(0, shape, (shape[1], 1))
            places = dict.fromkeys(p.place for p in (*t.pieces, *t.replicas))
            first, *others = (Piece(p, name, view, (0, 0), shape) for p in places)
            yield HfTensor(name, shape, (first,), tuple(others))
