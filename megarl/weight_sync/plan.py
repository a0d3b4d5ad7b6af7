"""What a sync will send, as plain data: buckets, request bodies, group ranks, a hash to compare.

Pure: nothing here communicates.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from megarl.models.gather import Bucket, export_dtype, plan_buckets
from megarl.models.piece_table import PieceTable

Dtypes = torch.dtype | Mapping[str, torch.dtype]


@dataclass(frozen=True)
class SyncPlan:
    """Buckets in the order they are sent; the same on every rank, or nothing works."""

    buckets: tuple[Bucket, ...]
    owner: int

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self.buckets)

    @property
    def largest(self) -> int:
        return max(b.nbytes for b in self.buckets)

    @cached_property
    def digest(self) -> str:
        """Equal exactly where the plans are equal."""
        return hashlib.sha256(repr((self.owner, self.buckets)).encode()).hexdigest()[:16]


def plan_sync(table: PieceTable, dtype: Dtypes, bucket_bytes: int, owner: int) -> SyncPlan:
    """Buckets of at most `bucket_bytes` (a larger tensor gets its own), bytes without gaps.

    Receivers of a flattened bucket rebuild offsets by adding up sizes, so members follow each other
    directly: tensors of larger items come first, which keeps every offset aligned.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes}: use at least 1")
    tensors = tuple(sorted(table.tensors, key=lambda t: -export_dtype(t, dtype).itemsize))
    buckets = plan_buckets(dataclasses.replace(table, tensors=tensors), dtype, bucket_bytes)
    for b in buckets:
        assert sum(m.nbytes for m in b.members) == b.nbytes, f"bucket {b.index} has gaps"
    return SyncPlan(buckets, owner)


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
    bucket: Bucket, *, group_name: str, flattened: bool, version: int, last: bool
) -> dict[str, Any]:
    """POST /update_weights_from_distributed. Only the last bucket flushes the cache and bumps the
    version: before it, the server's weights are no version at all.
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
    if last:
        body["weight_version"] = str(version)
    return body


def rank_offsets(tp_sizes: Sequence[int]) -> tuple[list[int], int]:
    """Each server's first rank in the update group, and the group's size. Rank 0 is the sender."""
    ends = list(accumulate(tp_sizes, initial=1))
    return ends[:-1], ends[-1]


def check_digests(digests: Sequence[str]) -> None:
    """RuntimeError naming the ranks whose plan is not rank 0's."""
    odd = [r for r, d in enumerate(digests) if d != digests[0]]
    if odd:
        raise RuntimeError(
            f"weight sync plans differ: ranks {odd} do not agree with rank 0 on which tensors go "
            "into which bucket; give every rank the same model, layout, dtype and bucket_bytes"
        )
