"""Weights from sharded ranks reach real (embedded) servers bit for bit, or fail readably.

A rank's parameters are those of the piece table, filled from an HF directory: no model is built.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import is_tensor
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.api.records import INITIAL_VERSION, WeightUpdateMeta
from megarl.ckpt.hf import save_hf
from megarl.config.engine import ParallelConfig
from megarl.config.rollout import RolloutConfig
from megarl.models.hf_config import read_hf_config
from megarl.models.piece_table import build_piece_table
from megarl.parallel.layout import Layout
from megarl.parallel.ranks import Ranks
from megarl.rollout.client import RemoteSGLangEngine
from megarl.utils.http import call_json
from megarl.weight_sync import broadcast, slices
from megarl.weight_sync.broadcast import UpdateChannel
from megarl.weight_sync.plan import plan_sync
from megarl.weight_sync.transports import WeightSender, WeightSource
from megarl.wire.process_group import destroy_update_group, init_update_group
from tests.dist.engine_jobs import make_engine
from tests.dist.uploads import SOME, sharded
from tests.dist.world import World, free_port
from tests.embedded_server import (
    Server,
    address,
    addresses,
    checksums,
    embedded_server,
    load,
    two_servers,
    version,
)
from tests.files import read_all
from tests.tiny import HYBRID_KINDS, HYBRID_MOE_KINDS, MOE_KINDS, save_tiny
from tests.transports import documented_transport

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": dict(tp=2), "pp2": dict(pp=2, pipeline_split=[3, 1]), "dp2": {}, "cp2": dict(cp=2),
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weight_sync")


@pytest.fixture(scope="module")
def untied(home: Path) -> Iterator[list[Server]]:
    """Two servers of an untied fp32 model with biases."""
    model = save_tiny(home / "qwen2", "qwen2")
    with two_servers(model, home) as servers:
        yield servers


@pytest.fixture(scope="module")
def tied(home: Path) -> Iterator[Server]:
    """One server of a tied bf16 model with qk-norm and a head_dim of its own."""
    model = save_tiny(home / "qwen3", "qwen3", tie=True, dtype=torch.bfloat16)
    with embedded_server(model, log=home / "tied.log") as server:
        yield server


Params = dict[str, torch.Tensor]


def run_syncs(
    source: Path,
    saved: Path,
    parallel: dict[str, Any],
    dtype: torch.dtype,
    metas: list[WeightUpdateMeta],
    sender: int = 0,
    dtypes: dict[str, torch.dtype] | None = None,
) -> list[dict[str, float]]:
    """Saves to `saved`, then uploads once for each meta through one sender; `dtypes` of what both
    write, by HF name, None are the parameters'."""
    shards = sharded(source, parallel, dtype)
    save_hf(saved, *shards, dtype=dtypes)
    weights = WeightSender(WeightSource(*shards, sender=sender, dtype=dtypes))
    try:
        return [weights.upload(meta) for meta in metas]
    finally:
        weights.close()


def metas_for(held: list[Server], first: int, **kw: Any) -> list[WeightUpdateMeta]:
    """Two syncs by broadcasts, of which the second is connected already."""
    kw = {"bucket_bytes": SOME, "timeout": 60.0, "verify": True, "sharded": "off"} | kw
    return [
        WeightUpdateMeta(type="distributed", version=first + i, addresses=addresses(held), **kw)
        for i in range(2)
    ]


