"""Carries out plans: packs, sends, receives and lands messages, in bounded memory.

A message holds its slices one after the other, larger items first, so that all are aligned. Nothing
is un-fused on the way: numbers are copied from the views of a parameter into the message, and from
there into the views of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from operator import attrgetter, mul
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from megarl.models.params import local_view
from megarl.models.piece_table import View
from megarl.transfer.boxes import Box
from megarl.transfer.geometry import Slice
from megarl.transfer.plan import Step

ALIGNMENT = 64  # bytes, that of torch's host allocator
FP8 = torch.float8_e4m3fn

Params = Mapping[str, Tensor]
Copying = Callable[[], AbstractContextManager[None]]
Dtypes = Mapping[str, torch.dtype]  # that each HF tensor is sent in
# writes a box of an HF tensor into a flat tensor in FP8; `read` copies its numbers into another
Quantize = Callable[[str, Box, Callable[[Tensor], None], Tensor], None]


class Slot(NamedTuple):
    """Says where a slice is: on this rank, and in the bytes [start, stop) of a message."""

    part: Slice
    dtype: torch.dtype
    start: int
    stop: int


@dataclass(frozen=True)
class Parts:
    """Holds where a message's slices are in its `nbytes` bytes."""

    nbytes: int
    slots: Sequence[Slot]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Returns (bytes of an element, bytes) of each slice, larger elements first."""
        return [(s.dtype.itemsize, s.stop - s.start) for s in self.slots]


def lay_out(slices: Sequence[Slice], dtypes: Dtypes) -> Parts:
    """Returns where slices are in a message (on servers: `megarl_receiver.messages.laid_out`)."""
    slots, end = [], 0
    typed = [(part, dtypes[part.tensor]) for part in slices]
    for part, dtype in sorted(typed, key=lambda p: -p[1].itemsize):
        start, end = end, end + part.numel * dtype.itemsize
        slots.append(Slot(part, dtype, start, end))
    return Parts(end, slots)


def pack(
    params: Params, parts: Parts, device: torch.device, quantize: Quantize | None = None
) -> Tensor:
    """Returns a message, uint8 [nbytes] on `device`, of these parameters."""
    message = torch.empty(parts.nbytes, dtype=torch.uint8, device=device)
    pack_into(message, params, parts, quantize)
    return message


@torch.no_grad()
def pack_into(
    message: Tensor, params: Params, parts: Parts, quantize: Quantize | None = None
) -> None:
    """Fills a message of these parameters. A parameter may be made on demand (merged adapters), so
    it is asked for once for slices that follow each other. Raises AssertionError for a slice of
    other numbers than its views."""
    for name, slots in groupby(parts.slots, key=attrgetter("part.param")):
        param = params[name]
        for part, dtype, start, stop in slots:
            flat, read = message[start:stop].view(dtype), partial(_read, param, part.views)
            if quantize is not None and dtype == FP8:
                quantize(part.tensor, (part.start, part.stop), read, flat)
            else:
                read(flat)


@torch.no_grad()
def land(params: Params, parts: Parts, message: Tensor, keep: float = 0.0) -> None:
    """Copies a message into parameters, which keep the share `keep` of their own."""
    for part, dtype, start, stop in parts.slots:
        flat = message[start:stop].view(dtype)
        for local, there in _pairs(params[part.param], part.views, flat):
            _blend(local, there, keep)


def _read(param: Tensor, views: Sequence[View], flat: Tensor) -> None:
    for local, there in _pairs(param, views, flat):
        there.copy_(local)


def _pairs(param: Tensor, views: Sequence[View], flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields each view of a parameter, and its numbers in `flat`."""
    end = 0
    for v in views:
        local = local_view(param, v)
        yield local, flat[end : end + local.numel()].view(v.shape)
        end += local.numel()
    assert end == flat.numel(), f"{views}: {end} of {flat.numel()} numbers"


def _blend(target: Tensor, source: Tensor, keep: float) -> None:
    if keep:
        target.lerp_(source.to(target), 1.0 - keep)
    else:
        target.copy_(source)


def _refines(fine: Sequence[int], coarse: Sequence[int]) -> bool:
    """Returns whether each dimension of `coarse` is one of `fine`, or several that follow each
    other."""
    inner = set(accumulate(reversed(fine), mul))
    return inner.issuperset(accumulate(reversed(coarse), mul))


