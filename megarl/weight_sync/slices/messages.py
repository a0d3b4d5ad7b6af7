"""Puts a message of slices together, as receivers take it apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megarl.weight_sync.reallocate import copy_views
from megarl.weight_sync.reallocation_plan import Side
from megarl.weight_sync.slices.plan import Message


@dataclass(frozen=True)
class Parts:
    """Holds where a message's slices are: in this rank's parameters, and in the message's `nbytes`
    bytes (first, last)."""

    nbytes: int
    slots: list[tuple[Side, torch.dtype, int, int]]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Returns (bytes of an element, bytes) of each slice, larger elements first."""
        return [(dtype.itemsize, end - start) for _, dtype, start, end in self.slots]


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
        slots.append((Side(rank, part.param, part.views), dtype, start, end))
    return Parts(end, slots)


@torch.no_grad()
def pack(params: Mapping[str, torch.Tensor], parts: Parts, device: torch.device) -> torch.Tensor:
    """Returns a message, uint8 [nbytes], of these parameters."""
    message = torch.empty(parts.nbytes, dtype=torch.uint8, device=device)
    for side, dtype, start, stop in parts.slots:
        copy_views(params, side, message[start:stop].view(dtype), out=True)
    return message


def whole_messages(
    groups: Iterable[Group], params: Mapping[str, torch.Tensor], device: torch.device
) -> Iterator[list[Outgoing]]:
    """Yields what to send where everything goes as it is, by groups of messages."""
    for group in groups:
        yield [(n, to, partial(pack, params, parts, device)) for n, to, parts in group]
