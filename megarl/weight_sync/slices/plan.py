"""Plans which trainer rank sends which slice of the weights to which server rank, and when.

Pure: the trainers' piece table and the servers' own tables give the plan, alike on every rank. A
server rank takes what it keeps in rounds of HF tensors, in HF order from a tensor of its own on:
were all to begin with the first, only the first pipeline stage would be sending. A step of the
plan is one round of every server rank.

Nothing waits in a circle. Trainers only send, servers only receive, both in the order of steps,
and a server rank posts all messages of a step at once: of the messages that are not done, both
ends have got to the one of the earliest step. No step is a barrier.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
    """Holds what a trainer rank sends to a receiver in a step, in the order of its bytes. Each
    slice begins at a multiple of its item size."""

    step: int
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

    @cached_property
    def steps(self) -> int:
        """Returns the number of steps: as many as the receiver with most rounds has."""
        return max((g.rounds for g in self.geometries), default=0)

    def sends(self, rank: int) -> Iterator[list[Message]]:
        """Yields what a trainer rank sends, by groups of messages that go at once: those of a step
        in the receivers' order, at most `round_bytes` in all, unless one number is larger."""
        by_step: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for r, source in np.argwhere(self.senders == rank).tolist():
            geometry = self.geometries[r]
            for number in geometry.rounds_of[source]:
                by_step[self.step(r, number)][r].append(source)
        held = _Held(self.table, rank)
        for step in sorted(by_step):
            group: list[Message] = []
            load = 0
            for r, sources in sorted(by_step[step].items()):
                geometry, number = self.geometries[r], self.round(r, step)
                parts = [i for s in sorted(sources) for i in geometry.parts[number, s].tolist()]
                nbytes = int(geometry.size[parts].sum())
                if group and load + nbytes > self.round_bytes:
                    yield group
                    group, load = [], 0
                slices = (held.slice(geometry.tensor(i), geometry.boxes[i]) for i in parts)
                group.append(Message(step, self.receivers[r], tuple(slices)))
                load += nbytes
            yield group

    def receives(self, server: int, rank: int) -> list[list[Any]]:
        """Returns what a server's rank receives, as JSON-able data. A round is a list of messages
        [trainer rank, slices], all to be posted at once. A slice is the number of one of the
        entries of its table, or where it is a part of it, [number, [[offset, shape, strides] of
        each view of the entry's parameter]]. Slices are in the order of the message's bytes."""
        r = self.receivers.index(Receiver(server, rank))
        geometry, senders = self.geometries[r], self.senders[r].tolist()
        rounds = []
        for step in range(geometry.rounds):
            messages: dict[int, list[Any]] = {}
            for source, slices in geometry.packed[self.round(r, step)]:
                messages.setdefault(senders[source], []).extend(slices)
            rounds.append([[sender, slices] for sender, slices in messages.items()])
        return rounds

    def round(self, receiver: int, step: int) -> int:
        """Returns the number of the round that a receiver takes in `step`."""
        rounds = self.geometries[receiver].rounds
        return (step + self._first(receiver)) % rounds

    def step(self, receiver: int, number: int) -> int:
        """Returns the step in which a receiver takes round `number`."""
        rounds = self.geometries[receiver].rounds
        return (number - self._first(receiver)) % rounds

    def _first(self, receiver: int) -> int:
        """Returns the round a receiver begins with: receivers spread over the model."""
        return receiver * self.geometries[receiver].rounds // len(self.receivers)


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