@pytest.mark.parametrize("i", range(len(LAYOUTS)), ids=LAYOUTS)
def test_two_servers_hold_what_save_writes(
    world: World, untied: list[Server], i: int, home: Path, tmp_path: Path
) -> None:
    source = save_tiny(tmp_path / "new", "qwen2", seed=10 + i)
    saved, before = tmp_path / "saved", checksums(untied[0])
    for meta in metas_for(untied, 10 * i + 1):
        for server in untied:  # so that the second sync has something to change as well
            load(server, home / "qwen2")
        stats = world.run(
            run_syncs, source, saved, list(LAYOUTS.values())[i], torch.float32, [meta], sender=i % 2
        )
        (figures,) = stats[0]
        assert stats[1] == stats[0] and figures["weight_sync/verified"] == 1
        assert figures["weight_sync/buckets"] > 5
        for phase in ("connect", "gather", "pack", "broadcast", "verify", "total"):
            assert figures[f"weight_sync/{phase}_s"] > 0, phase
        assert figures["weight_sync/load_wait_s"] >= 0
        streamed = [checksums(s) for s in untied]
        assert [version(s) for s in untied] == [str(meta.version)] * 2
        load(untied[0], saved)
        assert streamed[0] == streamed[1] == checksums(untied[0]) != before


@pytest.mark.parametrize("i", range(len(LAYOUTS)), ids=LAYOUTS)
def test_tied_bf16_weights(world: World, tied: Server, i: int, home: Path, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "new", "qwen3", tie=True, dtype=torch.bfloat16, seed=20 + i)
    saved = tmp_path / "saved"
    metas = metas_for([tied], 100 + 10 * i)
    world.run(run_syncs, source, saved, list(LAYOUTS.values())[i], torch.bfloat16, metas)
    streamed = checksums(tied)
    assert version(tied) == str(metas[-1].version)
    load(tied, home / "qwen3")
    assert checksums(tied) != streamed
    load(tied, saved)
    assert checksums(tied) == streamed


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", (*MOE_KINDS, "glm4", "mistral", "kimi_k2", "gpt_oss", *HYBRID_KINDS)
)
def test_every_family_reaches_a_server(world: World, kind: str, tmp_path: Path) -> None:
    parallel = (
        dict(ep=2) if kind in (*MOE_KINDS, *HYBRID_MOE_KINDS, "kimi_k2", "gpt_oss") else dict(tp=2)
    )
    source, saved = save_tiny(tmp_path / "new", kind, seed=50), tmp_path / "saved"
    old = save_tiny(tmp_path / "old", kind)
    with embedded_server(old, log=tmp_path / "log") as server:
        before = checksums(server)
        stats = world.run(run_syncs, source, saved, parallel, torch.float32, metas_for([server], 1))
        assert all(figures["weight_sync/verified"] == 1 for figures in stats[0])
        streamed = checksums(server)
        load(server, old)
        assert checksums(server) == before != streamed
        load(server, saved)
        assert checksums(server) == streamed


def test_disk_and_streaming_agree_and_old_versions_go(
    world: World, untied: list[Server], tmp_path: Path
) -> None:
    source = save_tiny(tmp_path / "new", "qwen2", seed=30)
    path = tmp_path / "shared"
    disk = [
        WeightUpdateMeta(
            type="disk",
            version=v,
            path=str(path),
            addresses=addresses(untied),
            timeout=60,
            verify=True,
        )
        for v in (201, 202)
    ]
    world.run(run_syncs, source, tmp_path / "saved", dict(tp=2), torch.float32, disk)
    assert sorted(p.name for p in path.iterdir()) == ["v202"]
    assert [version(s) for s in untied] == ["202"] * 2
    loaded = checksums(untied[0])
    metas = metas_for(untied, 203, bucket_bytes=1 << 30)  # everything in one bucket
    stats = world.run(run_syncs, source, tmp_path / "saved", dict(tp=2), torch.float32, metas)
    assert stats[0][0]["weight_sync/buckets"] == 1
    assert checksums(untied[0]) == checksums(untied[1]) == loaded


