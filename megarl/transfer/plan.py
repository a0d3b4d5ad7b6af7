"""Plans which rank sends which numbers of a model to whom, and when.

Pure but for `plan_together`: what a source has and what receivers keep give the plan, alike on
every rank, so no message announces another. A receiver takes what it keeps in rounds of bounded
size, each with a share of every source, in HF order: so all of them send at any time, and not the
first pipeline stage alone.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from megarl.models.piece_table import PieceTable
from megarl.parallel import ranks
from megarl.transfer.boxes import Box, cut, intersection
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


class _Planned(NamedTuple):
    """Holds a message by numbers: slices of receiver number `to`."""

    round: int
    to: int
    sender: int
    slices: Sequence[int]


@dataclass(frozen=True)
class TransferPlan:
    """Holds a plan, of which every rank asks for its own part.

    geometries: of each receiver, one for all whose tables are equal. senders: the rank that sends
    to a receiver what a source has, -1 for nothing, [receivers, sources]. dtypes: that each HF
    tensor is sent in.
    """

    sources: Sources
    receivers: tuple[Receiver, ...]
    geometries: tuple[Geometry, ...]
    senders: Ints
    dtypes: Mapping[str, torch.dtype]
    round_bytes: int

    @cached_property
    def digests(self) -> Mapping[str, str]:
        """Returns hashes of what a plan is made of, by their names, and of who sends what to whom
        in which round, to compare between ranks."""
        table, slices = self.sources.table, list[Any]()
        for g in {id(g): g for g in self.geometries}.values():
            arrays = (g.entry, g.source, g.nbytes, g.round)
            # Python hashes numbers alike in all processes
            slices += [hash(tuple(g.boxes)), *(zlib.crc32(a.tobytes()) for a in arrays)]
        facts = {
            "model": [(t.name, t.shape) for t in table.tensors],
            "layout": (table.layout, self.sources.ranks),
            "dtype": [self.dtypes.get(t.name) for t in table.tensors],
            "bucket_bytes": (self.round_bytes, self.receivers),
            "plan": (slices, zlib.crc32(self.senders.tobytes())),
        }
        return {k: hashlib.sha256(repr(fact).encode()).hexdigest() for k, fact in facts.items()}

    def sends(self, rank: int) -> Iterator[list[Message]]:
        """Yields what a rank that receives nothing sends, by groups of messages that go at once:
        those of a round in the receivers' order, at most `round_bytes` in all, unless one number is
        larger.

        Nothing waits in a circle where receivers send nothing, take rounds in order and post all
        messages of a round at once: of the messages that are not done, both ends have got to one of
        the earliest round. No round is a barrier.
        """
        find = _found_on(self.sources.table, rank)
        planned = self._messages(range(len(self.receivers)), rank)
        for _, of_round in groupby(planned, key=attrgetter("round")):
            for group in self._at_once(of_round, lambda m: {rank}, self.round_bytes):
                yield [self._message(m, find) for m in group]

    def receives(self, receiver: Receiver) -> list[list[Any]]:
        """Returns what a receiver gets, as JSON-able data. A round is a list of messages [sender,
        slices], all to be posted at once. A slice is the number of one of the entries of its table,
        or where it is a part of it, [number, [[offset, shape, strides] of each view of the entry's
        parameter]]. Slices are in the order of the message's bytes."""
        r = self.receivers.index(receiver)
        rows = self.geometries[r].rows
        return [
            [[m.sender, [rows[i] for i in m.slices]] for m in of_round]
            for _, of_round in groupby(self._messages([r]), key=attrgetter("round"))
        ]

    def arrivals(self, receiver: Receiver) -> list[list[tuple[int, int]]]:
        """Returns what a receiver gets by rounds: the sender and the bytes of each message, in the
        order of `receives`."""
        r = self.receivers.index(receiver)
        nbytes = self.geometries[r].nbytes
        return [
            [(m.sender, int(nbytes[m.slices].sum())) for m in of_round]
            for _, of_round in groupby(self._messages([r]), key=attrgetter("round"))
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
        find = _found_on(self.sources.table, max(sender, 0))
        stays = [
            (find(*self.geometries[r].part(i)), self.geometries[r].kept(i))
            for r in numbers
            if sender >= 0 and self.receivers[r].rank == rank
            for i in np.flatnonzero(self.senders[r][self.geometries[r].source] == sender).tolist()
        ]

        def pair(m: _Planned) -> set[int]:
            return {ends[m.sender], self.receivers[m.to].rank}

        steps: list[Step] = []
        moving = (m for m in self._messages(numbers) if len(pair(m)) == 2)
        for wave in self._at_once(moving, pair, limit):
            sends, receives = [], []
            for m in wave:
                if m.sender == sender:
                    sends.append(self._message(m, find))
                elif self.receivers[m.to].rank == rank:
                    receives.append(self._message(m))
            if sends or receives:
                steps.append(Step(sends, receives, [] if steps else stays))
        return steps or ([Step([], [], stays)] if stays else [])

    def _messages(self, numbers: Sequence[int], sender: int | None = None) -> list[_Planned]:
        """Returns the messages to these receivers, of one sender or of all, by rounds: an order
        that is the same on every rank."""
        senders = self.senders[list(numbers)]
        slices = defaultdict[tuple[int, int, int], list[int]](list)
        chosen = senders >= 0 if sender is None else senders == sender
        for i, source in np.argwhere(chosen).tolist():
            geometry, end = self.geometries[numbers[i]], int(senders[i, source])
            for number, part in geometry.parts[source]:
                slices[number, numbers[i], end] += part
        return [_Planned(*message, slices[message]) for message in sorted(slices)]

    def _at_once(
        self, planned: Iterable[_Planned], ends: Callable[[_Planned], set[int]], limit: int
    ) -> Iterator[list[_Planned]]:
        """Groups messages so that no end has more than `limit` bytes of a group, unless one message
        is larger."""
        group, load = list[_Planned](), Counter[int]()
        for m in planned:
            nbytes = int(self.geometries[m.to].nbytes[m.slices].sum())
            if group and any(load[end] + nbytes > limit for end in ends(m)):
                yield group
                group, load = [], Counter()
            group.append(m)
            load.update(dict.fromkeys(ends(m), nbytes))
        if group:
            yield group

    def _message(self, m: _Planned, find: Callable[[str, Box], Slice] | None = None) -> Message:
        """Returns the message as its sender has it, which finds its slices, or its receiver."""
        g = self.geometries[m.to]
        slices = [find(*g.part(i)) if find else g.kept(i) for i in m.slices]
        return Message(m.round, m.sender, self.receivers[m.to], slices)


def _found_on(table: PieceTable, rank: int) -> Callable[[str, Box], Slice]:
    """Returns what finds where a rank of the source has a box of an HF tensor."""
    coords = table.layout.coords(rank)

    @cache
    def find(tensor: str, box: Box) -> Slice:
        for p in table.by_name[tensor].held_by(coords):
            if intersection((p.start, p.stop), box) == box:
                return Slice(tensor, *box, p.param, cut(p.view, (p.start, p.stop), box))
        raise AssertionError(f"{tensor}: {box} is not on {coords}")

    return find


def plan_transfer(
    sources: Sources,
    targets: Mapping[Receiver, TargetTable],
    *,
    dtypes: Mapping[str, torch.dtype],
    round_bytes: int,
    prefer: Preference = lambda receiver, ranks: ranks,
) -> TransferPlan:
    """Plans a transfer of what `sources` have to receivers with these tables.

    dtypes: that each HF tensor is sent in. round_bytes: the most that a receiver takes at once.

    The cost is that of the distinct tables: receivers with equal ones differ in their senders
    alone. Raises ValueError naming the tensor where an entry would not be filled exactly once, and
    for different tables with one digest.
    """
    if round_bytes < 1:
        raise ValueError(f"round_bytes={round_bytes}: must be > 0")
    distinct: dict[str, tuple[TargetTable, Geometry]] = {}
    for receiver, table in targets.items():
        if table.digest not in distinct:
            cut_to = cut_table(table, sources, dtypes, round_bytes)
            distinct[table.digest] = table, cut_to
        first = distinct[table.digest][0]
        if table.entries is not first.entries and table.entries != first.entries:
            raise ValueError(
                f"rank {receiver.rank} of server {receiver.target} has another table of digest "
                f"{table.digest}; a digest must cover the entries"
            )
    geometries = tuple(distinct[table.digest][1] for table in targets.values())
    senders = _choose(sources.ranks, tuple(targets), geometries, prefer)
    return TransferPlan(sources, tuple(targets), geometries, senders, dtypes, round_bytes)


def plan_together(what: str, plan: Callable[[], TransferPlan], among: ranks.Ranks) -> TransferPlan:
    """Returns what `plan` returns, before the first byte moves. Collective over `among`, which all
    plan alike: an error of one is an error on all, and so is a ValueError that names the first rank
    with another plan than rank 0's, and what it is made of otherwise."""
    planned = among.together(plan, what=what)
    digests = among.gather(planned.digests, name=what)
    for rank, others in enumerate(digests):
        for name, digest in others.items():
            if digest != digests[0][name]:
                raise ValueError(
                    f"{what}: rank {rank} has another {name} than rank 0; give every rank the same "
                    "model, layout, dtype and bucket_bytes"
                )
    return planned


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
    shares = {id(g): np.bincount(g.source, g.nbytes).astype(int).tolist() for g in geometries}
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
