"""Turns strided views of tensors into boxes of them, and sums elements up by their numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

Ints = Sequence[int]
# step in the HF tensor, size, and another number: the step in the parameter, or a start
Dim = tuple[int, int, int]
Box = tuple[Ints, Ints, int, list[tuple[int, int]]]
MODULUS = 1 << 64
ON_HOST, ON_DEVICE = 1 << 16, 1 << 22  # elements at a time: those of a cache, and more


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
    dims = sorted((d for d in dims if d[1] > 1), key=lambda d: -d[0])
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


def fingerprint(
    view: torch.Tensor,
    shape: Ints,
    start: Ints,
    stop: Ints,
    *,
    first: int = 0,
    casts: Sequence[torch.dtype] = (),
) -> int:
    """Returns the sum over elements of (bits times a weight by the element's number in its tensor),
    modulo 2^64.

    view: the elements, in row-major order, of box [start, stop) of a tensor of `shape`, from the
    `first` of the box on. casts: what they are cast to, one after the other, before.

    It is additive: the parts of a tensor add up to the tensor, in whatever layout. It finds what
    differs by accident, and is no defence against somebody who wants it to be equal. It takes
    memory for some numbers at a time (ON_HOST, ON_DEVICE), 8 bytes each, a few times over.
    """
    total = 0
    for part in _chunks(view, ON_HOST if view.device.type == "cpu" else ON_DEVICE):
        numbers = box_numbers(shape, start, stop, first, part.numel(), part.device)
        first += part.numel()
        for dtype in casts:
            part = part.to(dtype)
        total += _weighted_sum(part, numbers)
    return total % MODULUS


def box_numbers(
    shape: Ints, start: Ints, stop: Ints, first: int, count: int, device: torch.device
) -> torch.Tensor:
    """Returns int64 [count], the numbers in a tensor of `shape` of the elements of box
    [start, stop) in row-major order, from the `first` of the box on."""
    return _numbers(_merged(shape, start, stop), first, count, device)


def _numbers(dims: list[Dim], first: int, count: int, device: torch.device) -> torch.Tensor:
    (step, size, low), *outer = dims
    if not outer:
        return torch.arange(low + first, low + first + count, device=device).mul_(step)
    (row, begin), (rows, rest) = divmod(first, size), divmod(count, size)
    if begin or rest:  # no whole rows
        at = torch.arange(begin, begin + count, device=device)
        there = _numbers(outer, row, -(-(begin + count) // size), device)
        return there[at // size] + (at % size).add_(low).mul_(step)
    inner = torch.arange(low, low + size, device=device).mul_(step)
    return (_numbers(outer, row, rows, device).unsqueeze(1) + inner).flatten()


def _merged(shape: Ints, start: Ints, stop: Ints) -> list[Dim]:
    """Returns the dimensions of a box from the innermost on, those that it spans joined with the
    next: (step in the tensor, size in the box, its start), the last two in such steps."""
    dims = list(zip(shape, start, stop, strict=True)) or [(1, 0, 1)]
    found: list[Dim] = []
    step, inner = 1, 1  # inner: elements of the dimensions that the box spans
    for d in range(len(dims) - 1, -1, -1):
        n, low, high = dims[d]
        inner, spanned = inner * n, inner
        if d and (low, high) == (0, n):
            continue
        found.append((step, (high - low) * spanned, low * spanned))
        step, inner = step * inner, 1
    return found


def _chunks(view: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Yields parts of a view in row-major order, of at most `most` elements."""
    if view.numel() <= most:
        yield view
        return
    d = next(d for d, n in enumerate(view.shape) if n > 1)
    step = max(1, most * view.shape[d] // view.numel())
    for i in range(0, view.shape[d], step):
        yield from _chunks(view.narrow(d, i, min(step, view.shape[d] - i)), most)


def _weighted_sum(values: torch.Tensor, numbers: torch.Tensor) -> int:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    bits = values.contiguous().view(kind).to(torch.int64).flatten()
    w = numbers.mul_(-7046029254386353131).add_(1442695040888963407)
    w = (w ^ (w >> 29)).mul_(-4658895280553007687)
    return int((w ^ (w >> 32)).bitwise_or_(1).mul_(bits + 1).sum())
