"""What a sync will send, as plain data: buckets, request bodies, group ranks, a hash to compare.

Pure: nothing here communicates.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, zip_longest
from typing import Any

import torch

from megarl.models.gather import export_dtype, plan_buckets
from megarl.models.piece_table import HfTensor, PieceTable
from megarl.weight_sync.senders import assign, by_turns, first_bytes
from megarl.wire.buckets import Bucket

Dtypes = torch.dtype | Mapping[str, torch.dtype]


@dataclass(frozen=True)
class SyncPlan:
    """Buckets in the order they are sent, and the rank that gathers and sends each of them; the
    same on every rank, or nothing works.
    """

    buckets: tuple[Bucket, ...]
    owners: tuple[int, ...]
    table: PieceTable = field(repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self.buckets)

    @property
    def largest(self) -> int:
        return max(b.nbytes for b in self.buckets)

    @property
    def sizes(self) -> dict[int, int]:
        """Owner -> bytes of its largest bucket, in the order of their first."""
        sizes = dict.fromkeys(self.owners, 0)
        for owner, bucket in zip(self.owners, self.buckets, strict=True):
            sizes[owner] = max(sizes[owner], bucket.nbytes)
        return sizes

    def entries(self, index: int) -> list[str]:
        """What goes into a bucket, in words: equal exactly where every rank would do the same."""
        if index >= len(self.buckets):
            return []
        owner = self.owners[index]
        return [
            f"{m.name} {list(m.shape)} {m.dtype} at byte {m.offset}, sent by rank {owner}, cut as "
            + _hash(repr(self.table.by_name[m.name].pieces))[:8]
            for m in self.buckets[index].members
        ]

    @cached_property
    def digests(self) -> tuple[str, ...]:
        """Of the buckets."""
        return tuple(_hash("\n".join(self.entries(b.index))) for b in self.buckets)

    @cached_property
    def digest(self) -> str:
        """Equal exactly where the plans are equal."""
        return _hash("".join(self.digests))

    @cached_property
    def turns(self) -> tuple[int, ...]:
        """Of each bucket, how many its owner has had before it."""
        seen: Counter[int] = Counter()
        turns = []
        for owner in self.owners:
            turns.append(seen[owner])
            seen[owner] += 1
        return tuple(turns)

    @cached_property
    def gathers(self) -> tuple[tuple[int, ...], ...]:
        """Element k: the buckets to gather while k-1 is under way, those before it answered for.
        Then k is ready, and no owner ever has more than two.

        Where k is not ready, every owner gathers: owners that share no sources do so at once.
        """
        queues: dict[int, list[int]] = {}
        for index, owner in enumerate(self.owners):
            queues.setdefault(owner, []).append(index)
        done = dict.fromkeys(queues, 0)
        steps: list[tuple[int, ...]] = []
        for k, owner in enumerate(self.owners):
            now = []
            for o, queue in queues.items() if self.turns[k] >= done[owner] else ():
                n = done[o]
                if n < len(queue) and (n < 2 or queue[n - 2] < k - 1):
                    now.append(queue[n])
                    done[o] += 1
            steps.append(tuple(sorted(now)))
        return tuple(steps)


def plan_sync(
    table: PieceTable, dtype: Dtypes, bucket_bytes: int, owners: Sequence[int] = (0,)
) -> SyncPlan:
    """Buckets of at most `bucket_bytes` (a larger tensor gets its own), the first ones smaller, all
    without gaps; owners by turns. Each gets what it or its pipeline stage holds, where it can.

    Receivers of a flattened bucket rebuild offsets by adding up sizes, so members follow each other
    directly: tensors of larger items come first, which keeps every offset aligned.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes}: use at least 1")
    limits = {"bucket_bytes": bucket_bytes, "first": first_bytes(bucket_bytes)}
    queues: dict[int, list[Bucket]] = {}
    for owner, tensors in _by_owner(table, dtype, owners).items():
        own = dataclasses.replace(table, tensors=tensors)
        queues[owner] = list(plan_buckets(own, dtype, **limits))
    turns = by_turns({owner: len(queue) for owner, queue in queues.items()})
    buckets = tuple(
        dataclasses.replace(queues[owner].pop(0), index=i) for i, owner in enumerate(turns)
    )
    for b in buckets:
        assert sum(m.nbytes for m in b.members) == b.nbytes, f"bucket {b.index} has gaps"
    return SyncPlan(buckets, tuple(turns), table)


