"""Compares what servers hold with what trainers hold, by HF name, without moving numbers.

A server's ranks record once which box of an HF tensor lies where (see receiver/megarl_receiver),
and answer the hash of each box. Each trainer rank hashes its part of the same boxes, and the sum
over the ranks is the hash that a server should answer.
"""

from __future__ import annotations

import json
import logging
import random
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from megarl.api.records import ServersLost, WeightUpdateMeta
from megarl.models.ops import Shape
from megarl.models.params import local_view
from megarl.models.piece_table import HfTensor, Piece, PieceTable
from megarl.transfer.boxes import Box, intersection, uncovered
from megarl.transfer.gather import export_dtype
from megarl.transfer.geometry import Slice, copies, holders, read_entries
from megarl.utils.http import in_thread
from megarl.weight_sync.fp8 import BlockFp8
from megarl.weight_sync.link import (
    Link,
    Members,
    PackedTables,
    few,
    open_store,
    record,
    spec_of,
)
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.receiver.megarl_receiver.fingerprint import tensor_hash
from megarl.weight_sync.servers import Deadline, ServerInfo, Servers, address_for
from megarl.weight_sync.transports import WeightSource

log = logging.getLogger(__name__)

SAMPLE = 8  # tensors
_LOGGED = set[tuple[int, str]]()  # (level, what about) of the lines so far
ON_GPU = "this has not been run on a GPU yet; weight_sync.verify=full compares it all the same"
# other numbers are made of what was sent, not copied: FP8 has scales beside it
PLAIN = ("float64", "float32", "bfloat16", "float16")


class Part(NamedTuple):
    """Names a box of an HF tensor, and the dtype in which it is held."""

    tensor: str
    start: Shape
    stop: Shape
    dtype: str


@dataclass
class RecordedTable:
    """Holds what a server rank's table says of some HF tensors. parts: of each of their entries;
    None where the entry's parameter does not show what the tensor was. unclear: why, by HF tensor,
    and by parameter where no HF tensor fills it."""

    entries: Sequence[Slice]
    parts: list[Part | None] = field(default_factory=list)
    unclear: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, packed: bytes, names: frozenset[str]) -> RecordedTable:
        """Reads what a table says of the HF tensors `names`."""
        table = json.loads(zlib.decompress(packed))
        recorded = cls([e for e in read_entries(table["entries"]) if e.tensor in names])
        recorded.unclear |= dict.fromkeys(table["unfilled"], "no tensor that is sent fills it")
        mixed = dict.fromkeys(table["computed"], "is computed from it")
        mixed |= {p: f"takes {n} elements from two places" for p, n in table["twice"].items()}
        mixed |= {p: f"is held as {d}" for p, d in table["params"].items() if d not in PLAIN}
        for param, tensors in table["computed"].items():
            why = f"{param} {mixed[param]}"
            recorded.unclear |= dict.fromkeys(names.intersection(tensors), why)
        for e in recorded.entries:
            if e.param in mixed:
                recorded.unclear[e.tensor] = f"{e.param} {mixed[e.param]}"
                recorded.parts.append(None)
            else:
                dtype = table["params"][e.param]
                recorded.parts.append(Part(e.tensor, *e.box, dtype))
        return recorded


