"""The pure half of weight sync: buckets, bodies, ranks, digests, what a verification says."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from megarl.api.records import WeightUpdateMeta
from megarl.models.hf_config import read_hf_config
from megarl.models.piece_table import PieceTable, build_piece_table
from megarl.parallel.layout import Layout
from megarl.transfer.gather import BucketGatherer
from megarl.weight_sync.plan import (
    plan_sync,
    rank_offsets,
    uniform_dtype,
    update_body,
)
from megarl.weight_sync.servers import ServerInfo
from megarl.weight_sync.transports import WeightSender, WeightSource
from tests.tiny import save_tiny

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> PieceTable:
    path = save_tiny(tmp_path_factory.mktemp("model"), "llama", layers=2)
    return build_piece_table(read_hf_config(path), Layout(tp=2))


def test_buckets_hold_every_tensor_once_and_within_bounds(table: PieceTable) -> None:
    bound = 50_000
    plan = plan_sync(table, torch.bfloat16, bound)
    names = [m.name for b in plan.buckets for m in b.members]
    assert sorted(names) == sorted(t.name for t in table.tensors)
    assert len(plan.buckets) > 3
    assert all(b.nbytes <= bound or len(b.members) == 1 for b in plan.buckets)
    assert plan.nbytes == sum(2 * t.numel for t in table.tensors)
    assert plan.largest == max(b.nbytes for b in plan.buckets)


@pytest.mark.parametrize("bound", (2_000, 100_000, 1 << 30))
def test_mixed_dtypes_leave_no_gaps(table: PieceTable, bound: int) -> None:
    """A receiver adds up sizes: offsets must be their running sum, and aligned."""
    dtype = {t.name: torch.bfloat16 for t in table.tensors}
    dtype[NORM] = torch.float32
    dtype["model.layers.1.input_layernorm.weight"] = torch.float32
    for b in plan_sync(table, dtype, bound).buckets:
        end = 0
        for m in b.members:
            assert m.offset == end and end % m.dtype.itemsize == 0
            end += m.nbytes
        assert end == b.nbytes


def test_ranks_see_whatever_changes_the_plan(table: PieceTable) -> None:
    def digests(
        table: PieceTable, dtype: Any, bucket_bytes: int, sender: int = 0
    ) -> Mapping[str, str]:
        buckets = plan_sync(table, dtype, bucket_bytes).buckets
        return BucketGatherer(table, 0, {}, buckets, sender).plan.digests

    ours = digests(table, torch.bfloat16, 50_000)
    assert digests(table, torch.bfloat16, 50_000) == ours
    half = {t.name: torch.bfloat16 for t in table.tensors} | {NORM: torch.float16}
    piped = build_piece_table(table.model, Layout(pp=2))
    for name, others in (
        ("bucket_bytes", digests(table, torch.bfloat16, 50_000, 1)),
        ("bucket_bytes", digests(table, torch.bfloat16, 1 << 30)),
        ("dtype", digests(table, half, 50_000)),
        ("layout", digests(piped, torch.bfloat16, 50_000)),
        ("model", digests(replace(table, tensors=table.tensors[1:]), torch.bfloat16, 50_000)),
        ("plan", digests(swapped(table), torch.bfloat16, 50_000)),
    ):
        assert next(k for k in ours if ours[k] != others[k]) == name


def swapped(table: PieceTable) -> PieceTable:
    """The table with a matrix cut by columns where it was cut by rows, into as many numbers."""
    i, t = next(
        (i, t)
        for i, t in enumerate(table.tensors)
        if len(t.pieces) == 2 and len(t.shape) == 2 and t.pieces[0].stop[0] < t.shape[0]
    )
    rows, columns = t.shape
    cuts = (((0, 0), (rows, columns // 2)), ((0, columns // 2), (rows, columns)))
    pieces = tuple(replace(p, start=a, stop=b) for p, (a, b) in zip(t.pieces, cuts, strict=True))
    tensors = (*table.tensors[:i], replace(t, pieces=pieces), *table.tensors[i + 1 :])
    return replace(table, tensors=tensors)


def test_only_the_last_bucket_flushes_and_bumps_the_version(table: PieceTable) -> None:
    bucket = plan_sync(table, torch.bfloat16, 1 << 30).buckets[0]
    first = update_body(bucket, group_name="g", version=7, last=False)
    last = update_body(bucket, group_name="g", version=7, last=True)
    assert first["flush_cache"] is False and "weight_version" not in first
    assert last["flush_cache"] is True and last["weight_version"] == "7"
    assert first["load_format"] == last["load_format"] == "flattened_bucket"
    kept = update_body(bucket, group_name="g", version=7, last=True, flush=False)
    assert kept["flush_cache"] is False and kept["weight_version"] == "7"
    at = first["names"].index(NORM)
    assert first["dtypes"][at] == "bfloat16" and first["shapes"][at] == [64]


def test_servers_workers_follow_the_sender() -> None:
    assert rank_offsets([1, 1]) == ([1, 2], 3)
    assert rank_offsets([4, 1, 2]) == ([1, 5, 6], 8)


def test_mixed_parameters_need_a_dtype() -> None:
    params = {"a": torch.zeros(1), "b": torch.zeros(1, dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match=r"bfloat16.*float32.*give WeightSource a `dtype`"):
        uniform_dtype(params)


def test_server_info_knows_who_receives() -> None:
    ours = ServerInfo.parse("s", {"dtype": "bfloat16", "version": "0.5.23+megarl"})
    assert ours == ServerInfo(tp=1, embedded=True, version="0.5.23+megarl")
    stock = ServerInfo.parse("s", {"tp_size": 8, "dtype": "auto", "version": "0.5.23"})
    assert stock == ServerInfo(tp=8, embedded=False, version="0.5.23")
    attention = {"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}
    assert (ServerInfo.parse("s", attention).tp, ServerInfo.parse("s", attention).replicas) == (
        8,
        1,
    )
    inside = ServerInfo.parse("s", {"tp_size": 2, "dp_size": 4, "pp_size": 3})
    assert (inside.tp, inside.replicas, inside.stages) == (2, 4, 3)


def sender(table: PieceTable, first: int = 0) -> WeightSender:
    params = {
        n: torch.zeros(p.shape) for n, p in table.local_params(table.layout.coords(0)).items()
    }
    return WeightSender(WeightSource(table, table.layout, 0, params, sender=first))


def test_what_the_sender_refuses(table: PieceTable, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"sender=2: use a rank of the layout, 0\.\.1"):
        sender(table, 2)
    for kind in ("distributed", "colocated"):
        with pytest.raises(ValueError, match="weight sync has no server to send to: set"):
            sender(table).upload(WeightUpdateMeta(type=kind, version=1))
        with pytest.raises(ValueError, match="bucket_bytes=0"):
            sender(table).upload(WeightUpdateMeta(type=kind, version=1, bucket_bytes=0))
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]
