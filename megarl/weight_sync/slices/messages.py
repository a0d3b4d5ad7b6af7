"""Puts a message of slices together, as receivers take it apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from megarl.weight_sync.reallocate import copy_views
from megarl.weight_sync.reallocation_plan import Side
from megarl.weight_sync.slices.plan import Message, Slice
from megarl.weight_sync.slices.quantized import FP8, BlockFp8


class Slot(NamedTuple):
    """Says where a slice is: on this rank, and in the bytes [start, stop) of a message."""

    part: Slice
    side: Side
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


# messages that go at once: (round, the receiver's number in the link, message)
Group = Sequence[tuple[int, int, Parts]]
# a tag, the receiver's number, a function that returns the bytes
Outgoing = tuple[int, int, Callable[[], torch.Tensor]]


def lay_out(message: Message, rank: int, dtype_of: Callable[[str], torch.dtype]) -> Parts:
    """Returns the parts of a message of rank `rank`. dtype_of: that an HF tensor is sent in. Slices
    of larger items come first, so that all are aligned (`megarl_receiver.messages.laid_out`)."""
    slots, end = [], 0
    typed = [(part, dtype_of(part.tensor)) for part in message.slices]
    for part, dtype in sorted(typed, key=lambda p: -p[1].itemsize):
        start, end = end, end + part.numel * dtype.itemsize
        slots.append(Slot(part, Side(rank, part.param, part.views), dtype, start, end))
    return Parts(end, slots)


@torch.no_grad()
def pack(
    params: Mapping[str, torch.Tensor],
    parts: Parts,
    device: torch.device,
    fp8: BlockFp8 | None = None,
) -> torch.Tensor:
    """Returns a message, uint8 [nbytes], of these parameters. fp8: quantises linear maps."""
    message = torch.empty(parts.nbytes, dtype=torch.uint8, device=device)
    for part, side, dtype, start, stop in parts.slots:
        out = message[start:stop].view(dtype)
        if fp8 is not None and dtype == FP8:
            read = partial(copy_views, params, side, out=True)
            fp8.quantize(part.tensor, (part.start, part.stop), read, out)
        else:
            copy_views(params, side, out, out=True)
    return message


def whole_messages(
    groups: Iterable[Group],
    params: Mapping[str, torch.Tensor],
    device: torch.device,
    fp8: BlockFp8 | None,
) -> Iterator[Sequence[Outgoing]]:
    """Yields what to send where everything goes as it is, by groups of messages."""
    for group in groups:
        yield [(n, to, partial(pack, params, parts, device, fp8)) for n, to, parts in group]
