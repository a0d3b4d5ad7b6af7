"""Buckets, and gathering sharded tensors into them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl.models.hf_config import read_hf_config
from megarl.models.params import named_params
from megarl.models.piece_table import build_piece_table
from megarl.parallel.layout import Layout
from megarl.transfer.gather import BucketGatherer, plan_buckets
from tests.dist.models_util import built_model
from tests.dist.world import World
from tests.tiny import save_tiny

HALF = torch.bfloat16


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3", layers=2)


@pytest.fixture(scope="module")
def world(worlds: Any) -> World:
    return worlds(4)


def test_buckets_hold_every_tensor_once_in_hf_order(model_path: Path) -> None:
    table = build_piece_table(read_hf_config(model_path), Layout(tp=2, pp=2))
    limit = 20_000
    buckets = plan_buckets(table, HALF, limit)
    assert [m.name for b in buckets for m in b.members] == [t.name for t in table.tensors]
    assert [b.index for b in buckets] == list(range(len(buckets)))
    for b in buckets:
        assert b.nbytes <= limit or len(b.members) == 1
        assert b.nbytes == b.members[-1].offset + b.members[-1].nbytes
    assert any(len(b.members) > 3 for b in buckets)
    tiny = plan_buckets(table, HALF, 1)
    assert all(len(b.members) == 1 for b in tiny) and len(tiny) == len(table.tensors)


def test_offsets_are_aligned_when_dtypes_mix(model_path: Path) -> None:
    model = read_hf_config(model_path)
    table = build_piece_table(model, Layout())
    dtypes = {t.name: torch.uint8 if "q_norm" in t.name else torch.float32 for t in table.tensors}
    shrunk = {"model.layers.0.self_attn.k_norm.weight": HALF}
    for b in plan_buckets(table, {**dtypes, **shrunk}, 1 << 20):
        end = 0
        for m in b.members:
            assert m.offset % m.dtype.itemsize == 0 and end <= m.offset < end + m.dtype.itemsize
            end = m.offset + m.nbytes
        assert len(dict(b.views(torch.zeros(b.nbytes, dtype=torch.uint8)))) == len(b.members)


def run_gather(
    path: Path, parallel: dict[str, Any], root: int, mixed: bool, staging: int | None
) -> dict[str, Any]:
    """Gathers twice into one buffer, doubled the second time; returns the second tensors."""
    with built_model(path, parallel) as (model, groups):
        params = {n: p.detach() for n, p in named_params(model.chunks).items()}
        dtype: Any = torch.float32
        if mixed:
            dtype = {
                t.name: HALF if "norm" in t.name else torch.float32 for t in model.table.tensors
            }
        buckets = plan_buckets(model.table, dtype, 30_000)
        gatherer = BucketGatherer(
            model.table, groups.rank, params, buckets, root=root, staging=staging
        )
        out = torch.empty(max(b.nbytes for b in buckets) + 64, dtype=torch.uint8)
        for bucket in buckets:
            gatherer.gather(bucket, out)
        for p in params.values():
            p.mul_(2)  # the gatherer reads at gather time
        result: dict[str, Any] = {}
        for bucket in buckets:
            flat = gatherer.gather(bucket, out if groups.rank == root else None)
            assert (flat is None) == (groups.rank != root)
            if flat is not None:
                assert flat.numel() == bucket.nbytes and flat.data_ptr() == out.data_ptr()
                result.update({n: t.clone() for n, t in bucket.views(flat)})
        if staging is not None:  # each message begins at a multiple of 64 bytes
            assert gatherer.message_bytes <= staging + 64 * (groups.layout.world_size - 1)
        return result


# senders that hold only norms, a data-parallel replica, and a middle stage
@pytest.mark.parametrize(
    "parallel, root, mixed, staging",
    (
        (dict(tp=2, pp=2), 3, False, None),
        (dict(tp=2, pp=2, sequence_parallel=True), 0, True, 3_000),
        (dict(tp=2), 3, False, None),
        (dict(tp=4), 2, True, None),
        (dict(tp=4), 1, False, 500),
        (dict(pp=2), 1, False, 10_000),
        (dict(tp=2, cp=2), 2, False, None),
    ),
)
def test_any_rank_can_gather(
    world: World,
    model_path: Path,
    parallel: dict[str, Any],
    root: int,
    mixed: bool,
    staging: int | None,
) -> None:
    """The bits are those of the file, and messages take no more memory than there is for them."""
    results = world.run(run_gather, model_path, parallel, root, mixed, staging)
    assert [bool(r) for r in results] == [rank == root for rank in range(4)]
    want = load_file(model_path / "model.safetensors")
    assert results[root].keys() == want.keys()
    for name, tensor in results[root].items():
        expected = 2 * want[name]
        if mixed and "norm" in name:
            expected = expected.to(HALF)
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), name


@contextmanager
def batched() -> Iterator[list[torch.Tensor]]:
    """Yields the list of tensors that this rank sends in batches inside the context."""
    sent: list[torch.Tensor] = []
    real = dist.batch_isend_irecv

    def record(ops: list[dist.P2POp]) -> list[dist.Work]:
        sent.extend(op.tensor for op in ops if op.op is dist.isend)
        return real(ops)

    with mock.patch.object(dist, "batch_isend_irecv", record):
        yield sent


def run_count(path: Path, parallel: dict[str, Any], root: int) -> int:
    """Returns how many messages this rank sends for one bucket, all in batches: for a message
    outside of a batch NCCL would make a communicator of its own."""
    with built_model(path, parallel) as (model, groups):
        (bucket,) = plan_buckets(model.table, torch.float32, 1 << 30)
        gatherer = BucketGatherer(
            model.table, groups.rank, named_params(model.chunks), [bucket], root
        )
        with batched() as sent:
            gatherer.gather(bucket)
    return len(sent)


def test_one_message_per_source_and_none_from_replicas(world: World, model_path: Path) -> None:
    assert world.run(run_count, model_path, dict(tp=2, pp=2), 0) == [0, 1, 1, 1]
    assert world.run(run_count, model_path, dict(tp=2), 0) == [0, 1, 0, 0]  # ranks 2, 3: dp=1
    assert world.run(run_count, model_path, dict(tp=2), 3) == [1, 0, 0, 0]
    assert world.run(run_count, model_path, dict(), 1) == [0, 0, 0, 0]
