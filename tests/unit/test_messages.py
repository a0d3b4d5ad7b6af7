"""Bounded messages: the same numbers, cut smaller."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.models.messages import Part, length, make_messages, slots, split
from megarl.models.param_loading import local_view
from megarl.models.piece_table import Piece, Place, View

HOME = Place(0, 0, tp=0)
# whole rows; groups of rows, as of fused queries; a cut along columns; a vector; groups in one
PIECES = {
    "rows": Piece(HOME, "p", View(6, (5, 6), (6, 1)), (4, 0), (9, 6)),
    "groups": Piece(HOME, "p", View(12, (3, 4, 6), (48, 6, 1)), (0, 0), (12, 6)),
    "columns": Piece(HOME, "p", View(0, (7, 3), (3, 1)), (0, 6), (7, 9)),
    "vector": Piece(HOME, "p", View(3, (11,), (1,)), (2,), (13,)),
    "bias groups": Piece(HOME, "p", View(2, (4, 3), (9, 1)), (0,), (12,)),
}


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("numel", (1, 2, 7, 13, 1000))
def test_parts_of_a_piece_put_the_same_numbers_in_the_same_places(name: str, numel: int) -> None:
    piece = PIECES[name]
    param = torch.arange(200.0)
    want, got = (torch.full((20, 10)[: len(piece.start)], -1.0) for _ in range(2))
    view = local_view(param, piece)
    want[piece.box].view(view.shape).copy_(view)
    parts = list(split(piece, numel))
    for part in parts:
        view = local_view(param, part)
        assert (got[part.box] == -1).all()
        got[part.box].view(view.shape).copy_(view)
        assert part.numel <= max(numel, math.prod(part.stop[1:]) if len(part.stop) > 1 else 1)
    assert torch.equal(got, want)
    assert len(parts) > 1 or numel >= piece.numel


def test_messages_are_bounded_and_aligned() -> None:
    def part(name: str, dtype: torch.dtype) -> Part:
        return Part(name, PIECES[name], dtype, 0, PIECES[name].numel * dtype.itemsize)

    own = [part("vector", torch.bfloat16), part("groups", torch.float32), part("rows", torch.int8)]
    (whole,) = make_messages(own)
    assert [p.offset for p in whole] == [0, 24, 24 + 288]
    bounded = make_messages(own, 100)
    assert len(bounded) > 3 and all(length(m) <= 100 for m in bounded)
    assert all(p.offset % p.dtype.itemsize == 0 for m in bounded for p in m)
    assert sum(p.nbytes for m in bounded for p in m) == sum(p.nbytes for p in own)
    places, room = slots({5: bounded, 2: [whole]})
    assert places[5].start == 0 and places[2].start % 64 == 0
    assert places[2].stop - places[2].start == length(whole) <= room
