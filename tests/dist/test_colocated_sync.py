"""Servers that read the trainers' memory: bit for bit, or a readable failure."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file

from megarl.api.records import WeightUpdateMeta
from megarl.weight_sync import colocated
from tests.dist.uploads import Upload, run_uploads
from tests.dist.world import World
from tests.embedded_server import Server, addresses, checksums, embedded_server, load, two_servers
from tests.stock_server import StockServer
from tests.tiny import save_tiny

pytestmark = pytest.mark.system

_versions = itertools.count(1)


@pytest.fixture(scope="module")
def old(models: Path) -> Path:
    return save_tiny(models / "old", "qwen2", layers=2)


@pytest.fixture(scope="module")
def new(models: Path) -> Path:
    return save_tiny(models / "new", "qwen2", layers=2, seed=1)


@pytest.fixture(scope="module")
def servers(old: Path, models: Path) -> Iterator[list[Server]]:
    with two_servers(old, models) as servers:
        yield servers


def meta(*servers: Server, **kw: Any) -> WeightUpdateMeta:
    given: dict[str, Any] = dict(
        bucket_bytes=60_000, timeout=60.0, verify="full", addresses=addresses(list(servers))
    )
    return WeightUpdateMeta(type="colocated", version=next(_versions), **(given | kw))


def beside(spots: Any, servers: dict[str, int], *, sender: int) -> dict[str, tuple[int, ...]]:
    """As on two GPUs: workers read from rank 0 and from rank 1 in turn."""
    number = itertools.count()
    return {server: tuple(next(number) % 2 for _ in range(tp)) for server, tp in servers.items()}


def run_read_from_both(parallel: dict[str, Any], uploads: list[Upload]) -> Any:
    """Syncs as on GPUs: the first server reads rank 0's memory, the second rank 1's."""
    with mock.patch.object(colocated, "read_from", beside):
        return run_uploads(parallel, uploads)


@pytest.mark.parametrize("job", (run_uploads, run_read_from_both))
@pytest.mark.parametrize("parallel", (dict(tp=2), dict(tp=1)), ids=("tp2", "dp2"))
def test_servers_hold_what_save_writes(
    world: World, servers: list[Server], old: Path, new: Path, tmp_path: Path,
    job: Any, parallel: dict[str, Any],
) -> None:  # fmt: skip
    """One sender sends the new weights, the old ones and the new ones again."""
    for server in servers:
        load(server, old)
    before, saved = checksums(servers[0]), tmp_path / "saved"
    tensors = load_file(next(new.glob("*.safetensors")))
    whole = sum(t.nbytes for t in tensors.values())
    cut = whole - sum(t.nbytes for n, t in tensors.items() if "norm" in n)
    # what a rank lacks of what it hands on crosses once: rank 0 has more of the vocabulary's rows
    crossing = {
        (run_uploads, 2): pytest.approx(cut / 2, rel=0.1),
        (run_read_from_both, 2): cut,
        (run_uploads, 1): 0,
        (run_read_from_both, 1): 0,
    }
    uploads = [
        Upload(source, saved if source == new else None, meta(*servers))
        for source in (new, old, new)
    ]
    for figures in world.run(job, parallel, uploads):
        for f in figures:
            assert isinstance(f, dict), f
            assert f["weight_sync/verified"] == 1
            assert f["weight_sync/bytes"] == crossing[job, parallel["tp"]]
            assert f["weight_sync/slice_bytes"] >= whole
            assert f["weight_sync/peak_extra_bytes"] < 3.2 * 60_000
    streamed = [checksums(s) for s in servers]
    versions = [s.get("/model_info")[1]["weight_version"] for s in servers]
    assert versions == [str(uploads[-1].meta.version)] * 2
    load(servers[0], saved)
    assert streamed[0] == streamed[1] == checksums(servers[0]) != before


@pytest.fixture(scope="module")
def stock(new: Path) -> Iterator[StockServer]:
    tensors = load_file(next(new.glob("*.safetensors")))
    with StockServer({n: tuple(t.shape) for n, t in tensors.items()}, tp=2) as server:
        yield server


@pytest.mark.parametrize("parallel", (dict(tp=2), dict(pp=2), dict(tp=1)), ids=str)
def test_ranks_of_a_server_take_their_own_slices(
    world: World, stock: StockServer, old: Path, new: Path, parallel: dict[str, Any]
) -> None:
    """Each reads from the rank beside it, which collects no more than that rank keeps."""
    keeps = [sum(p.nbytes for p in params.values()) for params in stock.ask("params")]
    uploads = [
        Upload(source, None, meta(addresses=(stock.address,), verify="off"))
        for source in (new, old)
    ]
    for figures in world.run(run_read_from_both, parallel, uploads):
        for f in figures:
            assert isinstance(f, dict), f
            assert max(keeps) <= f["weight_sync/slice_bytes"] <= 1.05 * max(keeps)
            assert (f["weight_sync/bytes"] == 0) == (parallel == dict(tp=1)), f
            assert f["weight_sync/bytes"] < 0.55 * sum(keeps)
    assert stock.version == str(uploads[-1].meta.version) and not stock.session
    assert stock.holds(load_file(next(old.glob("*.safetensors"))))


def test_messages_of_odd_sizes_are_read_where_they_were_written(world: World, models: Path) -> None:
    """A round's messages begin at multiples of 64 bytes; a row has 160 bytes here."""
    odd = [save_tiny(models / f"odd{n}", "qwen2", hidden_size=40, seed=n) for n in (0, 1)]
    first, second = (load_file(next(path.glob("*.safetensors"))) for path in odd)
    with StockServer({n: tuple(t.shape) for n, t in first.items()}, tp=2) as server:
        metas = [meta(addresses=(server.address,), verify="off") for _ in odd]
        uploads = [Upload(path, None, each) for path, each in zip(odd, metas, strict=True)]
        for figures in world.run(run_read_from_both, dict(tp=2), uploads):
            assert all(isinstance(f, dict) for f in figures), figures
        assert server.holds(second)


