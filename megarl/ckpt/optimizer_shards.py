"""Puts an optimizer's shard on disk: flat ranges of parameters as boxes of global tensors.

The distributed optimizer (ZeRO-1) gives every data-parallel rank a range of each flattened
parameter. Such a range is at most a few boxes of the parameter, so that every rank writes and reads
exactly its own numbers, nothing is gathered, and any layout can read what another one wrote.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from megarl.parallel import mcore  # noqa: F401  before megatron

from megatron.core.dist_checkpointing import ShardedTensor  # isort: skip

Shape = tuple[int, ...]


def flat_boxes(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Yields (offsets, sizes) of the boxes that are elements [start, stop) of a row-major array of
    `shape`, in their order. There are at most 2 * ndim - 1: the end of a row, whole rows, the
    beginning of a row."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (start,), (stop - start,)
        return
    width = math.prod(shape[1:])
    first, last = -(-start // width), stop // width  # whole rows
    if first > last:  # within one row
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * width)
    if first < last:
        rest = shape[1:]
        yield (first, *(0 for _ in rest)), (last - first, *rest)
    yield from _in_row(shape, last, last * width, stop)


def _in_row(shape: Shape, row: int, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    skipped = row * math.prod(shape[1:])
    for offsets, sizes in flat_boxes(shape[1:], start - skipped, stop - skipped):
        yield (row, *offsets), (1, *sizes)


def cut(whole: ShardedTensor, key: str, start: int, stop: int, data: Tensor) -> list[ShardedTensor]:
    """Returns the boxes of tensor `key` that are elements [start, stop) of what `whole` is locally,
    with views of `data` [stop - start], which holds them.

    `whole` is a parameter's, alike on the data-parallel ranks; a box belongs to one of them.
    """
    lead = whole.global_offset[: whole.prepend_axis_num]
    inner = whole.global_offset[whole.prepend_axis_num :]
    found, at = [], 0
    for offsets, sizes in flat_boxes(tuple(whole.local_shape), start, stop):
        n, shape = math.prod(sizes), (*(1 for _ in lead), *sizes)
        found.append(
            replace(
                whole,
                key=key,
                data=data[at : at + n].view(shape),
                dtype=data.dtype,
                local_shape=shape,
                global_offset=(*lead, *(a + b for a, b in zip(inner, offsets, strict=True))),
                axis_fragmentations=None,  # no regular grid
                prepend_axis_num=0,
                replica_id=(*whole.replica_id[:2], 0),  # type: ignore[index]
            )
        )
        at += n
    assert at == data.numel() == stop - start, (whole, start, stop, data.shape)
    return found
