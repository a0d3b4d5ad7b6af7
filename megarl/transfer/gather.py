"""Gathers a sharded model, bucket by bucket, into flat HF-ordered buffers on one rank.

Used by saving and by weight sync; works for anything shaped like the parameters (gradients too). A
bucket is a receiver that keeps whole tensors: its root copies received and own pieces straight into
their places, and the vocabulary padding is never sent.

Messages go from one rank to another, so no other rank takes part: neither the other pipeline stages
nor, for experts that the root holds whole (ETP=1), the other expert-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.piece_table import HfTensor, PieceTable, View
from megarl.parallel.ranks import Ranks
from megarl.transfer.geometry import Slice, Sources, TargetTable
from megarl.transfer.moves import Copying, Mover
from megarl.transfer.plan import (
    Receiver,
    Step,
    TransferPlan,
    nearest,
    plan_together,
    plan_transfer,
)
from megarl.wire.buckets import Bucket, Member

UNBOUNDED = 1 << 62  # bytes

Dtypes = torch.dtype | Mapping[str, torch.dtype]  # one for all tensors, or each by HF name


def export_dtype(tensor: HfTensor, dtype: Dtypes) -> torch.dtype:
    """Returns the dtype that a tensor is sent or saved in; some are always fp32."""
    if tensor.fp32:
        return torch.float32
    return dtype if isinstance(dtype, torch.dtype) else dtype[tensor.name]


def plan_buckets(
    table: PieceTable,
    dtype: Dtypes,
    bucket_bytes: int,
    *,
    unit: Callable[[str], str] = str,
) -> tuple[Bucket, ...]:
    """Fills buckets of at most `bucket_bytes` with the table's tensors in HF order.

    Offsets are multiples of the member's itemsize. Tensors that follow each other and for whose
    names `unit` says the same share a bucket; a unit larger than a bucket gets its own.
    """
    buckets: list[Bucket] = []
    members: list[Member] = []
    end = 0

    def close() -> None:
        nonlocal members, end
        if members:
            buckets.append(Bucket(len(buckets), tuple(members), end))
        members, end = [], 0

    for _, group in groupby(table.tensors, key=lambda t: unit(t.name)):
        tensors = list(group)
        added = _members(tensors, dtype, end)
        if members and added[-1].offset + added[-1].nbytes > bucket_bytes:
            close()
            added = _members(tensors, dtype, 0)
        members += added
        end = added[-1].offset + added[-1].nbytes
    close()
    return tuple(buckets)


def _members(tensors: Iterable[HfTensor], dtype: Dtypes, start: int) -> list[Member]:
    """Places tensors one after another, from byte `start` on."""
    members = []
    for t in tensors:
        dt = export_dtype(t, dtype)
        start = -(-start // dt.itemsize) * dt.itemsize
        members.append(Member(t.name, t.shape, dt, start, t.numel * dt.itemsize, t.linear))
        start = members[-1].offset + members[-1].nbytes
    return members


class BucketGatherer:
    """Gathers buckets of one layout; every rank of the layout constructs it alike. Collective, as
    `plan_together`: it raises on all ranks where one has another plan.

    params: canonical name -> local tensor (parameters or gradients), read at each `gather`.
    root:   the rank buckets are gathered to, one for all or that of each bucket.
    group:  process group that spans the layout's ranks; None is the default group. Rank numbers are
            the layout's, which are ranks of this group.
    device: where messages and the flat bucket live (that of the parameters, and of the backend).
    staging: bytes of messages that a root has room for; None is as much as a bucket takes.
    ranks: the group's Ranks, which plan together; made of the group by default.

    Memory: a root holds one bucket and `staging`, a source its own message; `message_bytes` is the
    most bytes that messages have taken.
    """

    def __init__(
        self,
        table: PieceTable,
        rank: int,
        params: Mapping[str, Tensor],
        buckets: Sequence[Bucket],
        root: int | Sequence[int] = 0,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        staging: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.rank, self.params, self.device = rank, params, torch.device(device)
        self._ranks = range(table.layout.world_size)
        roots = [root] * len(buckets) if isinstance(root, int) else root
        own = nearest(self._ranks)

        def plan() -> TransferPlan:
            return plan_transfer(
                Sources(table),
                {Receiver(b.index, r): _kept(b) for b, r in zip(buckets, roots, strict=True)},
                dtypes={m.name: m.dtype for b in buckets for m in b.members},
                round_bytes=UNBOUNDED if staging is None else max(1, staging),
                # of replicas the first sends: on GPUs each pair of ranks has a connection for the
                # whole run
                prefer=lambda to, ranks: own(to.rank, ranks)[:1],
            )

        self.plan = plan_together("planning buckets", plan, ranks or Ranks.of(group))
        self._move = Mover(self.plan.dtypes, self._ranks, group, device)
        self._numbers = {b.index: number for number, b in enumerate(buckets)}
        self._steps: dict[int, list[Step]] = {}

    @property
    def message_bytes(self) -> int:
        """Returns the most bytes that messages have taken."""
        return self._move.message_bytes

    def gather(
        self, bucket: Bucket, out: Tensor | None = None, *, packing: Copying = nullcontext
    ) -> Tensor | None:
        """Gathers one bucket. Returns it flat, uint8 [nbytes], on its root (in `out` if given) and
        None on the other ranks. packing: entered while this rank copies.

        Collective over the layout's ranks, which all gather the same buckets in the same order.
        Returns once this rank's part is done; the process group's timeout bounds the wait.
        """
        number, target = self._numbers[bucket.index], dict[str, Tensor]()
        is_root = self.plan.receivers[number].rank == self.rank
        if is_root:
            if out is None:
                out = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self.device)
            target = dict(bucket.views(out))
        if number not in self._steps:
            limit = self.plan.round_bytes
            self._steps[number] = self.plan.steps(self.rank, self._ranks, limit, [number])
        for step in self._steps[number]:
            self._move(step, self.params, target, copying=packing)
        return out[: bucket.nbytes] if is_root and out is not None else None


def _kept(bucket: Bucket) -> TargetTable:
    """Returns what the root of a bucket keeps: whole tensors, each under its own name."""
    entries = []
    for m in bucket.members:
        strides = tuple(math.prod(m.shape[d + 1 :]) for d in range(len(m.shape)))
        start = (0,) * len(m.shape)
        entries.append(Slice(m.name, start, m.shape, m.name, (View(0, m.shape, strides),)))
    return TargetTable(entries, f"bucket {bucket.index}")
