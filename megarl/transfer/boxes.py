"""Finds which boxes of an HF tensor a box overlaps, and cuts strided views down to a box.

A box is [start, stop) in each dimension of a tensor. A view that equals a box has its numbers in
the box's row-major order; a dimension of the box may be several of the view (a head's rows in each
query group).

Example: q [4, 2], of two query groups, lies in a parameter with k (one row a group) between. The
view of box (0, 0) to (4, 2) has shape (2, 2, 2) and strides (6, 2, 1), from offset 0 on:

    row of the parameter   0    1    2    3    4    5
    holds                  q0   q1   k0   q2   q3   k1
    box (1, 0) to (3, 2)        --        --            views at 2 and 6, of shape (1, 2) each
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby

from megarl.models.ops import Shape
from megarl.models.piece_table import View

Box = tuple[Shape, Shape]  # [start, stop)


def numel(box: Box) -> int:
    """Returns how many numbers a box has."""
    return math.prod(extents(box))


def extents(box: Box) -> Shape:
    """Returns the shape of a box."""
    return tuple(b - a for a, b in zip(*box, strict=True))


def intersection(a: Box, b: Box) -> Box | None:
    """Returns the box in which two boxes of one tensor overlap, None where they do not."""
    start, stop = tuple(map(max, a[0], b[0])), tuple(map(min, a[1], b[1]))
    return (start, stop) if all(x < y for x, y in zip(start, stop, strict=True)) else None


def uncovered(shape: Shape, boxes: Iterable[Box]) -> int:
    """Returns how many numbers of a tensor of `shape` are in none of the boxes, which may
    overlap."""
    left = [((0,) * len(shape), shape)]
    for box in sorted(boxes):
        left = [part for whole in left for part in _without(whole, box)]
    return sum(map(numel, left))


def _without(whole: Box, box: Box) -> Iterator[Box]:
    """Yields boxes that together are `whole` but for what is in `box`."""
    inner = intersection(whole, box)
    if inner is None:
        yield whole
        return
    start, stop = list(whole[0]), list(whole[1])
    for d, (a, b) in enumerate(zip(*inner, strict=True)):
        for low, high in ((start[d], a), (b, stop[d])):
            if low < high:
                yield (*start[:d], low, *start[d + 1 :]), (*stop[:d], high, *stop[d + 1 :])
        start[d], stop[d] = a, b


class BoxIndex:
    """Finds those of a tensor's boxes that a box overlaps, however either is cut.

    Boxes that span the same range of the first dimension are a band; within it, those that span
    the same range of the second, and so on. Bands are found by bisection, so a search takes a step
    for each box that is met, and hardly one for the others.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        self._bands = _Bands(boxes, range(len(boxes)), 0)

    def meeting(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yields the numbers of the boxes that overlap `box`, and the overlaps, by their start."""
        for i in self._bands.meeting(box):
            if overlap := intersection(self._boxes[i], box):
                yield i, overlap


class _Bands:
    """Holds boxes by their range of dimension `dim`, and those of each range by the next one."""

    def __init__(self, boxes: Sequence[Box], members: Sequence[int], dim: int) -> None:
        def span(i: int) -> tuple[int, int]:
            return boxes[i][0][dim], boxes[i][1][dim]

        spans = [(k, list(g)) for k, g in groupby(sorted(members, key=span), key=span)]
        self._dim = dim
        self._starts = [start for (start, _), _ in spans]
        self._reach = list(accumulate((stop for (_, stop), _ in spans), max))
        last = not boxes or dim + 1 == len(boxes[0][0])
        self._parts = [group if last else _Bands(boxes, group, dim + 1) for _, group in spans]

    def meeting(self, box: Box) -> Iterator[int]:
        """Yields the numbers of all boxes that `box` may overlap."""
        start, stop = box[0][self._dim], box[1][self._dim]
        first = bisect_right(self._reach, start)
        for part in self._parts[first : bisect_left(self._starts, stop)]:
            yield from part.meeting(box) if isinstance(part, _Bands) else part


Dims = tuple[tuple[int, int], ...]  # (size, stride) of dimensions of a view
Part = tuple[int, Dims]  # offset and dimensions


def cut(view: View, whole: Box, box: Box) -> tuple[View, ...]:
    """Returns the part of `view`, which equals box `whole`, that equals `box` inside of it: views
    that have its numbers one after the other in row-major order. Raises ValueError for a view
    whose dimensions are not those of `whole`, or parts of them."""
    if box == whole:
        return (view,)
    parts: list[Part] = [(0, ())]
    dims = _dims(view, extents(whole))
    for dim, origin, start, stop in reversed(list(zip(dims, whole[0], *box, strict=True))):
        ranges = _ranges(dim, start - origin, stop - origin)
        if len(parts) == 1:
            inner, sizes = parts[0]
            parts = [(offset + inner, outer + sizes) for offset, outer in ranges]
        else:  # the inner part is several views, and comes again for each index
            offsets = [offset + o for offset, outer in ranges for o in _offsets(outer)]
            parts = [(o + inner, sizes) for o in offsets for inner, sizes in parts]
    return tuple(_view(view.offset + offset, sizes) for offset, sizes in parts)


def _view(offset: int, dims: Dims) -> View:
    return View(offset, tuple(n for n, _ in dims), tuple(s for _, s in dims))


def _dims(view: View, shape: Shape) -> list[Dims]:
    """Returns, for each dimension of `shape`, the dimensions of the view that make it up."""
    left = [(n, s) for n, s in zip(view.shape, view.strides, strict=True) if n != 1]
    groups: list[Dims] = []
    for size in reversed(shape):
        dims: Dims = ()
        while size > 1:
            n, stride = left.pop() if left else (0, 0)
            if n > size and n % size == 0:  # goes on in the dimension before
                left.append((n // size, stride * size))
                n = size
            if n == 0 or size % n:
                raise ValueError(f"{view} is not cut as a box of shape {list(shape)}")
            dims, size = ((n, stride), *dims), size // n
        groups.append(dims)
    if left:
        raise ValueError(f"{view} has more numbers than a box of shape {list(shape)}")
    return groups[::-1]


def _ranges(dims: Dims, first: int, last: int) -> list[Part]:
    """Returns indices [first, last) of a dimension made up of `dims`: a part of the first group,
    the whole groups, and a part of the last."""
    if not dims:
        return [(0, ())]
    (_, stride), rest = dims[0], dims[1:]
    rows = math.prod(n for n, _ in rest)
    parts: list[Part] = []
    while first < last:
        group, row = divmod(first, rows)
        if row or last - first < rows:
            end = min(rows, row + last - first)
            parts += [(group * stride + offset, d) for offset, d in _ranges(rest, row, end)]
            first += end - row
        else:
            groups = (last - first) // rows
            parts.append((group * stride, ((groups, stride), *rest)))
            first += groups * rows
    return parts


def _offsets(dims: Dims) -> list[int]:
    offsets = [0]
    for n, stride in dims:
        offsets = [o + i * stride for o in offsets for i in range(n)]
    return offsets
