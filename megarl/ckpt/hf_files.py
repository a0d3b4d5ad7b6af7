"""Writes the weight files of a Hugging Face directory from many ranks at once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from megarl.ckpt.safetensors_files import ShardWriter, plan_shards
from megarl.models.gather import BucketGatherer, Dtypes, plan_buckets
from megarl.models.piece_table import PieceTable
from megarl.parallel.layout import Layout
from megarl.wire.buckets import Bucket, Member


@dataclass(frozen=True, kw_only=True)
class FilePlan:
    """Says which rank writes which file. files: the tensors of each file, by the file's name.
    writer_of: the rank that writes each file. buckets: in the order of gathering, each within one
    file and gathered to the rank at its index in `writers`."""

    files: dict[str, list[Member]]
    writer_of: dict[str, int]
    buckets: list[Bucket]
    writers: list[int]

    @property
    def main_dtype(self) -> torch.dtype:
        """Returns the dtype of most numbers."""
        numbers: Counter[torch.dtype] = Counter()
        for m in chain.from_iterable(self.files.values()):
            numbers[m.dtype] += math.prod(m.shape)
        return numbers.most_common(1)[0][0]


def plan_files(
    table: PieceTable,
    layout: Layout,
    dtype: Dtypes,
    *,
    writers: Sequence[int],
    max_shard_bytes: int,
    bucket_bytes: int,
) -> FilePlan:
    """Shares the files out to `writers`.

    A file goes to a writer of the pipeline stage that holds most of it, to the one with the least
    to write so far; among equals, data-parallel replicas come last. Writers take turns in
    gathering, so that all of them write at the same time. Sizes are in bytes.
    """
    whole = (m for bucket in plan_buckets(table, dtype, bucket_bytes) for m in bucket.members)
    files = plan_shards(list(whole), max_shard_bytes)
    load = dict.fromkeys(writers, 0)
    coords = {w: layout.coords(w) for w in writers}
    writer_of: dict[str, int] = {}
    turns: list[tuple[int, int, Bucket]] = []  # (how many its writer has before, writer, bucket)
    count = dict.fromkeys(writers, 0)
    for file, members in files.items():
        stage = _stage_of(members, table)
        near = [w for w in writers if coords[w].pp == stage] or list(writers)
        writer = min(near, key=lambda w: (load[w], coords[w].tp, coords[w].cp, coords[w].dp))
        load[writer] += sum(m.nbytes for m in members)
        writer_of[file] = writer
        part = replace(table, tensors=tuple(table.by_name[m.name] for m in members))
        for bucket in plan_buckets(part, dtype, bucket_bytes):
            turns.append((count[writer], writer, bucket))
            count[writer] += 1
    turns.sort(key=lambda turn: turn[:2])
    buckets = [replace(bucket, index=i) for i, (_, _, bucket) in enumerate(turns)]
    return FilePlan(
        files=files,
        writer_of=writer_of,
        buckets=buckets,
        writers=[writer for _, writer, _ in turns],
    )


def _stage_of(members: Sequence[Member], table: PieceTable) -> int:
    """Returns the pipeline stage that holds most bytes of these tensors."""
    stages: Counter[int] = Counter()
    for m in members:
        stages[table.by_name[m.name].pieces[0].place.pp] += m.nbytes
    return stages.most_common(1)[0][0]


def write_files(staging: Path, plan: FilePlan, gatherer: BucketGatherer, rank: int) -> None:
    """Writes this rank's files, by a thread while the next bucket is gathered. Collective.

    A failure to write is raised at the end: the other ranks go on gathering, and need this one.
    """
    mine = {f: members for f, members in plan.files.items() if plan.writer_of[f] == rank}
    rooms = [torch.empty(0, dtype=torch.uint8, device=gatherer.device)] * 2
    writing: Future[None] | None = None
    with ExitStack() as stack:
        shards = stack.enter_context(ShardWriter(staging, mine))
        thread = stack.enter_context(ThreadPoolExecutor(1))
        failure: BaseException | None = None

        def write(bucket: Bucket, flat: Tensor) -> None:
            for name, tensor in bucket.views(flat):
                shards.write(name, tensor)

        for bucket, writer in zip(plan.buckets, plan.writers, strict=True):
            if writer != rank:
                gatherer.gather(bucket)
                continue
            rooms.reverse()  # the other one is being written
            if rooms[0].numel() < bucket.nbytes:
                rooms[0] = torch.empty(bucket.nbytes, dtype=torch.uint8, device=gatherer.device)
            flat = gatherer.gather(bucket, rooms[0])
            assert flat is not None
            failure = failure or (writing.exception() if writing else None)
            writing = thread.submit(write, bucket, flat) if failure is None else None
        if failure := failure or (writing.exception() if writing else None):
            raise failure