def _by_owner(
    table: PieceTable, dtype: Dtypes, owners: Sequence[int]
) -> dict[int, tuple[HfTensor, ...]]:
    """The tensors of each owner that has any, larger items first, else in HF order."""
    itemsizes = [export_dtype(t, dtype).itemsize for t in table.tensors]
    parts = (
        (tuple((p.place, p.numel) for p in t.pieces), t.numel * itemsize)
        for t, itemsize in zip(table.tensors, itemsizes, strict=True)
    )
    chosen = assign(parts, table.layout, owners)
    order = sorted(range(len(chosen)), key=lambda i: -itemsizes[i])
    mine = {o: tuple(table.tensors[i] for i in order if chosen[i] == o) for o in owners}
    return {owner: tensors for owner, tensors in mine.items() if tensors}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def uniform_dtype(params: Mapping[str, torch.Tensor]) -> torch.dtype:
    """The one dtype of all parameters. ValueError where they differ."""
    dtypes = {p.dtype for p in params.values()}
    if len(dtypes) != 1:
        raise ValueError(
            f"parameters have dtypes {sorted(map(str, dtypes))}: give WeightSender a `dtype`, one "
            "for all or by HF name"
        )
    return dtypes.pop()


def update_body(
    bucket: Bucket,
    *,
    group_name: str,
    flattened: bool,
    version: int,
    last: bool,
    weights_id: str | None = None,
    changes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """POST /update_weights_from_distributed. Only the last bucket flushes the cache and bumps the
    version: before it, the server's weights are no version at all.

    weights_id: what a server that applies changes is to call these weights; changes: what it is to
    do with a bucket of changes.
    """
    body: dict[str, Any] = {
        "names": [m.name for m in bucket.members],
        "dtypes": [str(m.dtype).removeprefix("torch.") for m in bucket.members],
        "shapes": [list(m.shape) for m in bucket.members],
        "group_name": group_name,
        "flush_cache": last,
    }
    if flattened:
        body["load_format"] = "flattened_bucket"
    if changes is not None:
        body |= {"load_format": "delta", "delta": changes}
    if last:
        body["weight_version"] = str(version)
        if weights_id is not None:
            body["weights_id"] = weights_id
    return body


def rank_offsets(tp_sizes: Sequence[int]) -> tuple[list[int], int]:
    """Each server's first rank in the update group, and the group's size. Rank 0 is the sender."""
    ends = list(accumulate(tp_sizes, initial=1))
    return ends[:-1], ends[-1]


def first_difference(digests: Sequence[Sequence[str]]) -> tuple[int, int] | None:
    """(rank, bucket) of the first rank whose plan is not rank 0's, from their buckets' digests."""
    for rank, theirs in enumerate(digests):
        for i, pair in enumerate(zip_longest(theirs, digests[0])):
            if pair[0] != pair[1]:
                return rank, i
    return None


def difference(rank: int, index: int, theirs: Sequence[str], ours: Sequence[str]) -> str:
    """The error that names the first entry of bucket `index` in which `rank` and rank 0 differ."""
    a, b = next((x, y) for x, y in zip_longest(theirs, ours, fillvalue="nothing") if x != y)
    return (
        f"weight sync plans differ: in bucket {index + 1}, rank {rank} has {a} where rank 0 has "
        f"{b}; give every rank the same model, layout, dtype and bucket_bytes"
    )
