"""The pure half of weight sync: buckets, bodies, ranks, hashes, what a verification says."""

from __future__ import annotations

import logging

import pytest
import torch

from megarl.api.records import WeightUpdateMeta
from megarl.models.hf_config import read_hf_config
from megarl.models.piece_table import PieceTable, build_piece_table
from megarl.parallel.layout import Layout
from megarl.weight_sync.plan import (
    difference,
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


def test_digest_sees_whatever_changes_the_plan(table: PieceTable) -> None:
    plans = [
        plan_sync(table, torch.bfloat16, 50_000),
        plan_sync(table, torch.bfloat16, 50_000, 1),
        plan_sync(table, torch.bfloat16, 70_000),
        plan_sync(table, torch.float32, 50_000),
        plan_sync(build_piece_table(table.model, Layout(pp=2)), torch.bfloat16, 50_000),
    ]
    assert len({p.digest for p in plans}) == len(plans)
    assert plan_sync(table, torch.bfloat16, 50_000).digest == plans[0].digest


def test_the_first_entry_that_differs_is_named(table: PieceTable) -> None:
    ours = plan_sync(table, torch.bfloat16, 50_000)
    dtype = {t.name: torch.bfloat16 for t in table.tensors} | {NORM: torch.float16}
    theirs = plan_sync(table, dtype, 50_000)
    assert difference([ours.entries, ours.entries]) is None
    said = difference([ours.entries, ours.entries, theirs.entries])
    (home,) = (b.index for b in ours.buckets if NORM in [m.name for m in b.members])
    assert said is not None and f"rank 2 has {NORM} [64] torch.float16 at byte" in said
    assert f"where rank 0 has {NORM} [64] torch.bfloat16 at byte" in said
    assert f"of bucket {home + 1}, sent by rank 0" in said
    fewer = plan_sync(table, torch.bfloat16, 1 << 30)
    assert "of bucket 1, " in (difference([ours.entries, fewer.entries]) or "")
    assert "rank 1 has nothing where" in (difference([ours.entries, ours.entries[:-1]]) or "")


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
    assert ours == ServerInfo(tp=1, embedded=True)
    stock = ServerInfo.parse("s", {"tp_size": 8, "dtype": "auto", "version": "0.5.23"})
    assert stock == ServerInfo(tp=8, embedded=False)
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
