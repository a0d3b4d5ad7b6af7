"""A flat range of an array, as boxes of it."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.engine.optimizer_state import flat_boxes


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_are_the_range_in_its_order(shape, data):
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    array = torch.arange(numel).view(shape)
    boxes = list(flat_boxes(tuple(shape), start, stop))
    found = [
        array[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].flatten()
        for offsets, sizes in boxes
    ]
    assert torch.cat([torch.empty(0, dtype=torch.long), *found]).tolist() == list(
        range(start, stop)
    )
    assert len(boxes) <= 2 * len(shape) - 1
