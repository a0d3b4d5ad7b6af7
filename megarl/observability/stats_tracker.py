"""Gathers statistics that any part of a training script records, and exports them over all ranks.

    from megarl import stats_tracker

    stats_tracker.scalar(reward=0.5)                               # the mean of what was recorded
    stats_tracker.denominator(right=rewards > 0)                   # a bool tensor
    stats_tracker.stat(seqlen=lengths, denominator="right")        # avg, min and max where it holds
    stats_tracker.peak(memory_gib=3.5)                             # the largest, over all ranks
    with stats_tracker.record_timing("train_step"), stats_tracker.scope("actor"):
        stats_tracker.scalar(loss=1.0)                             # actor/loss
    stats = stats_tracker.export()                                 # {name: float}, and starts anew

The functions act on one tracker of the process; StatsTracker is for a second one.

Every rank runs the script and records the same values, such as the fields [B] of a Batch. So the
export has the counts and sums of one rank. A loss may use the functions, too: there one rank of
each data-parallel replica records its own rows, and counts and sums add up over ranks. So every
sequence counts once, however it is laid out and cut into micro-batches.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.observability.timeline import phase

REDUCE_TYPES = ("avg", "sum", "min", "max")
_BY_DEFAULT = ("avg", "min", "max")
_COMMON = "common sum"  # of values that every rank records


@dataclass
class _Entry:
    """Sums up the values recorded under a name, so that they can be reduced in every way."""

    sum: float = 0.0
    count: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def add(self, values: Tensor) -> None:
        if len(values):
            self.sum += values.sum().item()
            self.count += len(values)
            self.low = min(self.low, values.min().item())
            self.high = max(self.high, values.max().item())

    def join(self, other: _Entry) -> None:
        self.sum += other.sum
        self.count += other.count
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)

    def reduced(self, how: str) -> float:
        if how == "sum":
            return self.sum
        if not self.count:
            return math.nan
        if how == "avg":
            return self.sum / self.count
        return self.low if how == "min" else self.high


Entries = dict[tuple[str, str], _Entry]


def joined(*taken: Entries) -> dict[str, float]:
    """Returns {name: value} of what was recorded in several processes."""
    sums: Entries = {}
    for entries in taken:
        for (name, how), entry in entries.items():
            key = name, "sum" if how == _COMMON else how
            sums.setdefault(key, _Entry()).join(entry)
    return {name: entry.reduced(how) for (name, how), entry in sorted(sums.items())}


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


class StatsTracker:
    """Gathers scalars, masked tensors and timings under scoped names, until `export`."""

    def __init__(self) -> None:
        self._scopes: list[str] = []
        self._masks: dict[str, Tensor] = {}
        self._entries: dict[tuple[str, str], _Entry] = {}  # by (name, how it is reduced)
        self._seconds: dict[str, float] = {}  # of each phase, since the last export
        self._around: Callable[[str], AbstractContextManager[Any]] = nullcontext
        self._muted = self._row_by_row = False

    def scalar(self, **values: float) -> None:
        """Records numbers. A name's values of one export are averaged, over all ranks."""
        for name, value in values.items():
            self._add(self._scoped(name), "avg", torch.tensor([float(value)], dtype=torch.float64))

    def peak(self, **values: float) -> None:
        """Records numbers of which the export has the largest, over all ranks."""
        for name, value in values.items():
            self._add(self._scoped(name), "max", torch.tensor([float(value)], dtype=torch.float64))

    def denominator(self, **masks: Tensor) -> None:
        """Records bool tensors that `stat` selects by; each is exported as its number of trues.
        Raises ValueError for another dtype."""
        for name, mask in masks.items():
            if mask.dtype != torch.bool:
                raise ValueError(f"stats_tracker.denominator({name}=): {mask.dtype}, not bool")
            mask = self._masks[self._scoped(name)] = mask.cpu()
            self._add(self._scoped(name), "sum", mask.double().flatten())

    def stat(self, *, denominator: str, reduce_type: str | None = None, **values: Tensor) -> None:
        """Records the elements of tensors where the denominator, of the same shape, is True.

        denominator: a name given to `denominator` in this scope; reduce_type: "avg", "sum", "min"
        or "max", exported under the name itself; None exports name/avg, name/min and name/max.
        Each value of a GPU is waited for; the stats that a loss returns are not.
        Raises ValueError for an unknown denominator, another shape or another reduce_type.
        """
        mask = self._masks.get(self._scoped(denominator))
        if mask is None:
            raise ValueError(
                f"stats_tracker.stat: denominator {self._scoped(denominator)!r} is not known: call "
                f"stats_tracker.denominator({denominator}=...) first, in the same scope"
            )
        if reduce_type is not None and reduce_type not in REDUCE_TYPES:
            raise ValueError(f"reduce_type={reduce_type!r}: one of {', '.join(REDUCE_TYPES)}")
        for name, value in values.items():
            if value.shape != mask.shape:
                raise ValueError(
                    f"stats_tracker.stat({name}=): shape {tuple(value.shape)}, but denominator "
                    f"{denominator!r} has {tuple(mask.shape)}"
                )
            chosen = value.detach().cpu()[mask].double()
            if reduce_type is not None:
                self._add(self._scoped(name), reduce_type, chosen)
            else:
                for how in _BY_DEFAULT:
                    self._add(f"{self._scoped(name)}/{how}", how, chosen)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Puts `name/` in front of every name that is recorded inside."""
        self._scopes.append(name)
        try:
            yield
        finally:
            self._scopes.pop()

    @contextmanager
    def muted(self, mute: bool = True) -> Iterator[None]:
        """Enters a block in which one rank records each row: counts and sums add up over ranks.
        With `mute` this rank checks its records and leaves them out, except timings: another rank
        records them, or they are computed again."""
        before = self._muted, self._row_by_row
        self._muted, self._row_by_row = self._muted or mute, True
        try:
            yield
        finally:
            self._muted, self._row_by_row = before

    @contextmanager
    def record_timing(self, name: str) -> Iterator[None]:
        """Adds the seconds inside to timing/<name>_s, also when the body raises. It is a `phase`;
        at both ends it waits for the GPU, so that it is charged for the kernels it launched."""
        name = self._scoped(name)
        with self._around(name):
            _synchronize()
            start = time.perf_counter()
            try:
                with phase(name):
                    yield
                    _synchronize()
            finally:
                spent = time.perf_counter() - start
                self._seconds[name] = self._seconds.get(name, 0.0) + spent

    def watch(self, around: Callable[[str], AbstractContextManager[Any]] = nullcontext) -> None:
        """Enters `around(name)` around everything that record_timing(name) times from now on."""
        self._around = around

    def seconds(self, name: str) -> float:
        """Returns what record_timing(name) has gathered on this rank since the last export."""
        return self._seconds.get(self._scoped(name), 0.0)

    def export(self, *, over_ranks: bool = True, group: Any = None) -> dict[str, float]:
        """Returns {name: value} and starts anew. Collective over `group`, the world, by default.

        Averages, minima and maxima are of all ranks' records. A count or a sum is averaged over the
        ranks that record it, and inside `muted` and losses added up. Timings are those of the
        slowest rank. over_ranks: False exports the records of this rank only.
        """
        return joined(self.take(over_ranks=over_ranks, group=group))

    def take(self, *, over_ranks: bool = True, group: Any = None) -> Entries:
        """Returns what `export` makes numbers of, for `joined`, and starts anew. Collective as
        `export` is."""
        entries, self._entries = self._entries, {}
        times, self._seconds = self._seconds, {}
        self._masks.clear()
        for name, seconds in times.items():
            entries[f"timing/{name}_s", "max"] = _Entry(seconds, 1.0, seconds, seconds)
        if over_ranks and dist.is_initialized() and dist.get_world_size(group) > 1:
            entries = _joined(entries, group)
        return entries

    def _add(self, name: str, how: str, values: Tensor) -> None:
        if how == "sum" and not self._row_by_row:
            how = _COMMON
        if not self._muted:
            self._entries.setdefault((name, how), _Entry()).add(values)

    def _scoped(self, name: str) -> str:
        return "/".join([*self._scopes, name])


def _joined(entries: Entries, group: Any) -> Entries:
    """Returns the entries of all ranks as one; a rank may lack some."""
    device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
    keys = sorted(entries)
    digest = int.from_bytes(hashlib.blake2b(repr(keys).encode(), digest_size=6).digest(), "little")
    ends = torch.tensor([digest, -digest], device=device)
    dist.all_reduce(ends, dist.ReduceOp.MAX, group)
    if ends[0] != -ends[1]:
        every: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, keys, group)
        keys = sorted({key for rank in every for key in rank})
    own = [entries.get(key, _Entry()) for key in keys]
    recorded = [[e.sum, e.count, key in entries] for key, e in zip(keys, own)]
    sums = torch.tensor(recorded, dtype=torch.float64, device=device)
    tops = torch.tensor([[e.high, -e.low] for e in own], dtype=torch.float64, device=device)
    dist.all_reduce(sums, dist.ReduceOp.SUM, group)
    dist.all_reduce(tops, dist.ReduceOp.MAX, group)
    return {
        key: _Entry(total / (ranks if key[1] == _COMMON else 1), count, -low, high)
        for key, (total, count, ranks), (high, low) in zip(keys, sums.tolist(), tops.tolist())
    }


_tracker = StatsTracker()
scalar, denominator, stat = _tracker.scalar, _tracker.denominator, _tracker.stat
peak, muted = _tracker.peak, _tracker.muted
scope, record_timing = _tracker.scope, _tracker.record_timing
seconds, export, watch = _tracker.seconds, _tracker.export, _tracker.watch
take = _tracker.take