class Fingerprints:
    """Compares one sync, on every rank of an engine alike, as `meta.verify` asks.

    `record` comes before `compare`, both in one update session of stock servers: outside of it
    their parameters may be packed, and a session in which nothing is loaded would pack some a
    second time. speaker: the rank that asks the servers.
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
        self._packed: PackedTables = {}
        self._embedded = frozenset[str]()
        self._not_compared: dict[str, str] = {}  # by server, why
        names = [t.name for t in source.table.tensors]
        self._names = frozenset(names) if meta.compares_all else sample(names, meta.number)

    def record(
        self, info: Mapping[str, ServerInfo], link: Link | None = None, *, why_not: str = ""
    ) -> None:
        """Has the servers that can record, best before weights arrive. info, and link where there
        is one to them all: on the rank that speaks. why_not: stock servers are left out for this
        reason. Collective. Raises ServersLost."""
        if self.meta.verify == "off":
            return
        with self._phases.time("verify"):
            self._packed = self.source.from_rank(self._speaker, self._record, info, link, why_not)

    def compare(self) -> bool:
        """Returns whether all servers were compared, and whole, which is the metric `verified`.
        Collective. Raises RuntimeError naming server, rank and tensors where they hold something
        else than the trainers, or an embedded one more or less, ServersLost where some are lost."""
        if self.meta.verify == "off":
            return False
        with self._phases.time("verify"):
            ranks = self.source.ranks
            distinct = dict.fromkeys(raw for tables in self._packed.values() for raw in tables)
            tables = {raw: RecordedTable.of(raw, self._names) for raw in distinct}
            boxes = (part for table in tables.values() for part in table.parts)
            parts = list(dict.fromkeys(part for part in boxes if part is not None))
            answer = ranks.together(self._ask)
            sums = ranks.add_up(ranks.together(self._sums, parts)).tolist()
            expected = dict(zip(parts, sums, strict=True))
            verified = self.source.from_rank(self._speaker, self._check, answer, tables, expected)
        self._phases.metrics["verified"] = float(verified)
        return bool(verified)

    # ---- on the rank that speaks

    def _record(
        self, info: Mapping[str, ServerInfo], link: Link | None, why_not: str
    ) -> PackedTables:
        if self.meta.quantization != "none":
            why_not = "it takes FP8, and trainers hold other numbers"
        elif self.meta.verify != "full" and self.source.device.type == "cuda":
            why_not = ON_GPU
        self._embedded = frozenset(server for server, i in info.items() if i.embedded)
        for server, i in info.items():
            if i.refuses_slices:
                self._not_compared[server] = f"it {i.refuses_slices}"
            elif why_not and server not in self._embedded:
                self._not_compared[server] = why_not
        able = {a: i.tp for a, i in info.items() if a not in self._not_compared}
        if not able:
            return {}
        try:
            self._link = link or self._reach(able)
            spec = spec_of(self.source.table, self._dtype)
            return record(self._link, spec, self._deadline, self._not_compared)
        except ServersLost:
            raise
        except RuntimeError as e:
            self._not_compared |= dict.fromkeys(able, str(e))
            return {}

    def _reach(self, servers: Mapping[str, int]) -> Link:
        """Returns a link for commands alone, which no other rank is in."""
        s, timeout = self.source, self._deadline.left
        store, where = open_store(address_for(servers), timeout)
        members = Members(s.layout.world_size, servers, "gloo")
        return Link(members, s.rank, where, torch.device("cpu"), timeout, store)

    def _ask(self) -> Future[Any] | None:
        """Starts to ask the servers that have recorded for the hashes of their boxes."""
        if self._link is None or not self._packed:
            return None
        names = None if self.meta.compares_all else sorted(self._names)
        fields = dict(names=names, failed=self._not_compared)
        return in_thread(self._link.call, "hash", self._deadline, **fields)

    def _check(
        self,
        answer: Future[Any] | None,
        tables: Mapping[bytes, RecordedTable],
        expected: Mapping[Part, int],
    ) -> bool:
        """Returns whether all servers have proved that they hold what is expected."""
        packed, replies = self._packed, answer.result() if answer is not None else {}
        wrong = [
            f"server {server}, rank {rank}: {few(other)}"
            for server, ranks in replies.items()
            for rank, (raw, reply) in enumerate(zip(packed[server], ranks, strict=True))
            if (other := self._differences(tables[raw], reply, expected))
        ]
        if wrong:
            raise RuntimeError(
                f"servers do not hold the weights sent: {'; '.join(wrong)}. Sync again; where it "
                "comes back, start these servers anew and look for what else writes to their "
                "weights"
            )
        unclear = {  # servers alike have equal tables
            ranks: self._unclear([tables[raw] for raw in ranks])
            for ranks in {tuple(packed[server]) for server in replies}
        }
        for server in replies:
            self._tell(server, unclear[tuple(packed[server])])
        for server, why in self._not_compared.items():
            line = f"weights on {server} not verified: {why}"
            _log(logging.WARNING, f"not verified: {server}", line)
        return not any(unclear.values()) and not self._not_compared

    def _differences(
        self, table: RecordedTable, reply: Mapping[str, Any], expected: Mapping[Part, int]
    ) -> list[str]:
        """Returns the boxes in which a rank holds something else, in words."""
        assert self._link is not None
        hashes = json.loads(zlib.decompress(self._link.box.take(f"hash/{reply['at']}")))
        return [
            f"{_name(part)} in {e.param}"
            for e, part, number in zip(table.entries, table.parts, hashes, strict=True)
            if part is not None and expected[part] != number
        ]

    def _unclear(self, ranks: Sequence[RecordedTable]) -> dict[str, str]:
        """Returns why, by HF tensor, what a server's ranks said does not prove all of it."""
        unclear = {name: why for table in ranks for name, why in table.unclear.items()}
        boxes: dict[str, set[Box]] = {}
        for part in (p for table in ranks for p in table.parts if p is not None):
            boxes.setdefault(part.tensor, set()).add((part.start, part.stop))
        for t in self.source.table.tensors:
            missing = uncovered(t.shape, boxes.get(t.name, ())) if t.name in self._names else 0
            if missing and t.name not in unclear:
                unclear[t.name] = f"the server keeps {t.numel - missing} of its {t.numel} elements"
        return unclear

    def _tell(self, server: str, unclear: Mapping[str, str]) -> None:
        """Logs that a server holds nothing wrong, and which tensors that does not prove. Raises
        RuntimeError for such of an embedded server: it copies everything, so the models differ."""
        proved = len(self._names.difference(unclear))
        line = f"fingerprints of {proved} tensors agree with all ranks of server {server}"
        if unclear:
            line += f"; not proved: {few([f'{name} ({why})' for name, why in unclear.items()])}"
            if server in self._embedded:
                raise RuntimeError(f"{line}. Start it with a checkpoint of the model in training")
        _log(logging.WARNING if unclear else logging.INFO, server, line)

    # ---- on every rank

    def _dtype(self, name: str) -> torch.dtype:
        return export_dtype(self.source.table.by_name[name], self.source.dtype)

    @torch.no_grad()
    def _sums(self, parts: Sequence[Part]) -> torch.Tensor:
        """Returns the hashes of what this rank answers for of each part, int64 [parts]. Collective
        where FP8 is sent."""
        s, order = self.source, {t.name: i for i, t in enumerate(self.source.table.tensors)}
        own, fp8 = owned_pieces(s.table, s.rank), None
        if parts and self.meta.quantization == "fp8_block":
            fp8 = BlockFp8(s, {part.tensor for part in parts})
            fp8.measure()
        sums = [torch.zeros((), dtype=torch.int64, device=s.device) for _ in parts]
        read: dict[str, torch.Tensor] = {}
        # in HF order, so that a parameter is read once: adapters are merged as it is read
        places = [order[part.tensor] for part in parts]
        for i in sorted(range(len(parts)), key=places.__getitem__):
            part, tensor = parts[i], s.table.by_name[parts[i].tensor]
            for piece in own(tensor):
                if piece.param not in read:
                    read = {piece.param: s.params[piece.param]}
                box = intersection((piece.start, piece.stop), (part.start, part.stop))
                if box is not None:
                    sums[i] += self._sum(part, piece, box, read[piece.param], fp8)
        return torch.stack(sums).cpu() if sums else torch.zeros(0, dtype=torch.int64)

    def _sum(
        self, part: Part, piece: Piece, box: Box, param: torch.Tensor, fp8: BlockFp8 | None
    ) -> torch.Tensor:
        """Returns the hash of box `box` of a piece, as it is once it has been sent and copied into
        the server's parameter."""
        (start, stop), held = box, getattr(torch, part.dtype)
        values = piece_values(param, piece)
        values = values[
            tuple(slice(a - o, b - o) for a, b, o in zip(start, stop, piece.start, strict=True))
        ]
        if fp8 is not None and self.source.table.by_name[part.tensor].linear:
            return tensor_hash(fp8.products(part.tensor, box, values), start, [held])
        return tensor_hash(values, start, [self._dtype(part.tensor), held])


