"""Plans which rank sends which numbers to which when weights change their Megatron layout.

Pure: two piece tables of the same model give the transfers, and these their rounds. A transfer is
the overlap of what a rank of the target holds with one owner's piece of the source, in row-major
order of the HF tensor, so that each side finds its numbers by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from megarl.models.piece_table import HfTensor, Piece, PieceTable, Place, View
from megarl.parallel.layout import Layout
from megarl.weight_sync.boxes import Box, BoxIndex, cut, numel


@dataclass(frozen=True, slots=True)
class Side:
    """A rank, and where in its parameter the numbers are: views one after the other."""

    rank: int
    param: str
    views: tuple[View, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Moves `numel` numbers of an HF tensor from `source` to `target`, maybe of one rank."""

    tensor: str
    numel: int
    source: Side
    target: Side


def plan_transfers(
    source: PieceTable,
    target: PieceTable,
    source_ranks: Sequence[int] | None = None,
    target_ranks: Sequence[int] | None = None,
    *,
    node_size: int = 8,
) -> Iterator[Transfer]:
    """Yields transfers that fill every element a rank of `target` holds exactly once, padding
    aside, in HF order.

    source_ranks, target_ranks: the ranks of one world that the layouts' ranks 0, 1, ... are; by
    default 0, 1, ... themselves. A rank takes from itself what it has, else from a rank of its node
    of `node_size`, else from the replicas in turn. Raises AssertionError for tables of other
    models.

    One step per transfer and piece: the pieces that a box meets are found by bisection (see
    BoxIndex).
    """
    assert [t.name for t in source.tensors] == [t.name for t in target.tensors], "other models"
    choose = _chooser(holders(source.layout, source_ranks), node_size)
    receivers = holders(target.layout, target_ranks)
    for theirs, ours in zip(source.tensors, target.tensors, strict=True):
        copies_of = copies(theirs)
        index, held_by = BoxIndex(list(copies_of)), list(copies_of.values())
        for piece in (*ours.pieces, *ours.replicas):
            overlaps = [
                (held_by[i], overlap, _part(piece, overlap))
                for i, overlap in index.meeting((piece.start, piece.stop))
            ]
            found = sum(numel(overlap) for _, overlap, _ in overlaps)
            assert found == piece.numel, f"{ours.name}: {found} elements found of those of {piece}"
            for rank in receivers(piece.place):
                for alike, overlap, views in overlaps:
                    held, sender = choose(alike, rank)
                    yield Transfer(
                        ours.name,
                        numel(overlap),
                        Side(sender, held.param, _part(held, overlap)),
                        Side(rank, piece.param, views),
                    )


def plan_rounds(transfers: Sequence[Transfer], itemsizes: Sequence[int], limit: int) -> list[range]:
    """Returns rounds, each a range of `transfers` that go at once: no rank sends and receives more
    than `limit` bytes in all, unless one transfer alone is larger. itemsizes: bytes of a number of
    each."""
    rounds: list[range] = []
    load: dict[int, int] = {}
    start = 0
    for i, (t, itemsize) in enumerate(zip(transfers, itemsizes, strict=True)):
        nbytes, ends = t.numel * itemsize, {t.source.rank, t.target.rank}
        if i > start and any(load.get(rank, 0) + nbytes > limit for rank in ends):
            rounds.append(range(start, i))
            load, start = {}, i
        for rank in ends:
            load[rank] = load.get(rank, 0) + nbytes
    if start < len(transfers):
        rounds.append(range(start, len(transfers)))
    return rounds


def copies(tensor: HfTensor) -> dict[Box, list[Piece]]:
    """Returns the owners' boxes of a tensor, and the pieces that hold what is there: the owner,
    then its replicas."""
    found: dict[Box, list[Piece]] = {(p.start, p.stop): [p] for p in tensor.pieces}
    for p in tensor.replicas:
        found[p.start, p.stop].append(p)
    return found


def _part(piece: Piece, box: Box) -> tuple[View, ...]:
    return cut(piece.view, (piece.start, piece.stop), box)


Holders = Callable[[Place], tuple[int, ...]]


def holders(layout: Layout, ranks: Sequence[int] | None) -> Holders:
    """Returns a function from a place to the ranks that hold what is there, in order of the
    data-parallel replicas."""
    names = range(layout.world_size) if ranks is None else ranks

    @cache
    def at(place: Place) -> tuple[int, ...]:
        if place.tp is not None:
            first, step = layout.dense_rank(pp=place.pp, tp=place.tp), layout.tp
        else:
            first, step = place.rank(layout), layout.etp * layout.ep
        stage = layout.world_size // layout.pp
        return tuple(names[r] for r in range(first, (place.pp + 1) * stage, step))

    return at


def _chooser(
    held_at: Holders, node_size: int
) -> Callable[[Sequence[Piece], int], tuple[Piece, int]]:
    """Returns a function that chooses, from pieces that are copies of each other, the copy and the
    rank that a receiver takes it from."""

    @cache
    def nearest(places: tuple[Place, ...], rank: int) -> tuple[int, int]:
        found = [(i, r) for i, place in enumerate(places) for r in held_at(place)]
        if own := [x for x in found if x[1] == rank]:
            return own[0]
        near = [x for x in found if x[1] // node_size == rank // node_size]
        found = near or found
        return found[rank % len(found)]

    def choose(alike: Sequence[Piece], rank: int) -> tuple[Piece, int]:
        i, sender = nearest(tuple(p.place for p in alike), rank)
        return alike[i], sender

    return choose
