"""Plans which rank sends which numbers of a model to whom, and when.

Pure: what a source has and what receivers keep give the plan, alike on every rank, so no message
announces another. A receiver takes what it keeps in rounds of bounded size, each with a share of
every source, in HF order: so all of them send at any time, and not the first pipeline stage alone.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from megarl.models.piece_table import PieceTable
from megarl.transfer.boxes import Box, cut
from megarl.transfer.geometry import Geometry, Ints, Ranks, Slice, Sources, TargetTable, cut_table


class Receiver(NamedTuple):
    """Names rank `rank` of target number `target`: of a server, or a layout, or a bucket's root."""

    target: int
    rank: int


class Message(NamedTuple):
    """Holds what rank `sender` of the source sends to a receiver in a round, in the order of its
    bytes: where the slices are at one of both ends."""

    round: int
    sender: int
    receiver: Receiver
    slices: Sequence[Slice]


class Step(NamedTuple):
    """Holds what one rank does at once. stays: of what it has itself, where it is and goes."""

    sends: Sequence[Message]
    receives: Sequence[Message]
    stays: Sequence[tuple[Slice, Slice]]


# of a receiver and the ranks that hold the same: those it would take it from, at least one
Preference = Callable[[Receiver, Ranks], Ranks]


def nearest(nodes: Sequence[Hashable]) -> Callable[[Hashable, Ranks], Ranks]:
    """Returns what chooses the ranks on a node, or all of them where none is there. nodes: of each
    rank."""

    @cache
    def near(node: Hashable, ranks: Ranks) -> Ranks:
        return tuple(r for r in ranks if nodes[r] == node) or ranks

    return near


@dataclass(frozen=True)
class TransferPlan:
    """Holds a plan, of which every rank asks for its own part.

    geometries: of each receiver, one for all whose tables are equal. senders: the rank that sends
    to a receiver what a source has, -1 for nothing, [receivers, sources].
    """

    sources: Sources
    receivers: tuple[Receiver, ...]
    geometries: tuple[Geometry, ...]
    senders: Ints
    round_bytes: int

    @cached_property
    def digest(self) -> str:
        """Returns a hash of who sends what to whom in which round, to compare between ranks."""
        facts = self.receivers, self.sources.ranks, self.round_bytes, len(self.sources.order)
        digest = hashlib.sha256(repr(facts).encode() + self.senders.tobytes())
        for g in {id(g): g for g in self.geometries}.values():
            for numbers in (g.entry, g.source, g.nbytes, g.round):
                digest.update(numbers.tobytes())
        return digest.hexdigest()

    def sends(self, rank: int) -> Iterator[list[Message]]:
        """Yields what a rank that receives nothing sends, by groups of messages that go at once:
        those of a round in the receivers' order, at most `round_bytes` in all, unless one number is
        larger.

        Nothing waits in a circle where receivers send nothing, take rounds in order and post all
        messages of a round at once: of the messages that are not done, both ends have got to one of
        the earliest round. No round is a barrier.
        """
        rounds: dict[int, dict[int, list[int]]] = defaultdict(partial(defaultdict, list))
        for r, source in np.argwhere(self.senders == rank).tolist():
            for number in self.geometries[r].rounds_of[source]:
                rounds[number][r] += self.geometries[r].parts[number, source].tolist()
        local = _RankSlices(self.sources.table, rank)
        for number in sorted(rounds):
            group: list[Message] = []
            load = 0
            for r, slices in rounds[number].items():
                geometry = self.geometries[r]
                nbytes = int(geometry.nbytes[slices].sum())
                if group and load + nbytes > self.round_bytes:
                    yield group
                    group, load = [], 0
                parts = [local.slice(geometry, i) for i in slices]
                group.append(Message(number, rank, self.receivers[r], parts))
                load += nbytes
            yield group

    def receives(self, receiver: Receiver) -> list[list[Any]]:
        """Returns what a receiver gets, as JSON-able data. A round is a list of messages [sender,
        slices], all to be posted at once. A slice is the number of one of the entries of its table,
        or where it is a part of it, [number, [[offset, shape, strides] of each view of the entry's
        parameter]]. Slices are in the order of the message's bytes."""
        r = self.receivers.index(receiver)
        rows = self.geometries[r].rows
        return [
            [[sender, [rows[i] for i in slices]] for sender, slices in messages.items()]
            for messages in self._rounds(r)
        ]

    def steps(
        self, rank: int, ends: Sequence[int], limit: int, only: Iterable[int] | None = None
    ) -> list[Step]:
        """Returns what rank `rank` of a group does, in order, where ranks may send and receive.

        ends: the group's ranks that those of the source are; receivers' ranks are the group's. No
        rank sends and receives more than `limit` bytes in a step, unless one message is larger.
        only: the numbers of receivers, by default all.
        """
        numbers = range(len(self.receivers)) if only is None else tuple(only)
        sender = ends.index(rank) if rank in ends else -1
        local = _RankSlices(self.sources.table, sender) if sender >= 0 else None
        stays = [
            (local.slice(self.geometries[r], i), self.geometries[r].kept(i))
            for r in numbers
            if local is not None and self.receivers[r].rank == rank
            for i in np.flatnonzero(self.senders[r][self.geometries[r].source] == sender).tolist()
        ]
        steps: list[Step] = []
        for wave in self._waves(numbers, ends, limit):
            sends, receives = [], []
            for number, end, r, slices in wave:
                receiver, geometry = self.receivers[r], self.geometries[r]
                if end == sender and local is not None:
                    parts = [local.slice(geometry, i) for i in slices]
                    sends.append(Message(number, end, receiver, parts))
                elif receiver.rank == rank:
                    places = [geometry.kept(i) for i in slices]
                    receives.append(Message(number, end, receiver, places))
            if sends or receives:
                steps.append(Step(sends, receives, [] if steps else stays))
        return steps or ([Step([], [], stays)] if stays else [])

    def _waves(
        self, numbers: Sequence[int], ends: Sequence[int], limit: int
    ) -> Iterator[list[tuple[int, int, int, list[int]]]]:
        """Yields messages that go at once, each (round, sender, receiver's number, slices)."""
        wave: list[tuple[int, int, int, list[int]]] = []
        load = Counter[int]()
        rounds = {r: list(self._rounds(r)) for r in numbers}
        for number in range(max(map(len, rounds.values()), default=0)):
            for r in numbers:
                for sender, slices in rounds[r][number].items() if number < len(rounds[r]) else ():
                    pair = {ends[sender], self.receivers[r].rank}
                    if len(pair) == 1:
                        continue
                    nbytes = int(self.geometries[r].nbytes[slices].sum())
                    if wave and any(load[end] + nbytes > limit for end in pair):
                        yield wave
                        wave, load = [], Counter()
                    wave.append((number, sender, r, slices))
                    load.update(dict.fromkeys(pair, nbytes))
        if wave:
            yield wave

    def _rounds(self, r: int) -> Iterator[dict[int, list[int]]]:
        """Yields, for each round, the slices that receiver number r gets, by sender."""
        senders, geometry = self.senders[r].tolist(), self.geometries[r]
        by_round: list[dict[int, list[int]]] = [{} for _ in range(geometry.rounds)]
        for (number, source), slices in geometry.parts.items():
            by_round[number].setdefault(senders[source], []).extend(slices.tolist())
        return iter(by_round)