# ---- hashes of what a rank holds


def owned_pieces(table: PieceTable, rank: int) -> Callable[[HfTensor], Iterator[Piece]]:
    """Returns a function that yields the pieces of a tensor that this rank answers for. Of the
    ranks that hold the same numbers one does, in turn from tensor to tensor."""
    coords, held_by = table.layout.coords(rank), holders(table.layout)
    order = {t.name: i for i, t in enumerate(table.tensors)}

    def own(tensor: HfTensor) -> Iterator[Piece]:
        for alike in copies(tensor).values():
            ranks = sorted({r for p in alike for r in held_by(p.place)})
            if ranks[order[tensor.name] % len(ranks)] == rank:
                yield next(p for p in alike if p.place.holds(coords))

    return own


def piece_values(param: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Returns the numbers of a piece in the shape of its box."""
    shape = [stop - start for start, stop in zip(piece.start, piece.stop, strict=True)]
    return local_view(param, piece.view).reshape(shape)


def weight_hashes(
    table: PieceTable, rank: int, params: Mapping[str, torch.Tensor], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns, for every tensor of the table, what this rank's pieces add to its hash [N] int64 and
    to the square of its norm [N] float64. Summed over the ranks of the layout, they are the
    tensors'."""
    hashes = torch.zeros(len(table.tensors), dtype=torch.int64, device=device)
    squares = torch.zeros(len(table.tensors), dtype=torch.float64, device=device)
    own = owned_pieces(table, rank)
    for i, tensor in enumerate(table.tensors):
        for piece in own(tensor):
            values = piece_values(params[piece.param], piece)
            hashes[i] += tensor_hash(values, piece.start)
            squares[i] += torch.linalg.vector_norm(values, dtype=torch.float32).double().square()
    return hashes, squares


# ---- what servers say of their weights


def held_checksums(
    addresses: Sequence[str], deadline: Deadline
) -> dict[str, list[Mapping[str, str]]]:
    """Returns the checksums of the tensors that servers hold, by server and its ranks: the embedded
    server's are hashes of HF tensors, stock SGLang's are its own, of fused and sharded parameters.
    Raises RuntimeError where a server has none, ServersLost where some are lost."""
    if not addresses:
        return {}
    answers = Servers(addresses).call("/weights_checker", {"action": "checksum"}, deadline)
    return {server: _checksums(server, answer) for server, answer in answers.items()}


def _checksums(server: str, answer: Any) -> list[Mapping[str, str]]:
    """Returns the checksums by the server's ranks. Raises RuntimeError without any."""
    ranks = answer.get("ranks") if isinstance(answer, dict) else None
    if not isinstance(ranks, list) or not all(
        isinstance(r, dict) and r.get("checksums") and isinstance(r["checksums"], dict)
        for r in ranks or [None]
    ):
        raise RuntimeError(f"server {server}: /weights_checker answered without checksums")
    return [r["checksums"] for r in ranks]


def sample(names: Collection[str], seed: int, size: int = SAMPLE) -> frozenset[str]:
    """Returns `size` of the names at most, always the same for a seed and others for another."""
    ordered = sorted(names)
    return frozenset(random.Random(seed).sample(ordered, min(size, len(ordered))))


def _log(level: int, about: str, line: str) -> None:
    """Logs a line about something, at `level` the first time and at DEBUG later."""
    log.log(logging.DEBUG if (level, about) in _LOGGED else level, line)
    _LOGGED.add((level, about))


def _name(part: Part) -> str:
    box = ", ".join(f"{a}:{b}" for a, b in zip(part.start, part.stop, strict=True))
    return f"{part.tensor} [{box}]"
