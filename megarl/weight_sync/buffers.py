"""Holds the memory that buckets are gathered into and sent from."""

from __future__ import annotations

import os

import torch

from megarl.parallel.agreement import Agreement
from megarl.wire.shared_memory import SharedMemoryHandle, attach, offer

ALIGNMENT = 64  # bytes, that of torch's host allocator


class BucketBuffers:
    """Two buckets on the sender. On hosts they are kept from one upload to the next: the kernel
    takes longer to hand out fresh pages than a gather takes to fill them.

    shared: they are mapped by every rank, as they are where all ranks are processes of one host;
    `pair` then is the same memory everywhere. Else the other ranks' `pair` is empty.
    """

    def __init__(self, agreement: Agreement, sender: int, device: torch.device) -> None:
        self.agreement, self.device = agreement, device
        self._sender, self._sending = sender, agreement.rank == sender
        self._several_on_hosts = agreement.size > 1 and device.type == "cpu"
        self.drop()

    def drop(self) -> None:
        """Frees the memory as far as this rank holds it; `take` allocates anew."""
        self.pair: list[torch.Tensor] = []
        self.shared = False
        self._size = 0

    @property
    def nbytes(self) -> int:
        """Returns the bytes that this rank has allocated."""
        return sum(b.nbytes for b in self.pair) if self._sending else 0

    def slot(self, turn: int) -> torch.Tensor | None:
        """Returns the buffer, uint8, for the sender's bucket number `turn`; where memory is not
        shared, None on other ranks."""
        return self.pair[turn % 2] if self.pair else None

    def hold(self, nbytes: int) -> bool:
        """Returns whether there is room for buckets of `nbytes`, as far as this rank knows."""
        return self._size >= nbytes

    def take(self, nbytes: int) -> None:
        """Makes room for buckets of `nbytes`. Collective, where a rank does not `hold` it."""
        self.drop()  # freed before their successors are allocated
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        flat = self._share(2 * size) if self._several_on_hosts else None
        self.shared = flat is not None
        if flat is not None:
            self.pair = [flat[:size], flat[size:]]
        else:
            self.pair = self.agreement.together(self._allocate, size)
        self._size = size

    def _share(self, nbytes: int) -> torch.Tensor | None:
        """Returns memory that all ranks map, None where one cannot. Collective."""
        mine = self.agreement.together(self._offer, nbytes)
        offered = self.agreement.gather(mine)[self._sender]
        try:
            flat = None if offered is None else self.agreement.together(attach, offered)
            return flat if all(self.agreement.gather(flat is not None)) else None
        finally:
            if mine is not None:
                os.close(mine.fd)

    def _offer(self, nbytes: int) -> SharedMemoryHandle | None:
        return offer(nbytes) if self._sending else None

    def _allocate(self, size: int) -> list[torch.Tensor]:
        if not self._sending:
            return []
        return [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