class _RankSlices:
    """Finds slices in the parameters of a rank of the source."""

    def __init__(self, table: PieceTable, rank: int) -> None:
        self._tensors, self._coords = table.by_name, table.layout.coords(rank)
        self._slices: dict[tuple[str, Box], Slice] = {}

    def slice(self, geometry: Geometry, i: int) -> Slice:
        """Returns where slice i of a geometry is on the rank."""
        tensor, box = geometry.entries[geometry.entry[i]].tensor, geometry.boxes[i]
        if (piece := self._slices.get((tensor, box))) is None:
            for p in self._tensors[tensor].held_by(self._coords):
                inside = zip(p.start, box[0], box[1], p.stop, strict=True)
                if all(a <= b and c <= d for a, b, c, d in inside):
                    break
            else:
                raise AssertionError(f"{tensor}: {box} is not on {self._coords}")
            views = cut(p.view, (p.start, p.stop), box)
            piece = self._slices[tensor, box] = Slice(tensor, *box, p.param, views)
        return piece


def plan_transfer(
    sources: Sources,
    targets: Mapping[Receiver, TargetTable],
    *,
    itemsizes: Mapping[str, int],
    round_bytes: int,
    prefer: Preference = lambda receiver, ranks: ranks,
) -> TransferPlan:
    """Plans a transfer of what `sources` have to receivers with these tables.

    itemsizes: bytes of a number by HF tensor, as it is sent. round_bytes: the most that a receiver
    takes at once.

    The cost is that of the distinct tables: receivers with equal ones differ in their senders
    alone. Raises ValueError naming the tensor where an entry would not be filled exactly once, and
    for different tables with one digest.
    """
    if round_bytes < 1:
        raise ValueError(f"round_bytes={round_bytes}: must be > 0")
    distinct: dict[str, tuple[TargetTable, Geometry]] = {}
    for receiver, table in targets.items():
        if table.digest not in distinct:
            cut_to = cut_table(table, sources, itemsizes, round_bytes)
            distinct[table.digest] = table, cut_to
        first = distinct[table.digest][0]
        if table.entries is not first.entries and table.entries != first.entries:
            raise ValueError(
                f"rank {receiver.rank} of server {receiver.target} has another table of digest "
                f"{table.digest}; a digest must cover the entries"
            )
    geometries = tuple(distinct[table.digest][1] for table in targets.values())
    senders = _choose(sources.ranks, tuple(targets), geometries, prefer)
    return TransferPlan(sources, tuple(targets), geometries, senders, round_bytes)


def _choose(
    sources: Sequence[Ranks],
    receivers: Sequence[Receiver],
    geometries: Sequence[Geometry],
    prefer: Preference,
) -> Ints:
    """Returns the rank that sends to each receiver what each source has, -1 where the receiver
    needs nothing of it, [receivers, sources].

    The largest share goes first, each to the rank that has least to send so far (Graham's longest
    processing time first, 1969), so that no rank sends more than another by more than one share,
    where sources and the preference leave the choice.
    """
    load = Counter[int]()
    senders = np.full((len(receivers), len(sources)), -1, dtype=np.int64)
    shares = {id(g): g.bytes_of_sources(len(sources)).tolist() for g in geometries}
    tasks = [
        (-nbytes, source, r)
        for r, g in enumerate(geometries)
        for source, nbytes in enumerate(shares[id(g)])
        if nbytes
    ]
    for minus, source, r in sorted(tasks):
        sender = min(prefer(receivers[r], sources[source]), key=load.__getitem__)
        senders[r, source] = sender
        load[sender] -= minus
    return senders
