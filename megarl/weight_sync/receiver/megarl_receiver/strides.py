"""Turns strided views of tensors into boxes of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import torch

Ints = Sequence[int]
# step in the HF tensor, size, and another number: the step in the parameter, or a start
Dim = tuple[int, int, int]
Box = tuple[Ints, Ints, int, list[tuple[int, int]]]


def grid(first: int, shape: Ints, steps: Ints) -> torch.Tensor:
    """Returns int64 [shape], in which an index counts as often as its step, from `first` on."""
    out = torch.full((), first, dtype=torch.int64)
    for d, (n, step) in enumerate(zip(shape, steps, strict=True)):
        out = out + (torch.arange(n) * step).view([n] + [1] * (len(shape) - 1 - d))
    return out.expand(tuple(shape))


def affine(
    ids: torch.Tensor, offset: int, there: Ints
) -> Iterator[tuple[int, Ints, Ints, int, Ints]]:
    """Cuts a block of numbers, which is written with strides `there` at `offset`, into blocks that
    each have one step per dimension: (first number, shape, steps, offset, strides)."""
    if ids.numel() == 0:
        return
    first = int(ids.flatten()[0])
    steps = [
        int(ids.select(d, 1).flatten()[0]) - first if n > 1 else 0 for d, n in enumerate(ids.shape)
    ]
    same = grid(first, ids.shape, steps) == ids
    if bool(same.all()):
        yield first, tuple(ids.shape), steps, offset, there
        return
    # the part of each dimension that is right in all others; the largest is cut off
    right = [int(same.movedim(d, 0).flatten(1).all(1).cumprod(0).sum()) for d in range(ids.dim())]
    d = max(range(ids.dim()), key=lambda d: right[d] / ids.shape[d])
    if right[d] == 0:
        d = next(d for d, n in enumerate(ids.shape) if n > 1)
    cut = max(1, right[d])
    yield from affine(ids.narrow(d, 0, cut), offset, there)
    rest = ids.narrow(d, cut, ids.shape[d] - cut)
    yield from affine(rest, offset + cut * there[d], there)


def boxes(shape: Ints, first: int, dims: list[Dim], offset: int) -> Iterator[Box]:
    """Yields a strided view of a contiguous HF tensor as boxes of it: (start, stop, offset in the
    parameter, (size, stride there) of the box's elements in row-major order). What is no box (every
    other row, a broadcast) becomes several."""
    dims = sorted((d for d in dims if d[1] > 1), key=itemgetter(0), reverse=True)
    found = _box(shape, first, dims)
    if not isinstance(found, int):
        yield (*found[:2], offset, found[2])
        return
    step, n, there = dims.pop(found)
    for i in range(n):
        yield from boxes(shape, first + i * step, dims, offset + i * there)


def _box(shape: Ints, first: int, dims: list[Dim]) -> Any:
    """Returns (start, stop, [(size, stride there)]), or which of `dims` is in the way. One over
    several dimensions of `shape` is split in place. dims: largest step first."""
    whole = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    start = tuple(first // w % n for w, n in zip(whole, shape, strict=True))
    stop = [a + 1 for a in start]
    view: list[tuple[int, int]] = []
    k = len(dims) - 1
    for d in range(len(shape) - 1, -1, -1):
        step = whole[d]
        while k >= 0 and dims[k][0] < whole[d] * shape[d]:
            s, n, there = dims[k]
            room = (shape[d] - start[d]) * whole[d] // step
            if s == step and n > room and start[d] == 0 and n % room == 0:
                dims[k : k + 1] = [(s * room, n // room, there * room), (s, room, there)]
                k += 1
                continue
            if s != step or n > room:
                return k
            view.append((n, there))
            step *= n
            k -= 1
        stop[d] = start[d] + step // whole[d]
        if step == whole[d]:
            view.append((1, view[-1][0] * view[-1][1] if view else 1))
    return start, tuple(stop), view[::-1]
