"""Plans which trainer rank sends which slice of the weights to which server rank, and when.

Pure: the trainers' piece table and the servers' own tables give the plan, alike on every rank. A
server rank takes what it keeps in rounds of bounded size, each with a share of every trainer rank
that sends to it, in HF order: so all of them send at any time, and not the first pipeline stage
alone.

Nothing waits in a circle. Trainers only send, servers only receive, both in the order of rounds,
and a server rank posts all messages of a round at once: of the messages that are not done, both
ends have got to one of the earliest round. No round is a barrier.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megarl.models.ops import Shape
from megarl.models.piece_table import PieceTable, View
from megarl.weight_sync.boxes import Box, cut, numel
from megarl.weight_sync.slices.choice import choose_sources
from megarl.weight_sync.slices.geometry import Geometry, Ints, Sources, cut_table
from megarl.weight_sync.slices.tables import Entry as Entry
from megarl.weight_sync.slices.tables import ServerTable as ServerTable


class Receiver(NamedTuple):
    """Names a server by its number, and a rank of it."""

    server: int
    rank: int


class Slice(NamedTuple):
    """Says that box [start, stop) of an HF tensor, in row-major order, is views of a trainer's
    parameter, one after the other."""

    tensor: str
    start: Shape
    stop: Shape
    param: str
    views: tuple[View, ...]

    @property
    def numel(self) -> int:
        """Returns how many numbers the slice has."""
        return numel((self.start, self.stop))


class Message(NamedTuple):
    """Holds what a trainer rank sends to a receiver in a round, in the order of its bytes. Each
    slice begins at a multiple of its item size."""

    round: int
    receiver: Receiver
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class SlicePlan:
    """Holds a plan, of which every rank asks for its own part.

    receivers: all ranks of all servers. geometries: of each, one for all whose tables are equal.
    senders: the trainer rank that sends to a receiver what a source has, -1 for nothing,
    [receivers, sources].
    """

    table: PieceTable
    receivers: tuple[Receiver, ...]
    geometries: tuple[Geometry, ...]
    senders: Ints
    round_bytes: int

    def sends(self, rank: int) -> Iterator[list[Message]]:
        """Yields what a trainer rank sends, by groups of messages that go at once: those of a round
        in the receivers' order, at most `round_bytes` in all, unless one number is larger."""
        rounds: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for r, source in np.argwhere(self.senders == rank).tolist():
            for number in self.geometries[r].rounds_of[source]:
                rounds[number][r].append(source)
        held = _Held(self.table, rank)
        for number in sorted(rounds):
            group: list[Message] = []
            load = 0
            for r, sources in rounds[number].items():
                geometry = self.geometries[r]
                parts = [i for source in sources for i in geometry.parts[number, source].tolist()]
                nbytes = int(geometry.size[parts].sum())
                if group and load + nbytes > self.round_bytes:
                    yield group
                    group, load = [], 0
                slices = (held.slice(geometry.tensor(i), geometry.boxes[i]) for i in parts)
                group.append(Message(number, self.receivers[r], tuple(slices)))
                load += nbytes
            yield group

    def receives(self, server: int, rank: int) -> list[list[Any]]:
        """Returns what a server's rank receives, as JSON-able data. A round is a list of messages
        [trainer rank, slices], all to be posted at once. A slice is the number of one of the
        entries of its table, or where it is a part of it, [number, [[offset, shape, strides] of
        each view of the entry's parameter]]. Slices are in the order of the message's bytes."""
        r = self.receivers.index(Receiver(server, rank))
        senders, rounds = self.senders[r].tolist(), []
        for parts in self.geometries[r].packed:
            messages: dict[int, list[Any]] = {}
            for source, slices in parts:
                messages.setdefault(senders[source], []).extend(slices)
            rounds.append([[sender, slices] for sender, slices in messages.items()])
        return rounds


class _Held:
    """Finds slices in a trainer rank's parameters."""

    def __init__(self, table: PieceTable, rank: int) -> None:
        self._tensors, self._coords = table.by_name, table.layout.coords(rank)
        self._slices: dict[tuple[str, Box], Slice] = {}

    def slice(self, tensor: str, box: Box) -> Slice:
        """Returns where box `box` of an HF tensor is on the rank."""
        if (found := self._slices.get((tensor, box))) is None:
            for p in self._tensors[tensor].held_by(self._coords):
                inside = zip(p.start, box[0], box[1], p.stop, strict=True)
                if all(a <= b and c <= d for a, b, c, d in inside):
                    break
            else:
                raise AssertionError(f"{tensor}: {box} is not on {self._coords}")
            views = cut(p.view, (p.start, p.stop), box)
            found = self._slices[tensor, box] = Slice(tensor, *box, p.param, views)
        return found


def plan_slices(
    table: PieceTable,
    servers: Sequence[Sequence[ServerTable]],
    *,
    itemsizes: Mapping[str, int],
    round_bytes: int,
    trainer_nodes: Sequence[Hashable] | None = None,
    server_nodes: Sequence[Hashable] | None = None,
) -> SlicePlan:
    """Plans a sync from trainers with `table` to servers, each a list of its ranks' tables.

    itemsizes: bytes of a number by HF tensor, as it is sent. round_bytes: the most that a receiver
    takes, and a sender holds, at once. trainer_nodes: of each rank; server_nodes: of each server,
    None where it is not on one. A server takes from its own node what is there.

    The cost is that of the distinct tables: receivers with equal ones differ in their senders
    alone. Raises ValueError naming the tensor where an entry would not be filled exactly once, and
    for different tables with one digest.
    """
    if round_bytes < 1:
        raise ValueError(f"round_bytes={round_bytes}: must be > 0")
    sources = Sources(table)
    distinct: dict[str, tuple[ServerTable, Geometry]] = {}
    receivers, geometries = [], []
    for s, ranks in enumerate(servers):
        for r, theirs in enumerate(ranks):
            if theirs.digest not in distinct:
                made = cut_table(theirs, sources, itemsizes, round_bytes)
                distinct[theirs.digest] = theirs, made
            first, geometry = distinct[theirs.digest]
            if theirs.entries is not first.entries and theirs.entries != first.entries:
                raise ValueError(
                    f"rank {r} of server {s} has another table of digest {theirs.digest}; a digest "
                    "must cover the entries"
                )
            receivers.append(Receiver(s, r))
            geometries.append(geometry)
    nodes = [None if server_nodes is None else server_nodes[r.server] for r in receivers]
    senders = choose_sources(sources.ranks, geometries, trainer_nodes, nodes)
    return SlicePlan(table, tuple(receivers), tuple(geometries), senders, round_bytes)
