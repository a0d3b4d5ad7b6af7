"""Plans what a sync sends, as data: buckets, request bodies, group ranks.

Pure: nothing here communicates.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from megarl.models.piece_table import HfTensor, PieceTable
from megarl.transfer.gather import Bucket, Dtypes, export_dtype, plan_buckets

# SGLang's loader of latent attention (deepseek_weight_loader.py) makes one parameter of the two. It
# keeps the first until the second comes, and forgets it at the end of the request.
_FUSED = re.compile(r"\.(q_a_proj|kv_a_proj_with_mqa)\.")


@dataclass(frozen=True)
class SyncPlan:
    """Holds the buckets in the order they are sent."""

    buckets: tuple[Bucket, ...]

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all buckets together."""
        return sum(b.nbytes for b in self.buckets)

    @property
    def largest(self) -> int:
        """Returns the bytes of the largest bucket."""
        return max(b.nbytes for b in self.buckets)


def plan_sync(table: PieceTable, dtype: Dtypes, bucket_bytes: int) -> SyncPlan:
    """Plans buckets of at most `bucket_bytes` (tensors that go together and are larger get their
    own), all without gaps.

    Receivers of a bucket rebuild offsets by adding up sizes, so members follow each other directly:
    tensors of larger items come first, which keeps every offset aligned. Raises ValueError for
    `bucket_bytes` below 1.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes}: use at least 1")
    units: dict[str, list[HfTensor]] = {}
    for tensor in table.tensors:
        units.setdefault(load_unit(tensor.name), []).append(tensor)

    def largest_item(unit: list[HfTensor]) -> int:
        return max(export_dtype(t, dtype).itemsize for t in unit)

    ordered = sorted(units.values(), key=largest_item, reverse=True)
    own = dataclasses.replace(table, tensors=tuple(t for unit in ordered for t in unit))
    buckets = plan_buckets(own, dtype, bucket_bytes, unit=load_unit)
    for b in buckets:
        assert sum(m.nbytes for m in b.members) == b.nbytes, f"bucket {b.index} has gaps"
    return SyncPlan(buckets)


def load_unit(name: str) -> str:
    """Returns a name that HF tensors share which a server has to get in one request."""
    return _FUSED.sub(".", name)


def uniform_dtype(params: Mapping[str, torch.Tensor]) -> torch.dtype:
    """Returns the one dtype of all parameters. Raises ValueError where they differ."""
    dtypes = {p.dtype for p in params.values()}
    if len(dtypes) != 1:
        raise ValueError(
            f"parameters have dtypes {sorted(map(str, dtypes))}: give WeightSource a `dtype`, one "
            "for all or by HF name"
        )
    return dtypes.pop()


def update_body(
    bucket: Bucket,
    *,
    group_name: str,
    version: int,
    last: bool,
    flush: bool = True,
) -> dict[str, Any]:
    """Returns the body of POST /update_weights_from_distributed (see `load_body`)."""
    return {
        "names": [m.name for m in bucket.members],
        "dtypes": [str(m.dtype).removeprefix("torch.") for m in bucket.members],
        "shapes": [list(m.shape) for m in bucket.members],
        "group_name": group_name,
        "load_format": "flattened_bucket",
        **load_body(version=version, last=last, flush=flush),
    }


def load_body(*, version: int, last: bool, flush: bool = True) -> dict[str, Any]:
    """Returns the fields of every request to load a bucket. Only the last bucket flushes the cache,
    where it is to be flushed, and bumps the version: before it, the server's weights are no version
    at all."""
    body: dict[str, Any] = {"flush_cache": last and flush}
    if last:
        body["weight_version"] = str(version)
    return body


def rank_offsets(tp_sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns each server's first rank in the update group (the sender is 0), and its size."""
    ends = list(accumulate(tp_sizes, initial=1))
    return ends[:-1], ends[-1]