def test_files_for_servers_have_the_dtype_of_every_name(
    world: World, untied: list[Server], tmp_path: Path
) -> None:
    source, saved = save_tiny(tmp_path / "new", "qwen2", seed=31), tmp_path / "saved"
    want = {k: t.bfloat16() if "self_attn" in k else t for k, t in read_all(source).items()}
    dtypes = {name: value.dtype for name, value in want.items()}
    meta = WeightUpdateMeta(
        type="disk",
        version=204,
        path=str(tmp_path / "shared"),
        addresses=addresses(untied),
        timeout=60,
    )
    world.run(run_syncs, source, saved, dict(tp=2), torch.float32, [meta], dtypes=dtypes)
    for written in (saved, tmp_path / "shared" / "v204"):
        found = read_all(written)
        assert found.keys() == want.keys()
        assert all(f.dtype == dtypes[k] and torch.equal(f, want[k]) for k, f in found.items())
        config = json.loads((written / "config.json").read_text())
        assert config.get("dtype", config.get("torch_dtype")) == "float32"


def test_a_transport_from_outside_of_the_package(
    world: World, untied: list[Server], tmp_path: Path
) -> None:
    """The one in docs/servers.md: one file, with options; a rank's failure is every rank's."""
    source, saved = save_tiny(tmp_path / "new", "qwen2", seed=33), tmp_path / "saved"
    meta = replace(
        metas_for(untied, 205, verify="off")[0], path=str(tmp_path / "shared"),
        type=documented_transport(tmp_path), options={"prefix": "part"},
    )  # fmt: skip
    stats = world.run(run_syncs, source, saved, dict(tp=2), torch.float32, [meta], sender=1)
    assert stats[0] == stats[1] and stats[0][0]["weight_sync/save_s"] > 0
    assert len(list((tmp_path / "shared" / "v205").glob("part-*.safetensors"))) > 5
    sent = [checksums(s) for s in untied]
    assert [version(s) for s in untied] == ["205"] * 2
    load(untied[0], saved)
    assert sent[0] == sent[1] == checksums(untied[0])
    bad = replace(meta, version=206, path=str(saved / "config.json"))  # rank 0 alone writes there
    results = world.run(run_failing_sync, source, dict(tp=2), bad, replace(meta, version=207))
    assert "Not a directory" in results[0].error
    assert "weight sync failed on rank 0: NotADirectoryError: " in results[1].error
    assert [r.recovered["weight_sync/servers"] for r in results] == [2, 2]


