"""Gathers a sharded model, bucket by bucket, into flat HF-ordered buffers on one rank.

Used by saving and by weight sync; works for anything shaped like the parameters (gradients too).
Every source rank packs its strided pieces of a bucket into one contiguous message, or into several
where the memory for them is bounded; the root copies received and own pieces straight into their
places in the flat bucket. Fused matrices are never un-fused into temporaries, and the vocabulary
padding is never sent.

Messages go from one rank to another, so no other rank takes part: neither the other pipeline stages
nor, for experts that the root holds whole (ETP=1), the other expert-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from megarl.models.messages import Message, Part, length, make_messages, slots
from megarl.models.param_loading import local_view
from megarl.models.piece_table import HfTensor, PieceTable
from megarl.parallel.layout import Layout
from megarl.wire.buckets import Bucket, Member

Dtypes = torch.dtype | Mapping[str, torch.dtype]  # one for all tensors, or each by HF name


def export_dtype(tensor: HfTensor, dtype: Dtypes) -> torch.dtype:
    """Returns the dtype that a tensor is sent or saved in; buffers are fp32 in any case."""
    if tensor.buffer:
        return torch.float32
    return dtype if isinstance(dtype, torch.dtype) else dtype[tensor.name]


def plan_buckets(
    table: PieceTable,
    dtype: Dtypes,
    bucket_bytes: int,
    *,
    unit: Callable[[str], str] = str,
) -> tuple[Bucket, ...]:
    """Fills buckets of at most `bucket_bytes` with the table's tensors in HF order.

    Offsets are multiples of the member's itemsize. Tensors that follow each other and for whose
    names `unit` says the same share a bucket; a unit larger than a bucket gets its own.
    """
    buckets: list[Bucket] = []
    members: list[Member] = []
    end = 0

    def close() -> None:
        nonlocal members, end
        if members:
            buckets.append(Bucket(len(buckets), tuple(members), end))
        members, end = [], 0

    for _, group in groupby(table.tensors, key=lambda t: unit(t.name)):
        tensors = list(group)
        added = _members(tensors, dtype, end)
        if members and added[-1].offset + added[-1].nbytes > bucket_bytes:
            close()
            added = _members(tensors, dtype, 0)
        members += added
        end = added[-1].offset + added[-1].nbytes
    close()
    return tuple(buckets)


def _members(tensors: Iterable[HfTensor], dtype: Dtypes, start: int) -> list[Member]:
    """Places tensors one after another, from byte `start` on."""
    members = []
    for t in tensors:
        dt = export_dtype(t, dtype)
        start = -(-start // dt.itemsize) * dt.itemsize
        members.append(Member(t.name, t.shape, dt, start, t.numel * dt.itemsize, t.linear))
        start = members[-1].offset + members[-1].nbytes
    return members


# Source rank -> its messages; the same on every rank. The root's own parts are one.
_Plan = Mapping[int, Sequence[Message]]
Packing = Callable[[], AbstractContextManager[None]]


class BucketGatherer:
    """Gathers buckets of one layout; every rank of the layout constructs it alike.

    params: canonical name -> local tensor (parameters or gradients), read at each `gather`.
    root:   the rank buckets are gathered to, one for all or that of each bucket.
    group:  process group that spans the layout's ranks; None is the default group. Rank numbers are
            the layout's, which are ranks of this group.
    device: where messages and the flat bucket live (that of the parameters, and of the backend).
    staging: bytes of messages that a root has room for; None is as much as a bucket takes.

    Memory: a root holds one bucket and `staging`, a source its own message. The memory for
    messages is kept for the next bucket on hosts, where fresh pages cost more than the copy;
    `message_bytes` is the most bytes that messages have taken.
    """

    def __init__(
        self,
        table: PieceTable,
        layout: Layout,
        rank: int,
        params: Mapping[str, Tensor],
        buckets: Sequence[Bucket],
        root: int | Sequence[int] = 0,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        staging: int | None = None,
    ) -> None:
        self.layout, self.rank = layout, rank
        self.params, self.group, self.device = params, group, torch.device(device)
        self.message_bytes = 0
        roots = [root] * len(buckets) if isinstance(root, int) else root
        self.roots = {b.index: o for b, o in zip(buckets, roots, strict=True)}
        self._room: Tensor | None = None
        self._plans = {b.index: self._plan(table, b, staging) for b in buckets}

    def _plan(self, table: PieceTable, bucket: Bucket, staging: int | None) -> _Plan:
        parts: dict[int, list[Part]] = {}
        root = self.roots[bucket.index]
        coords = self.layout.coords(root)
        for m in bucket.members:
            for piece in table.by_name[m.name].pieces:
                held = piece.place.holds(coords)  # in any data-parallel replica
                src = root if held else piece.place.rank(self.layout)
                part = Part(m.name, piece, m.dtype, 0, piece.numel * m.dtype.itemsize)
                parts.setdefault(src, []).append(part)
        others = len(parts.keys() - {root})
        limit = staging // others if staging is not None and others else None
        return {s: make_messages(p, None if s == root else limit) for s, p in parts.items()}

    @torch.no_grad()
    def gather(
        self,
        bucket: Bucket,
        out: Tensor | None = None,
        *,
        packing: Packing = nullcontext,
    ) -> Tensor | None:
        """Gathers one bucket. Returns it flat, uint8 [nbytes], on its root (in `out` if given) and
        None on the other ranks.

        packing: entered while this rank copies.

        Collective over the layout's ranks, which all gather the same buckets in the same order.
        Returns once this rank's part is done; the process group's timeout bounds the wait.
        """
        root, messages = self.roots[bucket.index], self._plans[bucket.index].get(self.rank, [])
        if self.rank == root:
            if out is None:
                out = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self.device)
            self._receive(bucket, out, packing)
            return out[: bucket.nbytes]
        room = self._take_room(max(map(length, messages), default=0))
        for message in messages:
            data = room[: length(message)]
            with packing():
                self._pack(message, data)
            self._send(data, root)
        return None

    def _receive(self, bucket: Bucket, out: Tensor, packing: Packing) -> None:
        """Copies own parts and receives everybody else's, one message of each source at a time."""
        left = {src: list(messages) for src, messages in self._remote(bucket).items()}
        slot_of, nbytes = slots(left)
        room = self._take_room(nbytes)

        def receipt(src: int) -> dist.P2POp:
            return self._receipt(room[slot_of[src]][: length(left[src][0])], src)

        works = dict(zip(left, self._post([receipt(src) for src in left])))
        with packing():
            self._place_own(bucket, out)
        views = dict(bucket.views(out))
        while left:
            for src in list(left):
                self._wait(works[src])
                with packing():
                    for part in left[src].pop(0):
                        _place(views, part, _slot(room[slot_of[src]], part))
                if left[src]:
                    (works[src],) = self._post([receipt(src)])
                else:
                    del left[src]

    def _remote(self, bucket: Bucket) -> dict[int, Sequence[Message]]:
        return {s: m for s, m in self._plans[bucket.index].items() if s != self.rank}

    def _receipt(self, data: Tensor, src: int) -> dist.P2POp:
        return dist.P2POp(dist.irecv, data, group=self.group, group_peer=src)

    def _send(self, data: Tensor, dst: int) -> None:
        (work,) = self._post([dist.P2POp(dist.isend, data, group=self.group, group_peer=dst)])
        self._wait(work)

    def _post(self, ops: list[dist.P2POp]) -> list[dist.Work]:
        """Starts these messages and returns the work to wait for of each. Messages of a batch go
        over the group's own NCCL communicator; a single message would make a communicator for its
        two ranks, which lives as long as the group."""
        works = dist.batch_isend_irecv(ops) if ops else []
        return works if len(works) == len(ops) else works * len(ops)  # NCCL: one for the batch

    def _wait(self, work: dist.Work) -> None:
        """Waits as long as the group's timeout is now. By default gloo waits for the timeout that
        the group was made with."""
        if self.device.type != "cpu":
            work.wait()
            return
        group = self.group or c10d._get_default_group()
        work.wait(group._get_backend(self.device).options._timeout)

    def _place_own(self, bucket: Bucket, out: Tensor) -> None:
        assert out.dtype == torch.uint8 and out.is_contiguous() and out.numel() >= bucket.nbytes
        views = dict(bucket.views(out))
        own = [p for message in self._plans[bucket.index].get(self.rank, []) for p in message]
        for part, source in self._local(own):
            _place(views, part, source)

    def _pack(self, parts: Sequence[Part], message: Tensor) -> None:
        for part, source in self._local(parts):
            _slot(message, part).copy_(source)

    def _local(self, parts: Sequence[Part]) -> Iterator[tuple[Part, Tensor]]:
        """Yields each part with its numbers. A parameter may be made on demand (merged adapters),
        so it is asked for once for all of its parts, which follow each other."""
        for name, group in groupby(parts, key=attrgetter("piece.param")):
            param = self.params[name]
            for part in group:
                yield part, local_view(param, part.piece)

    def _take_room(self, nbytes: int) -> Tensor:
        """Returns `nbytes` of memory for messages; on hosts it is kept for the next bucket."""
        if self._room is not None and self._room.numel() >= nbytes:
            return self._room[:nbytes]
        self._room = None  # freed before its successor is allocated
        room = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.message_bytes = max(self.message_bytes, nbytes)
        if self.device.type == "cpu":
            self._room = room
        return room


def _slot(message: Tensor, part: Part) -> Tensor:
    """Returns a part's place in the message, typed and shaped like its view."""
    data = message[part.offset : part.offset + part.nbytes]
    return data.view(part.dtype).view(part.piece.view.shape)


def _place(views: Mapping[str, Tensor], part: Part, source: Tensor) -> None:
    """Copies (and casts) a piece into its box of the HF tensor. Boxes are at most split along their
    first dimension by the piece's view, so the box can always be seen in the view's shape."""
    views[part.name][part.piece.box].view(source.shape).copy_(source)
