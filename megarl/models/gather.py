"""Gathers a sharded model, bucket by bucket, into flat HF-ordered buffers on one rank.

Used by saving and by weight sync; works for anything shaped like the parameters (gradients too).
Every source rank packs its strided pieces of a bucket into one contiguous message; the owner copies
received and own pieces straight into their places in the flat bucket. Ranks that share the bucket's
memory copy their pieces there themselves. Fused matrices are never un-fused into temporaries, and
the vocabulary padding is never sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.fill import local_view
from megarl.models.piece_table import HfTensor, Piece, PieceTable
from megarl.parallel.layout import Layout


@dataclass(frozen=True, slots=True)
class Member:
    """An HF tensor at bytes [offset, offset + nbytes) of its bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    index: int
    members: tuple[Member, ...]
    nbytes: int

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(HF name, view) of the flat uint8 bucket, in HF order; no copies."""
        for m in self.members:
            data = flat[m.offset : m.offset + m.nbytes]
            yield m.name, data.view(m.dtype).view(m.shape)


def export_dtype(tensor: HfTensor, dtype: torch.dtype | Mapping[str, torch.dtype]) -> torch.dtype:
    """`dtype`, one for all or by HF name; fp32 for what is so in every model."""
    if tensor.buffer:
        return torch.float32
    return dtype if isinstance(dtype, torch.dtype) else dtype[tensor.name]


def plan_buckets(
    table: PieceTable, dtype: torch.dtype | Mapping[str, torch.dtype], bucket_bytes: int
) -> tuple[Bucket, ...]:
    """Fills buckets of at most `bucket_bytes` with the table's tensors in HF order.

    Offsets are multiples of the member's itemsize; a tensor larger than a bucket gets its own.
    """
    buckets: list[Bucket] = []
    members: list[Member] = []
    end = 0

    def close() -> None:
        nonlocal members, end
        if members:
            buckets.append(Bucket(len(buckets), tuple(members), end))
        members, end = [], 0

    for t in table.tensors:
        dt = export_dtype(t, dtype)
        nbytes = t.numel * dt.itemsize
        start = -(-end // dt.itemsize) * dt.itemsize
        if members and start + nbytes > bucket_bytes:
            close()
            start = 0
        members.append(Member(t.name, t.shape, dt, start, nbytes))
        end = start + nbytes
    close()
    return tuple(buckets)


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece and where it goes: member `name` of the bucket, `start` elements into the message."""

    name: str
    piece: Piece
    dtype: torch.dtype
    offset: int  # bytes into its source's message
    nbytes: int


