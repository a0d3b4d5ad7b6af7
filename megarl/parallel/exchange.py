"""Moves the tokens of a Batch between ranks (the exchange), as flat bytes through host memory.

A row goes from one rank that holds it to one rank of every data-parallel index that needs it, and
from there along a chain through the other ranks of that index. Long flows are cut into chunks that
follow each other down the chain. Every rank computes alike, from the lengths and the two homes,
which rank sends what to which: no message announces another.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.api.batch import Batch, Home, Tokens
from megarl.parallel.ranks import Ranks
from megarl.parallel.worlds import waiting_for

CHUNK = 16 << 20  # bytes of a message, unless a row alone is longer
IN_FLIGHT = 2  # sends, and receives, that a rank has begun and not yet ended


# ---- who sends what to whom ----------------------------------------------------------------------


@dataclass(frozen=True)
class Flow:
    """Describes rows on their way: path[0] holds them, path[1:] receive them and pass them on."""

    path: tuple[int, ...]
    rows: Tensor
    round: int  # flows of one round have different sources and different destinations


def flows(before: Home, after: Home) -> list[Flow]:
    """Returns every flow that takes rows from `before` to `after`. Ranks that hold a row already
    are left out, and one of them passes it on to the others of its index."""
    old, new = _ranks(before), _ranks(after)
    indices = max(before.of_rank + after.of_rank) + 1
    pairs, rows = (before.of_row * indices + after.of_row).sort(stable=True)
    names, counts = pairs.unique_consecutive(return_counts=True)
    out = []
    for pair, part in zip(names.tolist(), rows.split(counts.tolist()), strict=True):
        s, d = divmod(pair, indices)
        sources, targets = old[s], new.get(d, [])
        missing = [r for r in targets if r not in sources]
        if not missing:
            continue
        own = [r for r in targets if r in sources]
        source = own[0] if own else sources[d % len(sources)]
        out.append(Flow((source, *missing), part, (missing[0] - source) % len(before.of_rank)))
    return out


def _ranks(home: Home) -> dict[int, list[int]]:
    by_index: dict[int, list[int]] = {}
    for rank, index in enumerate(home.of_rank):
        by_index.setdefault(index, []).append(rank)
    return by_index


@dataclass(frozen=True)
class _Hop:
    """Describes one message: `rows` of a flow go from rank `src` to rank `dst`."""

    order: tuple[int, ...]
    src: int
    dst: int
    rows: Tensor


def hops(plan: Sequence[Flow], lengths: Tensor, token_bytes: int, rank: int) -> list[_Hop]:
    """Returns the messages that concern `rank`, in an order that all ranks agree on: a rank that
    waits for the first message that is not yet through finds its peer waiting for it, too. lengths
    [B] are tokens of all rows, `token_bytes` the bytes of one token."""
    messages = []
    for number, flow in enumerate(plan):
        if rank not in flow.path:
            continue
        place = flow.path.index(rank)
        for c, rows in enumerate(_chunks(flow.rows, lengths, token_bytes)):
            for hop in (place - 1, place):
                if 0 <= hop < len(flow.path) - 1:
                    order = (flow.round, c + hop, number, hop)
                    messages.append(_Hop(order, flow.path[hop], flow.path[hop + 1], rows))
    return sorted(messages, key=lambda hop: hop.order)


def _chunks(rows: Tensor, lengths: Tensor, token_bytes: int) -> Iterator[Tensor]:
    """Yields neighbouring rows of at most CHUNK bytes together."""
    ends = (lengths[rows] * token_bytes).cumsum(0)
    first = 0
    while first < len(rows):
        base = int(ends[first - 1]) if first else 0
        last = int(torch.searchsorted(ends, base + CHUNK, right=True))
        last = max(last, first + 1)
        yield rows[first:last]
        first = last


# ---- moving --------------------------------------------------------------------------------------


def place(batch: Batch, home: Home) -> None:
    """Moves the tokens of `batch` to `home`, which it has from then on. Collective.

    Fields go one after the other: beside the batch, a rank's memory holds the new share of one
    field and a few messages.
    """
    batch.placed = True
    if _same(batch.home, home):
        return
    plan = flows(batch.home, home)
    buffers: list[Tensor] = []
    for name in sorted(batch.per_token):
        batch.per_token[name] = move(
            batch.per_token[name], batch.lengths, batch.home, home, batch.comm, plan, buffers
        )
    batch.home = home


def placed(batch: Batch, home: Home) -> Batch:
    """Returns the batch itself if `home` is its own, else a copy that is there. Collective."""
    if _same(batch.home, home):
        return batch
    out = Batch(batch.lengths, batch.per_sample, batch.per_token, home=batch.home, comm=batch.comm)
    place(out, home)
    return out


def _same(a: Home, b: Home) -> bool:
    return a.of_rank == b.of_rank and torch.equal(a.of_row, b.of_row)


def move(
    tokens: Tokens,
    lengths: Tensor,
    before: Home,
    after: Home,
    comm: Any,
    plan: Sequence[Flow] | None = None,
    buffers: list[Tensor] | None = None,
) -> Tokens:
    """Returns one field of the rows held under `before`, as the rows held under `after`.
    Collective.

    `lengths` [B] are those of all rows; `plan`: flows(before, after), if they are known; `buffers`:
    kept from one field to the next, because fresh memory takes longer to get than to fill.
    """
    if _same(before, after):
        return tokens
    rank = comm.rank if comm else 0
    had, wanted = before.rows(rank), after.rows(rank)
    stays = torch.isin(had, wanted)
    result = staying = tokens.take(stays.nonzero().flatten())
    if comm is None:
        return staying
    inner = tokens.values.shape[1:]
    token_bytes = max(1, tokens.values.element_size() * inner.numel())
    todo = hops(flows(before, after) if plan is None else plan, lengths, token_bytes, rank)
    if any(hop.dst == rank for hop in todo):
        out = tokens.values.new_empty((int(lengths[wanted].sum()), *inner))
        result = Tokens(out, lengths[wanted])
        _put(result, torch.searchsorted(wanted, had[stays]), staying.values)
    with waiting_for(None, "Batch: moving tokens"):
        _Mover(tokens, had, result, wanted, comm, [] if buffers is None else buffers).run(todo)
    return result


def _neighbours(places: Tensor) -> bool:
    return int(places[-1] - places[0]) == len(places) - 1


def _put(into: Tokens, places: Tensor, values: Tensor) -> None:
    """Writes the rows of `values` to these places (ascending), neighbours in one piece."""
    starts, lengths = into.starts[places], into.lengths[places]
    cuts = (places[1:] != places[:-1] + 1).nonzero().flatten() + 1
    base = 0
    for run in torch.tensor_split(torch.arange(len(places)), cuts.tolist()):
        if len(run):
            n = int(lengths[run].sum())
            first = int(starts[run[0]])
            into.values[first : first + n] = values[base : base + n]
            base += n


class _Mover:
    """Sends rows that a rank had, or received to pass on, and receives rows that it will have."""

    def __init__(
        self,
        source: Tokens,
        had: Tensor,
        target: Tokens,
        wanted: Tensor,
        comm: Ranks,
        buffers: list[Tensor],
    ) -> None:
        self.source, self.had, self.target, self.wanted = source, had, target, wanted
        self.comm, self.buffers = comm, buffers
        self._sends: deque[tuple[Any, Tensor, Tensor | None]] = deque()
        self._receives: deque[tuple[Any, tuple[Tensor, Tensor] | None]] = deque()

    def run(self, todo: Sequence[_Hop]) -> None:
        """Sends and receives all messages, in their order; a few are under way at a time."""
        for hop in todo:
            if hop.dst == self.comm.rank:
                self._receive(hop)
            else:
                self._send(hop)
        self._settle(0)
        while self._sends:
            self._sent()

    def _receive(self, hop: _Hop) -> None:
        """Receives neighbours in place, and other rows through a buffer."""
        places = torch.searchsorted(self.wanted, hop.rows)
        into = self.target.take(places).values if _neighbours(places) else None
        buffer = into
        if buffer is None:
            count = int(self.target.lengths[places].sum())
            buffer = self.target.values.new_empty((count, *self.target.values.shape[1:]))
        if not buffer.numel():
            return
        self._settle(IN_FLIGHT - 1)
        work = dist.irecv(_bytes(buffer), hop.src, group=self.comm.group)
        self._receives.append((work, None if into is not None else (places, buffer)))

    def _send(self, hop: _Hop) -> None:
        origin = bool(torch.isin(hop.rows[:1], self.had))
        if not origin:
            self._settle(0)  # what is passed on has to be here
        source, rows = (self.source, self.had) if origin else (self.target, self.wanted)
        while len(self._sends) >= IN_FLIGHT:
            self._sent()
        values, buffer = self._packed(source, torch.searchsorted(rows, hop.rows))
        if values.numel():
            work = dist.isend(_bytes(values), hop.dst, group=self.comm.group)
            self._sends.append((work, values, buffer))

    def _packed(self, source: Tokens, places: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns these rows one after the other, and the buffer where they had to be copied."""
        if _neighbours(places):
            return source.take(places).values.contiguous(), None
        shape = (int(source.lengths[places].sum()), *source.values.shape[1:])
        count = math.prod(shape) * source.values.element_size()
        buffer = self.buffers.pop() if self.buffers else torch.empty(CHUNK, dtype=torch.uint8)
        if len(buffer) < count:
            buffer = torch.empty(count, dtype=torch.uint8)
        values = buffer[:count].view(source.values.dtype).view(shape)
        return torch.cat(source.pieces(places), out=values), buffer

    def _sent(self) -> None:
        work, _, buffer = self._sends.popleft()
        work.wait()
        if buffer is not None:
            self.buffers.append(buffer)

    def _settle(self, leave: int) -> None:
        while len(self._receives) > leave:
            work, put = self._receives.popleft()
            work.wait()
            if put is not None:
                _put(self.target, *put)


def _bytes(values: Tensor) -> Tensor:
    return values.reshape(-1).view(torch.uint8)
