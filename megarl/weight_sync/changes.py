"""Sends by slices what has changed since the last sync, bit for bit, and nothing else.

Every rank keeps its parameters as they were sent last, once, however many servers there are. A
message is packed of these too, and what differs is sent after a head that says how long it is.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from megarl.transfer.moves import Parts, pack
from megarl.weight_sync.link import Link
from megarl.weight_sync.receiver.megarl_receiver.messages import HEADS, encode
from megarl.weight_sync.servers import Deadline

log = logging.getLogger(__name__)

PAYS = 0.75  # a message of changes longer than this part of the whole one is sent whole

# messages that go at once: (round, the receiver's number in the link, message)
Group = Sequence[tuple[int, int, Parts]]
# a tag, the receiver's number, a function that returns the bytes
Outgoing = tuple[int, int, Callable[[], torch.Tensor]]


class Names(NamedTuple):
    """Names what the servers hold, None for something else than was sent last, and what they will
    hold."""

    base: str | None
    id: str


class SliceChanges:
    """Holds this rank's parameters as they were sent in the last sync that all servers took.

    id: the servers' name for it; None before the first sync, and during and after one that failed.
    counts: of the last sync, the numbers "compared" and "changed", and the bytes of the "whole".
    seconds: of comparing and keeping. Memory: the parameters that are sent, in the dtypes they are
    sent in, in pinned host memory or beside them.
    """

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}
        self.id: str | None = None
        self.counts, self.seconds = Counter[str](), 0.0

    def forget(self) -> None:
        """Drops the copies: the next sync sends everything."""
        self._held.clear()
        self.id, self.counts, self.seconds = None, Counter(), 0.0

    def ask(self, link: Link, version: int, deadline: Deadline) -> Names:
        """Asks the servers what they hold, on the rank that speaks."""
        base = self.id
        if base is not None:
            held = link.call("holds", deadline)
            other = [s for s, ranks in held.items() if any(r["weights"] != base for r in ranks)]
            if other:
                log.info("all weights are sent: %s not at update %s", ", ".join(other), base)
                base = None
        return Names(base, f"v{version}-{uuid.uuid4().hex[:12]}")

    def messages(
        self,
        groups: Iterable[Group],
        params: Mapping[str, torch.Tensor],
        device: torch.device,
        *,
        whole: bool,
    ) -> Iterator[Sequence[Outgoing]]:
        """Yields what to send, by groups of messages that go at once: the heads of a group, then
        what they tell of. whole: everything goes as it is."""
        self.counts, self.seconds = Counter(), 0.0
        for group in groups:
            begun = time.monotonic()
            found = [(n, to, *self._encode(params, parts, device, whole)) for n, to, parts in group]
            self.seconds += time.monotonic() - begun
            yield [(HEADS + n, to, partial(_given, head)) for n, to, head, _ in found]
            if ready := [(n, to, partial(_given, m)) for n, to, _, m in found if m.numel()]:
                yield ready

    def keep(
        self,
        id_: str,
        groups: Iterable[Group],
        params: Mapping[str, torch.Tensor],
    ) -> None:
        """Copies the parameters that messages are made of to host memory. id_: as servers name
        them."""
        begun = time.monotonic()
        slots = (slot for group in groups for _, _, parts in group for slot in parts.slots)
        for name, dtype in {slot.part.param: slot.dtype for slot in slots}.items():
            param = params[name].detach()
            if name not in self._held:
                pin = param.device.type == "cuda"
                self._held[name] = torch.empty(param.shape, dtype=dtype, pin_memory=pin)
            self._held[name].copy_(param, non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.id = id_
        self.seconds += time.monotonic() - begun

    def _encode(
        self, params: Mapping[str, torch.Tensor], parts: Parts, device: torch.device, whole: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a message's head and its bytes."""
        message, chunks = pack(params, parts, device), 0
        self.counts["whole"] += message.numel()
        if not whole:
            before = pack(self._held, parts, next(iter(self._held.values())).device)
            delta = encode(message, before, parts.sizes)
            self.counts.update(compared=delta.count, changed=delta.changed)
            if not delta.changed:
                message = message[:0]
            elif delta.nbytes < PAYS * message.numel():
                message, chunks = delta.message(), len(delta.rows)
        return torch.tensor([message.numel(), chunks], device=device), message


def _given(message: torch.Tensor) -> torch.Tensor:
    return message