def test_a_refusal_is_quoted_on_every_rank_and_the_next_upload_works(
    world: World, servers: list[Server], new: Path, tmp_path: Path
) -> None:
    wide = save_tiny(tmp_path / "wide", "qwen2", layers=2, hidden_size=96)
    for (error,) in world.run(run_uploads, dict(tp=2), [Upload(wide, None, meta(*servers))]):
        assert "weight: shape [" in error and all(a in error for a in addresses(servers)), error
    for figures in world.run(run_uploads, dict(tp=2), [Upload(new, None, meta(*servers))]):
        assert isinstance(figures[0], dict), figures[0]


def test_a_server_that_was_refused_is_asked_again(
    world: World, stock: StockServer, new: Path
) -> None:
    """It is started again, at its address, with what it lacked."""
    uploads = [
        Upload(
            new, None, meta(addresses=(stock.address,), verify="off"),
            (stock.address, "/restart", {"loader": loader}),
        )
        for loader in ((), stock.loader)
    ]  # fmt: skip
    for error, figures in world.run(run_uploads, dict(tp=1), uploads):
        assert error.startswith("weight_sync.type=colocated (") and stock.address in error
        assert "was not started with --custom-weight-loader" in error
        assert isinstance(figures, dict), figures
    assert stock.version == str(uploads[-1].meta.version)


def run_and_kill(upload: Upload, good: Upload, pid: int) -> Any:
    """Kills the server when the third round is to be taken."""
    pack, packed = colocated.handles.pack, itertools.count()

    def kill_first(*args: Any, **kw: Any) -> str:
        if next(packed) == 4:  # two servers read each
            os.kill(pid, signal.SIGKILL)
        return pack(*args, **kw)

    with mock.patch.object(colocated.handles, "pack", kill_first):
        return run_uploads(dict(tp=2), [upload, good])


@pytest.mark.full
def test_a_server_lost_in_the_middle_is_left_out_of_the_next(
    world: World, servers: list[Server], old: Path, new: Path, tmp_path: Path
) -> None:
    with embedded_server(old, log=tmp_path / "log") as victim:
        bad, good = meta(victim, servers[0]), meta(*servers)
        uploads = Upload(new, None, bad), Upload(new, None, good)
        for error, figures in world.run(run_and_kill, *uploads, victim.process.pid):
            assert f"127.0.0.1:{victim.port}" in error and "round " in error
            assert figures["weight_sync/verified"] == 1


def test_a_server_on_another_machine_is_refused(world: World, new: Path) -> None:
    """The refusal comes before any request to the server."""
    far = Upload(new, None, meta(bucket_bytes=60_000))
    object.__setattr__(far.meta, "addresses", ("192.0.2.7:30000",))
    for (error,) in world.run(run_uploads, dict(tp=2), [far]):
        assert "server 192.0.2.7:30000 is on no machine of the trainers" in error
        assert error.count("weight_sync.type=colocated") == 1, error