class Mover:
    """Takes the steps of plans on one rank of a process group; None is the default group.

    ends: the group's ranks that those of the source are.
    device: where messages live, that of the parameters and of the backend. Memory: one slice that
    stays on its rank, and the messages of a step; on hosts, where fresh pages cost more than the
    copy, their room is kept for the next step. `message_bytes` is the most that it has been. The
    group's timeout bounds every wait.
    """

    def __init__(
        self,
        dtypes: Dtypes,
        ends: Sequence[int],
        group: dist.ProcessGroup | None,
        device: torch.device | str,
    ) -> None:
        self._dtypes, self._ends = dtypes, ends
        self.group, self.device = group, torch.device(device)
        self.message_bytes = 0
        self._room: Tensor | None = None

    @torch.no_grad()
    def __call__(
        self,
        step: Step,
        source: Params,
        target: Params,
        *,
        keep: float = 0.0,
        copying: Copying = nullcontext,
    ) -> tuple[int, int]:
        """Takes a step. copying: entered while this rank copies. Returns the bytes sent, and
        those of all messages. Collective over the ranks that have a part in it."""
        dtypes, ends = self._dtypes, self._ends
        outgoing = [(m.receiver.rank, lay_out(m.slices, dtypes)) for m in step.sends]
        incoming = [(ends[m.sender], lay_out(m.slices, dtypes)) for m in step.receives]
        room = self._take([parts.nbytes for _, parts in (*outgoing, *incoming)])
        packed, into = room[: len(outgoing)], room[len(outgoing) :]
        with copying():
            for (_, parts), message in zip(outgoing, packed, strict=True):
                pack_into(message, source, parts)
        works = self.post(
            [(dist.isend, data, to) for (to, _), data in zip(outgoing, packed, strict=True)]
            + [(dist.irecv, data, sender) for (sender, _), data in zip(incoming, into, strict=True)]
        )
        with copying():
            for name, pairs in groupby(step.stays, key=lambda pair: pair[0].param):
                param = source[name]
                for here, there in pairs:
                    self._copy(param, here, target[there.param], there, keep)
        for i, work in enumerate(works):
            self.wait(work)
            if i >= len(outgoing):
                with copying():
                    land(target, incoming[i - len(outgoing)][1], room[i], keep)
        sent = sum(parts.nbytes for _, parts in outgoing)
        return sent, sent + sum(parts.nbytes for _, parts in incoming)

    def _copy(self, source: Tensor, here: Slice, target: Tensor, there: Slice, keep: float) -> None:
        """Copies what stays on the rank, with the bits that it would have after a message."""
        dtype = self._dtypes[here.tensor]
        if len(here.views) == len(there.views) == 1 and dtype in (source.dtype, target.dtype):
            local = local_view(source, here.views[0])
            to = local_view(target, there.views[0])
            if _refines(local.shape, to.shape):  # no copy between
                _blend(to.view(local.shape), local, keep)
                return
        message = pack({here.param: source}, lay_out([here], self._dtypes), self.device)
        land({there.param: target}, lay_out([there], self._dtypes), message, keep)

    def _take(self, sizes: Sequence[int]) -> list[Tensor]:
        """Returns memory for messages of these bytes."""
        padded = [-(-n // ALIGNMENT) * ALIGNMENT for n in sizes]
        total = sum(padded)
        if self._room is None or self._room.numel() < total:
            self._room = None  # freed before its successor is allocated
            self._room = torch.empty(total, dtype=torch.uint8, device=self.device)
            self.message_bytes = max(self.message_bytes, total)
        room = self._room.split([*padded, self._room.numel() - total])
        if self.device.type != "cpu":
            self._room = None
        return [whole[:n] for whole, n in zip(room, sizes)]

    def post(self, messages: Sequence[tuple[Any, Tensor, int]]) -> list[dist.Work]:
        """Starts messages, each (isend or irecv, bytes, the other rank), and returns the work to
        wait for of each. Those of a batch go over the group's own NCCL communicator; a single one
        would make a communicator for its two ranks, which lives as long as the group."""
        ops = [dist.P2POp(op, x, group=self.group, group_peer=peer) for op, x, peer in messages]
        works = dist.batch_isend_irecv(ops) if ops else []
        return works if len(works) == len(ops) else works * len(ops)  # NCCL: one for the batch

    def wait(self, work: dist.Work) -> None:
        """Waits as long as the group's timeout is now. By default gloo waits for the timeout that
        the group was made with."""
        if self.device.type != "cpu":
            work.wait()
            return
        group = self.group or c10d._get_default_group()
        work.wait(group._get_backend(self.device).options._timeout)