class BucketGatherer:
    """Gathers buckets of one layout to rank `owner`; every rank of the layout constructs it alike.

    params: canonical name -> local tensor (parameters or gradients), read at each `gather`.
    group:  process group that spans the layout's ranks; None is the default group. Rank numbers are
            the layout's, which are ranks of this group.
    device: where messages and the flat bucket live (that of the parameters, and of the backend).

    Memory: the owner holds one bucket and the messages of one bucket, a source its own message.
    Messages in host memory are kept for the next bucket: fresh pages cost more than the copy.
    """

    def __init__(
        self,
        table: PieceTable,
        layout: Layout,
        rank: int,
        params: Mapping[str, Tensor],
        buckets: Sequence[Bucket],
        owner: int = 0,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layout, self.rank, self.owner = layout, rank, owner
        self.params, self.group, self.device = params, group, torch.device(device)
        self._owner_coords = layout.coords(owner)
        self._messages: dict[int, Tensor] = {}
        self._plans = {b.index: self._plan(table, b) for b in buckets}

    def _plan(self, table: PieceTable, bucket: Bucket) -> dict[int, list[_Part]]:
        """Source rank -> the parts of its message, in order; the same on every rank."""
        plan: dict[int, list[_Part]] = {}
        ends: dict[int, int] = {}
        for m in bucket.members:
            for piece in table.by_name[m.name].pieces:
                src = self._source(piece)
                start = -(-ends.get(src, 0) // m.dtype.itemsize) * m.dtype.itemsize
                nbytes = piece.numel * m.dtype.itemsize
                plan.setdefault(src, []).append(_Part(m.name, piece, m.dtype, start, nbytes))
                ends[src] = start + nbytes
        return plan

    def _source(self, piece: Piece) -> int:
        """The owner itself where it is a data-parallel replica of the piece's holder."""
        if piece.place.holds(self._owner_coords):
            return self.owner
        return piece.place.rank(self.layout)

    @torch.no_grad()
    def gather(
        self, bucket: Bucket, out: Tensor | None = None, *, shared: bool = False
    ) -> Tensor | None:
        """Flat uint8 bucket [nbytes] on the owner (in `out` if given), None on the other ranks.

        shared: every rank gives an `out`, and all of them are the same host memory.

        Collective over the layout's ranks, which all gather the same buckets in the same order.
        Returns once this rank's part is done; the process group's timeout bounds the wait.
        """
        parts = self._plans[bucket.index].get(self.rank, [])
        if self.rank == self.owner:
            if out is None:
                out = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self.device)
            self._receive(bucket, parts, out, shared=shared)
            return out[: bucket.nbytes]
        if parts:
            message = self._message(self.rank, parts, shared=shared)
            if shared:
                assert out is not None
                self._place_own(bucket, parts, out)
            else:
                self._pack(parts, message)
            dist.send(message, group=self.group, group_dst=self.owner)
        return None

    def _receive(
        self, bucket: Bucket, parts: Sequence[_Part], out: Tensor, *, shared: bool
    ) -> None:
        """Own `parts` and everybody else's, on the owner."""
        remote = {s: p for s, p in self._plans[bucket.index].items() if s != self.rank}
        messages = {s: self._message(s, p, shared=shared) for s, p in remote.items()}
        works = {
            src: dist.irecv(message, group=self.group, group_src=src)
            for src, message in messages.items()
        }
        self._place_own(bucket, parts, out)
        views = dict(bucket.views(out))
        for src, work in works.items():
            assert work is not None  # None only on ranks outside the group
            work.wait()
            for part in () if shared else remote[src]:
                _place(views, part, _slot(messages[src], part))

    def _place_own(self, bucket: Bucket, parts: Sequence[_Part], out: Tensor) -> None:
        assert out.dtype == torch.uint8 and out.is_contiguous() and out.numel() >= bucket.nbytes
        views = dict(bucket.views(out))
        for part, source in self._local(parts):
            _place(views, part, source)

    def _pack(self, parts: Sequence[_Part], message: Tensor) -> None:
        for part, source in self._local(parts):
            _slot(message, part).copy_(source)

    def _local(self, parts: Sequence[_Part]) -> Iterator[tuple[_Part, Tensor]]:
        """Each part's numbers. A parameter may be made on demand (merged adapters): it is asked for
        once for its parts, which follow each other."""
        for name, group in groupby(parts, key=lambda part: part.piece.param):
            param = self.params[name]
            for part in group:
                yield part, local_view(param, part.piece)

    def _message(self, src: int, parts: Sequence[_Part], *, shared: bool) -> Tensor:
        """Of `parts` from `src`; where memory is shared, a byte that says they are in place."""
        nbytes = 1 if shared else parts[-1].offset + parts[-1].nbytes
        kept = self._messages.get(src)
        if kept is None or kept.numel() < nbytes:
            kept = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            if self.device.type == "cpu":
                self._messages[src] = kept
        return kept[:nbytes]


def _slot(message: Tensor, part: _Part) -> Tensor:
    """A part's place in the message, typed and shaped like its view."""
    data = message[part.offset : part.offset + part.nbytes]
    return data.view(part.dtype).view(part.piece.view.shape)


def _place(views: Mapping[str, Tensor], part: _Part, source: Tensor) -> None:
    """Copies (and casts) a piece into its box of the HF tensor. Boxes are at most split along their
    first dimension by the piece's view, so the box can always be seen in the view's shape."""
    views[part.name][part.piece.box].view(source.shape).copy_(source)
