"""Compares what stock servers hold with what trainers hold, by HF name, without moving numbers.

A server rank with the receiver says a fingerprint of each box of an HF tensor that it keeps: a sum
over the bits, each weighted by its element's number in the HF tensor. Parts of a tensor add up, in
whatever layout: each trainer rank sums what it holds of the same boxes, and one sum over the ranks
gives what every server rank should have said.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from megarl.api.records import ServersLost, WeightUpdateMeta
from megarl.models.gather import export_dtype
from megarl.models.ops import Shape
from megarl.models.piece_table import Piece
from megarl.transfer.boxes import Box, cut, intersection, uncovered
from megarl.transfer.geometry import Entry, copies, holders
from megarl.utils.http import in_thread
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.servers import Deadline, ServerInfo, address_for
from megarl.weight_sync.slices.link import (
    Link,
    Members,
    PackedTables,
    open_store,
    record,
    spec_of,
)
from megarl.weight_sync.slices.receiver.megarl_receiver.strides import MODULUS, fingerprint
from megarl.weight_sync.transports import WeightSource
from megarl.weight_sync.verify import once_each

log = logging.getLogger(__name__)

_SHOWN = 3  # tensors of a server
_HALF = 32  # bits: half a fingerprint; sums of halves over ranks stay within an int64
ON_GPU = "this has not been run on a GPU yet; weight_sync.verify=full compares it all the same"
# other numbers are made of what was sent, not copied: FP8 has scales beside it
PLAIN = ("float32", "bfloat16", "float16")

Replies = Mapping[str, Sequence[Mapping[str, Any]]]  # by server and rank


class Part(NamedTuple):
    """Names a box of an HF tensor, and the dtype in which it is held."""

    tensor: str
    start: Shape
    stop: Shape
    dtype: str


@dataclass
class Kept:
    """Holds what a server rank's table says. parts: of each entry; None where the entry's parameter
    does not show what the tensor was. unclear: why, by HF tensor."""

    entries: Sequence[Entry]
    parts: list[Part | None] = field(default_factory=list)
    unclear: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, packed: bytes) -> Kept:
        """Reads a table."""
        table = json.loads(zlib.decompress(packed))
        kept = cls([Entry(*row) for row in table["entries"]])
        mixed = dict.fromkeys(table["computed"], "is computed from it")
        mixed |= {p: f"takes {n} elements from two places" for p, n in table["twice"].items()}
        mixed |= {p: f"is held as {d}" for p, d in table["params"].items() if d not in PLAIN}
        for param, names in table["computed"].items():
            kept.unclear |= dict.fromkeys(names, f"{param} {mixed[param]}")
        for e in kept.entries:
            if e.param in mixed:
                kept.unclear[e.tensor] = f"{e.param} {mixed[e.param]}"
                kept.parts.append(None)
            else:
                dtype = table["params"][e.param]
                kept.parts.append(Part(e.tensor, tuple(e.start), tuple(e.stop), dtype))
        return kept


class Fingerprints:
    """Compares one sync, on every rank of an engine alike, where `meta` asks to compare everything.

    `record` comes before `compare`, both in one update session: outside of it parameters may be
    packed, and a session in which nothing is loaded would pack some a second time. speaker: the
    rank that asks the servers.
    """

    def __init__(
        self,
        source: WeightSource,
        speaker: int,
        meta: WeightUpdateMeta,
        deadline: Deadline,
        phases: Phases,
    ) -> None:
        self.source, self.meta, self._speaker = source, meta, speaker
        self._deadline, self._phases = deadline, phases
        self._link: Link | None = None
        self._tables: PackedTables = []

    def record(self, info: Mapping[str, ServerInfo], link: Link | None = None) -> None:
        """Has the servers that can record, best before weights arrive. info, and link where there
        is one to them all: on the rank that speaks. Collective. Raises ServersLost."""
        if not self.meta.compares_all:
            return
        with self._phases.time("verify"):
            self._tables = self._from_speaker(self._record, info, link)

    def compare(self) -> Mapping[str, bool]:
        """Returns the servers that were compared, and whether all of their tensors were.
        Collective. Raises RuntimeError naming server, rank and tensors where they hold something
        else than the trainers, ServersLost where some are lost."""
        if not self._tables:
            return {}
        with self._phases.time("verify"):
            agreement, link = self.source.agreement, self._link
            kept = {raw: Kept.of(raw) for _, ranks in self._tables for raw in ranks}
            parts = list(dict.fromkeys(p for k in kept.values() for p in k.parts if p is not None))
            asked = in_thread(link.call, "hash", self._deadline) if link is not None else None
            sums = agreement.together(self._sums, parts)
            halves = torch.tensor([[n >> _HALF, n % (1 << _HALF)] for n in sums], dtype=torch.int64)
            pairs = agreement.add_up(halves.reshape(-1, 2)).tolist()
            wanted = {
                part: ((high << _HALF) + low) % MODULUS
                for part, (high, low) in zip(parts, pairs, strict=True)
            }
            return dict(self._from_speaker(self._check, asked, kept, wanted))

    def _from_speaker(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Returns on every rank what `fn` returns on the one that speaks. Collective."""
        speaks, agreement = self.source.rank == self._speaker, self.source.agreement
        found = agreement.together(lambda: fn(*args) if speaks else None)
        return agreement.gather_from([self._speaker], found)[0]

    def _dtype(self, name: str) -> torch.dtype:
        return export_dtype(self.source.table.by_name[name], self.source.dtype)

    # ---- on the rank that speaks

    def _record(self, info: Mapping[str, ServerInfo], link: Link | None) -> PackedTables:
        stock = {a: i for a, i in info.items() if not i.hf_checksums}
        if self.meta.quantization != "none":
            _not_compared(dict.fromkeys(stock, "it takes FP8, and trainers hold other numbers"))
            return []
        if self.meta.verify != "full" and self.source.device.type == "cuda":
            _not_compared(dict.fromkeys(stock, ON_GPU))
            return []
        why = {a: i.refuses_slices for a, i in stock.items()}
        _not_compared({a: f"it {reason}" for a, reason in why.items() if reason})
        able = {a: i.tp for a, i in stock.items() if not why[a]}
        if not able:
            return []
        try:
            self._link = link or self._reach(able)
            spec = spec_of(self.source.table, self._dtype)
            return record(self._link, spec, self._deadline)
        except ServersLost:
            raise
        except RuntimeError as e:
            _not_compared(dict.fromkeys(able, str(e)))
            return []

    def _reach(self, servers: Mapping[str, int]) -> Link:
        """Returns a link for commands alone, which no other rank is in."""
        s, timeout = self.source, self._deadline.left
        store, where = open_store(address_for(servers), timeout)
        members = Members(s.layout.world_size, servers, "gloo")
        return Link(members, s.rank, where, torch.device("cpu"), timeout, store)

    def _check(
        self, asked: Future[Any], kept: Mapping[bytes, Kept], wanted: Mapping[Part, int]
    ) -> dict[str, bool]:
        try:
            replies: Replies = asked.result()
        except ServersLost:
            raise
        except RuntimeError as e:
            _not_compared({server: str(e) for server, _ in self._tables})
            return {}
        wrong = []
        for server, ranks in self._tables:
            for rank, (raw, reply) in enumerate(zip(ranks, replies[server], strict=True)):
                if other := self._differences(kept[raw], reply, wanted):
                    wrong.append(f"server {server}, rank {rank}: {_few(other)}")
        if wrong:
            raise RuntimeError(
                f"servers do not hold the weights sent: {'; '.join(wrong)}. Sync again; where it "
                "comes back, start these servers anew and look for what else writes to their "
                "weights"
            )
        unclear: dict[tuple[bytes, ...], dict[str, str]] = {}  # servers alike have equal tables
        for server, ranks in self._tables:
            key = tuple(ranks)
            if key not in unclear:
                unclear[key] = self._unclear([kept[raw] for raw in ranks])
            self._tell(server, unclear[key])
        return {server: not unclear[tuple(ranks)] for server, ranks in self._tables}

    def _differences(
        self, kept: Kept, reply: Mapping[str, Any], wanted: Mapping[Part, int]
    ) -> list[str]:
        """Returns the boxes in which a rank holds something else, in words."""
        assert self._link is not None
        sums = json.loads(zlib.decompress(self._link.box.take(f"hash/{reply['at']}")))
        return [
            f"{_name(part)} in {e.param}"
            for e, part, held in zip(kept.entries, kept.parts, sums, strict=True)
            if part is not None and wanted[part] != held
        ]

    def _unclear(self, ranks: Sequence[Kept]) -> dict[str, str]:
        """Returns why, by HF tensor, what a server's ranks said does not prove all of it."""
        unclear = {name: why for kept in ranks for name, why in kept.unclear.items()}
        boxes: dict[str, set[Box]] = {}
        for part in (p for kept in ranks for p in kept.parts if p is not None):
            boxes.setdefault(part.tensor, set()).add((part.start, part.stop))
        for t in self.source.table.tensors:
            missing = uncovered(t.shape, boxes.get(t.name, ()))
            if missing and t.name not in unclear:
                unclear[t.name] = f"the server keeps {t.numel - missing} of its {t.numel} elements"
        return unclear

    def _tell(self, server: str, unclear: Mapping[str, str]) -> None:
        """Says that a server holds nothing wrong, and which tensors that does not prove."""
        count = len(self.source.table.tensors) - len(unclear)
        if not unclear:
            log.log(
                once_each(logging.INFO, [server]),
                "fingerprints of %d tensors agree with all ranks of server %s",
                count,
                server,
            )
            return
        log.log(
            once_each(logging.WARNING, [server]),
            "fingerprints of %d tensors agree with all ranks of server %s; not proved: %s",
            count,
            server,
            _few([f"{name} ({why})" for name, why in unclear.items()]),
        )

    # ---- on every rank

    @torch.no_grad()
    def _sums(self, parts: Sequence[Part]) -> list[int]:
        """Returns the fingerprints of what this rank answers for of each part."""
        s, order = self.source, {t.name: i for i, t in enumerate(self.source.table.tensors)}
        held_by, coords = holders(s.layout), s.layout.coords(s.rank)
        mine: dict[str, list[Piece]] = {}

        def own(name: str) -> Iterator[Piece]:
            """Yields this rank's pieces of a tensor; those that hold the same take turns."""
            t = s.table.by_name[name]
            for alike in copies(t).values():
                ranks = sorted({r for p in alike for r in held_by(p.place)})
                if ranks[order[name] % len(ranks)] == s.rank:
                    yield next(p for p in alike if p.place.holds(coords))

        sums = [0] * len(parts)
        read: dict[str, torch.Tensor] = {}
        # in HF order, so that a parameter is read once: adapters are merged as it is read
        places = [order[part.tensor] for part in parts]
        for i in sorted(range(len(parts)), key=places.__getitem__):
            part = parts[i]
            if part.tensor not in mine:
                mine[part.tensor] = list(own(part.tensor))
            for piece in mine[part.tensor]:
                if piece.param not in read:
                    read = {piece.param: s.params[piece.param]}
                sums[i] += self._sum(part, piece, read[piece.param])
        return [n % MODULUS for n in sums]

    def _sum(self, part: Part, piece: Piece, param: torch.Tensor) -> int:
        """Returns the fingerprint of what a piece has of a part, as it is once it has been sent and
        copied into the server's parameter."""
        whole = piece.start, piece.stop
        box = intersection(whole, (part.start, part.stop))
        if box is None:
            return 0
        tensor = self.source.table.by_name[part.tensor]
        casts = self._dtype(tensor.name), getattr(torch, part.dtype)
        total, first = 0, 0
        for v in cut(piece.view, whole, box):
            local = param.as_strided(v.shape, v.strides, param.storage_offset() + v.offset)
            total += fingerprint(local, tensor.shape, *box, first=first, casts=casts)
            first += local.numel()
        return total


def _not_compared(why: Mapping[str, str]) -> None:
    for server, reason in why.items():
        level = once_each(logging.WARNING, [f"{server} by HF name"])
        log.log(level, "server %s is not compared by HF name: %s", server, reason)


def _name(part: Part) -> str:
    box = ", ".join(f"{a}:{b}" for a, b in zip(part.start, part.stop, strict=True))
    return f"{part.tensor} [{box}]"


def _few(found: Sequence[str]) -> str:
    more = len(found) - _SHOWN
    return ", ".join(found[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