class Allocations(TorchDispatchMode):
    """Bytes of all storages that live because of operators run inside, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak, self._known = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kw)) if is_tensor(t)}
        out = func(*args, **(kw or {}))
        for t in tree_leaves(out):
            if is_tensor(t):
                storage = t.untyped_storage()
                if storage._cdata not in self._known | before:
                    self._add(storage)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key, nbytes)

    def _drop(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


def run_counted(
    source: Path, parallel: dict[str, Any], meta: WeightUpdateMeta
) -> tuple[int, float]:
    """Peak of what a sync allocates on this rank, and what the sync says about it."""
    sender = WeightSender(WeightSource(*sharded(source, parallel, torch.float32)))
    try:
        with Allocations() as counted:
            stats = sender.upload(meta)
        return counted.peak, stats["weight_sync/peak_extra_bytes"]
    finally:
        sender.close()


def test_extra_memory_is_two_buckets_of_the_sender_and_a_message_elsewhere(
    world: World, untied: list[Server], tmp_path: Path
) -> None:
    """And an eighth of one for messages; 10 KB are for what ranks say to each other."""
    source, bucket = save_tiny(tmp_path / "new", "qwen2", seed=38), 200_000
    (meta, _) = metas_for(untied, 281, bucket_bytes=bucket, verify="off")
    (sender, said), (other, _) = world.run(run_counted, source, dict(tp=2), meta)
    assert 1.5 * bucket < said <= 2 * bucket + bucket // 8
    assert said <= sender <= said + 10_000
    assert 1_000 < other <= bucket // 8 + 10_000


def test_fp32_ranks_feed_a_bf16_server(world: World, tied: Server, tmp_path: Path) -> None:
    """The server rounds what it gets; verification rounds likewise before it compares."""
    source = save_tiny(tmp_path / "new", "qwen3", tie=True, seed=40)
    stats = world.run(
        run_syncs, source, tmp_path / "saved", dict(tp=2), torch.float32, metas_for([tied], 301)
    )
    assert stats[0][0]["weight_sync/verified"] == 1


# ---- failures: each a RuntimeError on every rank, and the next sync works. Where nothing is said
# about a timeout it is 600 s: a rank that waits for it fails the test by the world's own bound.


class Tripwire(dict[str, torch.Tensor]):
    """Parameters that call `trip` once, when the `at`-th of them is read for a bucket."""

    def __init__(self, params: Params, at: int, trip: Callable[[], None]) -> None:
        super().__init__(params)
        self._left, self._trip = at, trip

    def __getitem__(self, name: str) -> torch.Tensor:
        self._left -= 1
        if self._left == 0:
            self._trip()
        return super().__getitem__(name)


@dataclass
class Failure:
    error: str
    recovered: dict[str, float]


def run_failing_sync(
    source: Path,
    parallel: dict[str, Any],
    bad: WeightUpdateMeta,
    good: WeightUpdateMeta,
    hit: tuple[int, int] | None = None,
) -> Failure:
    """Uploads `bad`, expects an error, then uploads `good` through the same sender.

    hit: (pid, signal) sent by rank 0 while `bad` is being gathered, some buckets having gone out.
    """
    table, layout, rank, params = sharded(source, parallel, torch.float32)
    if hit is not None and rank == 0:
        params = Tripwire(params, len(params) // 2, lambda: os.kill(*hit))
    sender = WeightSender(WeightSource(table, layout, rank, params))
    try:
        sender.upload(bad)
        error = ""
    except (RuntimeError, OSError) as e:
        error = str(e)
    try:
        return Failure(error, sender.upload(good))
    finally:
        sender.close()


def test_a_server_that_refuses_is_quoted_on_every_rank(
    world: World, untied: list[Server], tied: Server, tmp_path: Path
) -> None:
    """A qwen2 sync reaches a qwen3 server, which has no biases."""
    source = save_tiny(tmp_path / "new", "qwen2", seed=50)
    before = version(tied)
    bad = metas_for([untied[0], tied], 401, timeout=600.0, verify=False)[0]
    good = metas_for(untied, 402)[0]
    results = world.run(run_failing_sync, source, dict(tp=2), bad, good)
    for r in results:
        assert address(tied) in r.error and address(untied[0]) not in r.error
        assert "version 401, bucket" in r.error
        assert "shape" in r.error or "no such parameter" in r.error  # the server's own words
        assert r.recovered["weight_sync/verified"] == 1
    assert version(tied) == before
    assert [version(s) for s in untied] == ["402"] * 2


@pytest.mark.system
@pytest.mark.parametrize(
    "blow, timeout, sharded",
    (
        pytest.param(signal.SIGKILL, 600.0, "off", id="killed"),
        pytest.param(signal.SIGKILL, 600.0, "on", id="killed-slices"),
        pytest.param(signal.SIGSTOP, 4.0, "off", id="frozen", marks=pytest.mark.full),
        pytest.param(signal.SIGSTOP, 4.0, "on", id="frozen-slices", marks=pytest.mark.full),
    ),
)
def test_a_server_lost_in_the_middle_is_named_on_every_rank(
    world: World,
    untied: list[Server],
    home: Path,
    tmp_path: Path,
    blow: signal.Signals,
    timeout: float,
    sharded: str,
) -> None:
    source = save_tiny(tmp_path / "new", "qwen2", seed=60)
    with embedded_server(home / "qwen2", log=tmp_path / "victim.log") as victim:
        both = [victim, untied[0]]
        bad = metas_for(both, 501, bucket_bytes=20_000, timeout=timeout, sharded=sharded)[0]
        good = metas_for(untied, 502)[0]
        hit = victim.process.pid, int(blow)
        results = world.run(run_failing_sync, source, dict(pp=2), bad, good, hit)
        for r in results:
            assert address(victim) in r.error, r.error
            assert "version 501" in r.error
            assert r.recovered["weight_sync/verified"] == 1
    assert [version(s) for s in untied] == ["502"] * 2


def run_until_a_server_dies(
    source: Path, meta: WeightUpdateMeta, pid: int, last: bool
) -> tuple[str, float]:
    """The server dies while the first or the last bucket is sent. The error, and after how long."""
    deliver = UpdateChannel.deliver

    def kill(self: UpdateChannel, what: str, *rest: Any) -> Any:
        transfer = deliver(self, what, *rest)
        bucket = re.search(r"bucket (\d+) of (\d+)", what)
        assert bucket is not None and int(bucket[2]) > 5
        if bucket[1] == (bucket[2] if last else "1"):
            os.kill(pid, signal.SIGKILL)
        return transfer

    sender, start = WeightSender(WeightSource(*sharded(source, dict(pp=2)))), time.monotonic()
    try:
        with mock.patch.object(UpdateChannel, "deliver", kill):
            sender.upload(meta)
        return "", 0.0
    except RuntimeError as e:
        return f"{type(e).__name__}: {e}", time.monotonic() - start
    finally:
        sender.close()


@pytest.mark.system
@pytest.mark.parametrize("last", (False, True), ids=("first", "last"))
def test_a_server_that_dies_in_a_round_leaves_the_others_whole(
    world: World, untied: list[Server], home: Path, tmp_path: Path, last: bool
) -> None:
    """Every tensor is the old or the new one. A version is new where all tensors are."""
    source, (left, _) = save_tiny(tmp_path / "new", "qwen2", seed=61), untied
    load(left, source)
    new = checksums(left)
    load(left, home / "qwen2")
    old, before = checksums(left), version(left)
    with embedded_server(home / "qwen2", log=tmp_path / "victim.log") as victim:
        (meta, _) = metas_for(
            [victim, left], 521 + 2 * last, bucket_bytes=20_000, timeout=600.0, verify="off"
        )
        pid = victim.process.pid
        for error, seconds in world.run(run_until_a_server_dies, source, meta, pid, last):
            assert error.startswith("ServersLost") and address(victim) in error, error
            assert address(left) not in error and seconds < 60
    sums = checksums(left)
    assert all(sums[name] in (old[name], new[name]) for name in sums)
    assert version(left) == (before if sums != new else str(meta.version))
    (good,) = metas_for([left], 522 + 2 * last)[:1]
    stats = world.run(run_syncs, source, tmp_path / "saved", dict(pp=2), torch.float32, [good])
    assert stats[0][0]["weight_sync/verified"] == 1 and checksums(left) == new
    assert version(left) == str(good.version)


def run_across_a_restart(
    source: Path, server: str, metas: list[WeightUpdateMeta]
) -> list[tuple[int, int]]:
    """After the second upload `server` looks like a new process. How many groups the sender has
    made after each, and how often it has asked whether servers take slices."""
    sender = WeightSender(WeightSource(*sharded(source, dict(tp=2), torch.float32)))
    made: list[tuple[int, int]] = []
    with (
        mock.patch.object(broadcast, "UpdateChannel", wraps=UpdateChannel) as channels,
        mock.patch.object(slices, "refusal_of_servers", return_value="cannot") as asked,
    ):
        for k, meta in enumerate(metas):
            if k == 2 and dist.get_rank() == 0:
                body = {"new_version": INITIAL_VERSION, "abort_all_requests": False}
                call_json("POST", server, "/update_weight_version", body, timeout=30)
            sender.upload(meta)
            made.append((channels.call_count, asked.call_count))
        sender.close()
    return made


@pytest.mark.system
def test_a_server_that_was_started_again_is_connected_again(
    world: World, untied: list[Server], tmp_path: Path
) -> None:
    """It is in no group, which nobody has noticed."""
    source = save_tiny(tmp_path / "new", "qwen2", seed=65)
    metas = [m for first in (551, 553) for m in metas_for(untied, first, sharded="auto")]
    made = world.run(run_across_a_restart, source, address(untied[1]), metas)
    assert made == [[(1, 1), (1, 1), (2, 1), (2, 2)], [(0, 1), (0, 1), (0, 1), (0, 2)]]
    assert [version(s) for s in untied] == ["554"] * 2


def run_corrupted_sync(source: Path, bad: WeightUpdateMeta, good: WeightUpdateMeta) -> Failure:
    """The first byte of the third bucket arrives as another in `bad`; then `good` is sent."""
    deliver = UpdateChannel.deliver

    def flip(self: UpdateChannel, what: str, flat: torch.Tensor, *rest: Any) -> Any:
        if "bucket 3 of" in what:
            flat = flat.clone()
            flat[0] ^= 1
        return deliver(self, what, flat, *rest)

    sender = WeightSender(WeightSource(*sharded(source, dict(tp=2), torch.float32)))
    try:
        UpdateChannel.deliver = flip  # type: ignore[method-assign]
        sender.upload(bad)
        error = ""
    except RuntimeError as e:
        error = str(e)
    finally:
        UpdateChannel.deliver = deliver  # type: ignore[method-assign]
    try:
        return Failure(error, sender.upload(good))
    finally:
        sender.close()


def test_a_corrupted_tensor_is_named_on_every_rank(
    world: World, untied: list[Server], home: Path, tmp_path: Path
) -> None:
    """Servers that hold other weights, and one bit that goes wrong on the way."""
    source = save_tiny(tmp_path / "new", "qwen2", seed=65)
    for server in untied:
        load(server, home / "qwen2")
    bad = metas_for(untied, 551)[0]
    layout = Layout.from_config(ParallelConfig(tp=2), 2)
    table = build_piece_table(read_hf_config(source), layout)
    name = plan_sync(table, torch.float32, SOME).buckets[2].members[0].name
    for r in world.run(run_corrupted_sync, source, bad, metas_for(untied, 553)[0]):
        for server in untied:
            assert f"server {address(server)}, rank 0: {name} [" in r.error, r.error
        assert r.recovered["weight_sync/verified"] == 1


def test_no_server_at_an_address(world: World, untied: list[Server], tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "new", "qwen2", seed=70)
    bad = WeightUpdateMeta(
        type="distributed", version=601, addresses=(f"127.0.0.1:{free_port()}",), timeout=600
    )
    for r in world.run(run_failing_sync, source, {}, bad, metas_for(untied, 602)[0]):
        assert bad.addresses[0] in r.error and "refused" in r.error


def run_disagreeing_plans(source: Path, address: str) -> str:
    shards = sharded(source, {}, torch.float32)
    sender = WeightSender(WeightSource(*shards))
    meta = WeightUpdateMeta(
        type="distributed", version=1, addresses=(address,), timeout=60, sharded="off",
        bucket_bytes=SOME * (1 + shards[2]),
    )  # fmt: skip
    try:
        sender.upload(meta)
    except ValueError as e:
        return str(e)
    finally:
        sender.close()
    return ""


def test_ranks_with_different_plans_find_out(
    world: World, untied: list[Server], home: Path
) -> None:
    errors = world.run(run_disagreeing_plans, home / "qwen2", address(untied[0]))
    assert errors[0] == errors[1] and "bucket_bytes" in errors[0]
    assert "rank 1 has another bucket_bytes than rank 0" in errors[0]


# ---- groups


def run_meeting_sglang(port: int) -> list[float]:
    """Rank 0 as the trainer; rank 1 does, step by step, what SGLang's init_custom_process_group
    does on a server. Both stand beside the default group, and leave it usable.
    """
    name = "weights"
    if dist.get_rank() == 0:
        pg = init_update_group(
            master_address="127.0.0.1", master_port=port, rank=0, world_size=2, group_name=name,
            backend="gloo", timeout=60,
        )  # fmt: skip
    else:
        store, rank, size = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 1, 2))
        pg, _ = c10d._new_process_group_helper(
            size, rank, [], dist.Backend("gloo"), dist.PrefixStore(name, store),
            group_name=name,  # type: ignore[arg-type]
            timeout=c10d.default_pg_timeout,
        )  # fmt: skip
        c10d._world.pg_group_ranks[pg] = {0: 0, 1: 1}
    data = torch.arange(3.0) if dist.get_rank() == 0 else torch.zeros(3)
    dist.broadcast(data, src=0, group=pg)
    destroy_update_group(pg)
    dist.all_reduce(data)
    return data.tolist()


def test_the_group_meets_sglangs(world: World) -> None:
    for _ in range(2):  # and again under the same name
        assert world.run(run_meeting_sglang, free_port()) == [[0.0, 2.0, 4.0]] * 2


def run_agreeing(failing: tuple[int, ...]) -> str:
    def work(rank: int) -> int:
        if rank in failing:
            raise KeyError(f"broken {rank}")
        return rank

    agreement = Ranks(what="weight sync")  # a new one each time, under a new name
    try:
        return str(agreement.together(work, agreement.rank))
    except (KeyError, RuntimeError) as e:
        return f"{type(e).__name__}: {e}"
    finally:
        agreement.close()


def test_an_error_of_one_is_an_error_of_all(world: World) -> None:
    assert world.run(run_agreeing, ()) == ["0", "1"]
    told = "OtherRankFailed: weight sync failed on rank 1: KeyError: 'broken 1'"
    assert world.run(run_agreeing, (1,)) == [told, "KeyError: 'broken 1'"]
    assert world.run(run_agreeing, (0, 1)) == ["KeyError: 'broken 0'", "KeyError: 'broken 1'"]


def run_gathering(sizes: list[int]) -> list[Any]:
    agreement = Ranks()
    try:
        mine = {"rank": agreement.rank, "text": "x" * sizes[agreement.rank]}
        values = agreement.gather(mine)
        assert [v["rank"] for v in values] == [0, 1]
        return [len(v["text"]) for v in values]
    finally:
        agreement.close()


@pytest.mark.parametrize("sizes", ([0, 3], [900, 0], [5, 1000], [5000, 70_000]))
def test_ranks_tell_each_other_what_is_small_and_large(world: World, sizes: list[int]) -> None:
    assert world.run(run_gathering, sizes) == [sizes] * 2


# ---- versions


def run_loop_of_one_meta(source: Path, meta: WeightUpdateMeta) -> tuple[list[int], list[str]]:
    """A script's loop around one meta that was made before it. Returns the versions it comes to,
    and what it says of versions that do not rise."""
    engine = make_engine(str(source), dict(tp=2))
    client = RemoteSGLangEngine(RolloutConfig(addresses=list(meta.addresses)))
    client.initialize()
    versions, refused = [], []
    try:
        for step in range(3):
            arrived = client.update_weights(meta)
            engine.upload_weights(meta)
            arrived.result(timeout=60)
            versions.append(client.get_version())
            if step:  # a script may also leave it to the uploads
                engine.set_version(step + 1)
        for verb in (engine.upload_weights, client.update_weights):
            with pytest.raises(ValueError, match="a version that does not rise") as error:
                verb(replace(meta, version=3))
            refused.append(str(error.value))
        engine.set_version(1)  # back at older weights: the next ones are version 2
        engine.upload_weights(meta)
        return versions, refused
    finally:
        client.destroy()
        engine.destroy()


def test_one_meta_serves_a_whole_loop(
    world: World, untied: list[Server], home: Path, tmp_path: Path
) -> None:
    source = save_tiny(tmp_path / "new", "qwen2", seed=80)
    meta = replace(metas_for(untied, 0)[0], version=None)
    for versions, refused in world.run(run_loop_of_one_meta, source, meta):
        assert versions == [1, 2, 3]
        assert all("version=3: the update before was version 3" in words for words in refused)
    assert [version(s) for s in untied] == ["2"] * 2
