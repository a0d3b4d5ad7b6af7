"""Weights go by slices from sharded ranks to made-up stock servers (see tests/stock_server.py).

What is right: every rank of a server holds its rows of what the trainers hold, bit for bit.
"""

from __future__ import annotations

import io
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl.api.records import WeightUpdateMeta
from megarl.utils.http import call_json
from megarl.weight_sync import slices
from megarl.weight_sync.proof import write_proof
from megarl.weight_sync.transports import WeightSender, WeightSource
from megarl.wire import block_fp8
from tests.dist.uploads import Upload, flipped, run_uploads, sharded
from tests.dist.world import World
from tests.stock_server import StockServer
from tests.tiny import is_linear, nest, save_tiny

pytestmark = pytest.mark.system  # servers, launchers and time-outs that are waited for

SOME = 100_000  # bytes of two rounds: several of them
TP2: dict[str, Any] = dict(tp=2)


@dataclass(frozen=True)
class Bench:
    """two, one: servers of tp 2 and tp 1. paths, tensors: two models of one shape."""

    two: StockServer
    one: StockServer
    paths: tuple[Path, Path]
    tensors: tuple[dict[str, torch.Tensor], ...]

    def meta(self, version: int, *servers: StockServer, **kw: Any) -> WeightUpdateMeta:
        given: dict[str, Any] = dict(
            type="distributed", bucket_bytes=SOME, timeout=60.0, server_timeout=5.0, sharded="on",
            addresses=tuple(s.address for s in servers or (self.two, self.one)),
        )  # fmt: skip
        return WeightUpdateMeta(version=version, **(given | kw))

    def check(self, model: int, version: int) -> None:
        for server in (self.two, self.one):
            assert server.version == str(version) and not server.session
            assert server.holds(self.tensors[model])


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    home = tmp_path_factory.mktemp("slices")
    paths = tuple(save_tiny(home / f"m{seed}", "qwen3_moe", layers=2, seed=seed) for seed in (0, 1))
    tensors = tuple(load_file(next(p.glob("*.safetensors"))) for p in paths)
    spec = {n: tuple(t.shape) for n, t in tensors[0].items()}
    with StockServer(spec, tp=2, whole=True) as two, StockServer(spec, whole=True) as one:
        yield Bench(two, one, paths, tensors)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def fp8(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Path, dict[str, torch.Tensor], StockServer]]:
    """A model with several blocks in a matrix, what it is in FP8, and a server for that."""
    sizes = dict(hidden_size=160, intermediate_size=200, moe_intermediate_size=150)
    home = tmp_path_factory.mktemp("fp8")
    path = save_tiny(home / "m", "qwen3_moe", layers=2, seed=0, **sizes)
    tensors: dict[str, torch.Tensor] = {}
    for name, t in load_file(next(path.glob("*.safetensors"))).items():
        tensors[name] = t
        if is_linear(name):
            tensors[name], tensors[name + block_fp8.SUFFIX] = block_fp8.quantize(t)
    with StockServer({n: tuple(t.shape) for n, t in tensors.items()}, tp=2) as server:
        yield path, tensors, server


LAYOUTS: dict[str, dict[str, Any]] = {"tp2": TP2, "pp2": dict(pp=2), "ep2": dict(ep=2)}


def test_a_language_model_goes_into_the_whole_around_it(world: World, tmp_path: Path) -> None:
    """A server's vision tower, which no trainer has, stays as it is."""
    path = nest(save_tiny(tmp_path, "kimi_k2", layers=2), "KimiK25ForConditionalGeneration")
    tensors = load_file(path / "model.safetensors")
    own = {n: t for n, t in tensors.items() if n.startswith("language_model.")}
    with StockServer({n: tuple(t.shape) for n, t in tensors.items()}) as server:
        meta = WeightUpdateMeta(
            type="distributed", version=1, addresses=(server.address,), timeout=60.0, sharded="on"
        )
        for (figures,) in world.run(run_uploads, TP2, [Upload(path, None, meta)]):
            assert isinstance(figures, dict) and figures["weight_sync/sharded"] == 1, figures
        assert server.holds(own)


@pytest.mark.parametrize("way", LAYOUTS)
def test_every_rank_gets_its_slice_and_no_more(bench: Bench, world: World, way: str) -> None:
    """Three syncs through one plan and one group."""
    sources = (*bench.paths, bench.paths[0])
    uploads = [Upload(path, None, bench.meta(i + 1)) for i, path in enumerate(sources)]
    before = len(bench.two.paths)
    tensors = bench.tensors[0].values()
    whole = sum(t.nbytes for t in tensors)
    on_both = sum(t.nbytes for t in tensors if t.dim() == 1 or len(t) % 2)
    for figures in world.run(run_uploads, LAYOUTS[way], uploads):
        for f in figures:
            assert isinstance(f, dict), f
            assert f["weight_sync/sharded"] == 1 and f["weight_sync/senders"] == 2
            assert f["weight_sync/slice_bytes"] == whole  # the server of tp 1
            assert f["weight_sync/bytes"] == 2 * whole + on_both
            assert f["weight_sync/server_extra_bytes"] <= SOME
    bench.check(0, 3)
    asked = bench.two.paths[before:].count("/update_weights_from_tensor")
    assert asked == 2 + 3 * 2 + 1, "recorded and joined once; received and accepted; left"


def test_changes_alone_are_sent_to_servers_that_hold_the_rest(
    bench: Bench, world: World, tmp_path: Path
) -> None:
    """Everything; again, as one has loaded something else; other weights; a part; nothing."""
    few = flipped(bench.paths[0], tmp_path / "few", 0.01)
    sources = (bench.paths[1], bench.paths[1], bench.paths[0], few, few)
    load = (bench.two.address, "/update_weights_from_disk", {})
    uploads = [
        Upload(path, None, bench.meta(i + 31, delta=True), load if i == 1 else None)
        for i, path in enumerate(sources)
    ]
    whole = 0.0
    for figures in world.run(run_uploads, TP2, uploads):
        assert all(isinstance(f, dict) for f in figures), figures
        nbytes = [f["weight_sync/bytes"] for f in figures]
        heads, whole = nbytes[4], figures[2]["weight_sync/bytes_whole"]
        assert nbytes[:3] == [whole + heads] * 3 and heads < 0.02 * whole
        assert 0.01 * whole < nbytes[3] < 0.06 * whole
        changed = [f.get("weight_sync/changed") for f in figures]
        assert changed[:2] == [None, None] and changed[4] == 0
        assert changed[2] > 0.8 and changed[3] == pytest.approx(0.01, rel=0.2)
        assert all(f["weight_sync/server_extra_bytes"] <= SOME for f in figures)
    for server in (bench.two, bench.one):
        assert server.holds(load_file(next(few.glob("*.safetensors"))))


class Tripwire(dict[str, torch.Tensor]):
    """Parameters that call `trip` once, when the `at`-th of them is read for a message."""

    def __init__(self, params: dict[str, torch.Tensor], at: int, trip: Callable[[], None]) -> None:
        super().__init__(params)
        self.left, self._trip = at, trip

    def __getitem__(self, name: str) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            self._trip()
        return super().__getitem__(name)


@dataclass
class Outcome:
    error: str
    seconds: float
    recovered: dict[str, float]


def run_failing(
    source: Path,
    bad: WeightUpdateMeta,
    good: WeightUpdateMeta,
    rank: int,
    kill: int | None,
    before: WeightUpdateMeta | None = None,
) -> Outcome:
    """Uploads `before`. In the middle of `bad`, `rank` has an error, or kills a process. Then
    uploads `good`."""

    def trip() -> None:
        if kill is None:
            raise ValueError("a trainer tripped")
        os.kill(kill, 9)

    table, layout, mine, params = sharded(source, TP2)
    params = Tripwire(params, 0, trip)
    sender = WeightSender(WeightSource(table, layout, mine, params))
    if before is not None:
        sender.upload(before)
    params.left = 20 if mine == rank else 0
    began = time.monotonic()
    try:
        sender.upload(bad)
        error = ""
    except RuntimeError as e:
        error = f"{type(e).__name__}: {e}"
    took = time.monotonic() - began
    try:
        return Outcome(error, took, sender.upload(good))
    finally:
        sender.close()


@pytest.mark.parametrize("rank", (0, 1), ids=("the one that speaks", "another"))
def test_a_trainer_that_fails_in_the_middle(bench: Bench, world: World, rank: int) -> None:
    world.run(run_uploads, TP2, [Upload(bench.paths[0], None, bench.meta(1))])
    before, bad, good = (bench.meta(n, delta=rank == 1) for n in (2, 3, 4))
    for outcome in world.run(run_failing, bench.paths[1], bad, good, rank, None, before):
        assert f"rank {rank}" in outcome.error and "a trainer tripped" in outcome.error
        assert outcome.seconds < 20
        assert "weight_sync/changed" not in outcome.recovered, "everything was sent"
    bench.check(1, 4)


def run_one_that_cannot_plan(
    source: Path, bad: WeightUpdateMeta, good: WeightUpdateMeta, error: Exception
) -> Outcome:
    """Uploads `bad`, which rank 1 alone cannot plan, and then `good`."""
    table, layout, rank, params = sharded(source, TP2)
    sender = WeightSender(WeightSource(table, layout, rank, params))
    began, text = time.monotonic(), ""
    try:
        failing = patch.object(slices, "plan_transfer", side_effect=error)
        with failing if rank == 1 else nullcontext(), pytest.raises(ValueError) as e:
            sender.upload(bad)
        text, took = str(e.value), time.monotonic() - began
        return Outcome(text, took, sender.upload(good))
    finally:
        sender.close()


def run_one_that_cannot(
    call: str, why: str, source: Path, bad: WeightUpdateMeta, good: WeightUpdateMeta
) -> Outcome:
    """Uploads `bad`, in which the `call` fails on rank 1 alone, and then `good`."""
    table, layout, rank, params = sharded(source, TP2)
    sender = WeightSender(WeightSource(table, layout, rank, params))
    began = time.monotonic()
    try:
        failing = patch(call, side_effect=ValueError(why))
        with (
            failing if rank == 1 else nullcontext(),
            pytest.raises((ValueError, RuntimeError)) as e,
        ):
            sender.upload(bad)
        took = time.monotonic() - began
        return Outcome(str(e.value), took, sender.upload(good))
    finally:
        sender.close()


@pytest.mark.parametrize("sharded", ("on", "off"))
def test_a_rank_that_cannot_hash_is_an_error_on_all(
    bench: Bench, world: World, sharded: str
) -> None:
    bad, good = (bench.meta(n, sharded=sharded, verify="full") for n in (2, 3))
    call = "megarl.weight_sync.verify.tensor_hash"
    for outcome in world.run(run_one_that_cannot, call, "no hash", bench.paths[0], bad, good):
        assert "no hash" in outcome.error and outcome.seconds < 20
        assert outcome.recovered["weight_sync/verified"] == 1
    bench.check(0, 3)


@pytest.mark.parametrize("error", (ValueError("no way"), RuntimeError("no way")), ids=repr)
def test_a_plan_that_fails_on_one_rank_is_an_error_on_all(
    bench: Bench, world: World, error: Exception
) -> None:
    """No rank goes on with whole tensors, for which it would wait for the others."""
    bad, good = bench.meta(2, sharded="auto"), bench.meta(3)
    first, second = world.run(run_one_that_cannot_plan, bench.paths[0], bad, good, error)
    assert "rank 1" in first.error and "no way" in first.error and "no way" in second.error
    assert max(first.seconds, second.seconds) < 20
    bench.check(0, 3)


@pytest.mark.system
def test_a_server_that_dies_in_the_middle(bench: Bench, world: World) -> None:
    """The others keep their version; without it, and then with it started again, all is right."""
    with StockServer(bench.two.spec, tp=2) as victim:
        three = (bench.two, bench.one, victim)
        bad, good = bench.meta(11, *three), bench.meta(12)
        kill = victim.pids[1]
        for outcome in world.run(run_failing, bench.paths[0], bad, good, 1, kill):
            assert outcome.error.startswith("ServersLost") and victim.address in outcome.error
            assert outcome.seconds < 30
        bench.check(0, 12)
        victim.restart()
        again = Upload(bench.paths[1], None, bench.meta(13, *three))
        for (figures,) in world.run(run_uploads, TP2, [again]):
            assert isinstance(figures, dict), figures
        bench.check(1, 13)
        assert victim.holds(bench.tensors[1]) and victim.version == "13"


def run_across_a_restart(sources: list[Path], metas: list[WeightUpdateMeta], url: str) -> list[Any]:
    """After the first upload a server of that address starts again."""
    table, layout, rank, params = sharded(sources[0], TP2)
    sender = WeightSender(WeightSource(table, layout, rank, params))
    found = []
    for number, (source, meta) in enumerate(zip(sources, metas)):
        if number == 1 and rank == 0:
            call_json("POST", url, "/restart", {}, timeout=60)
        for name, value in sharded(source, TP2)[3].items():
            params[name].copy_(value)
        found.append(sender.upload(meta))
    sender.close()
    return found


def test_a_server_that_starts_again_records_again(bench: Bench, world: World) -> None:
    metas = [bench.meta(n) for n in (21, 22, 23)]
    sources = [bench.paths[n] for n in (0, 1, 0)]
    recorded = bench.one.commands.count("record")
    for figures in world.run(run_across_a_restart, sources, metas, bench.two.address):
        assert [f["weight_sync/sharded"] for f in figures] == [1, 1, 1]
    bench.check(0, 23)
    assert bench.one.commands.count("record") == recorded + 2


@pytest.mark.parametrize("way", ("tp2", "pp2", "etp2"))
def test_fp8_is_what_quantising_the_whole_gives(
    fp8: tuple[Path, dict[str, torch.Tensor], StockServer], world: World, way: str
) -> None:
    """Ranks hold 64 rows of q and 100 of gate, so that blocks of 128 lie on both."""
    path, tensors, server = fp8
    layout = dict(tp=1, etp=2) if way == "etp2" else LAYOUTS[way]
    meta = WeightUpdateMeta(
        type="distributed", version=1 + int(server.version.replace("default", "0")),
        addresses=(server.address,), bucket_bytes=SOME, timeout=60.0, sharded="on",
        quantization="fp8_block",
    )  # fmt: skip
    again = replace(meta, version=meta.number + 1)
    uploads = [Upload(path, None, meta), Upload(path, None, again)]
    for figures in world.run(run_uploads, layout, uploads):
        assert all(isinstance(f, dict) for f in figures), figures
        nbytes = sum(t.nbytes * (2 if len(t) % 2 or t.dim() == 1 else 1) for t in tensors.values())
        assert figures[1]["weight_sync/bytes"] == nbytes
    assert server.holds({n: t.float() for n, t in tensors.items()})


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "no loader": (dict(loader=()), "was not started with --custom-weight-loader"),
    "experts that move": (dict(info={"enable_eplb": True}), "enable_eplb"),
    "a draft model": (dict(info={"speculative_algorithm": "EAGLE"}), "draft model"),
    "a loader that computes": (dict(how="computes"), "computes instead of copying"),
    "a loader that fails": (dict(how="fails"), "looks at the numbers"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_go_by_slices_is_said_or_goes_whole(
    bench: Bench, world: World, case: str
) -> None:
    """The made-up server refuses whole tensors: by that error one sees that they were tried."""
    given, words = REFUSALS[case]
    with StockServer(bench.one.spec, **given) as server:
        on, auto = (bench.meta(1, server, sharded=way, timeout=20.0) for way in ("on", "auto"))
        uploads = [Upload(bench.paths[0], None, meta) for meta in (on, auto)]
        for first, second in world.run(run_uploads, TP2, uploads):
            assert (
                first.startswith("weight_sync.options.sharded=true: ") and server.address in first
            )
            assert words in first, first
            assert "/init_weights_update_group" in second
        assert server.version == "default" and not server.session


def test_a_failure_to_connect_is_tried_again_at_later_syncs(bench: Bench, world: World) -> None:
    """At the next one, however often it fails in a row."""
    for busy, sharded_at in ((1, [0, 1, 1, 1]), (2, [0, 0, 1, 1])):
        metas = [bench.meta(n, sharded="auto") for n in range(1, 5)]
        bench.two.busy = busy
        uploads = [Upload(bench.paths[n % 2], None, meta) for n, meta in enumerate(metas)]
        for figures in world.run(run_uploads, TP2, uploads):
            assert [f["weight_sync/sharded"] for f in figures] == sharded_at, figures
        assert bench.two.busy == 0
        bench.check(1, 4)


def test_whole_tensors_have_time_left_where_slices_take_too_long(
    bench: Bench, world: World
) -> None:
    """A server that stands still while it records."""
    with StockServer(bench.one.spec, whole=True, slow=30.0) as server:
        meta = bench.meta(1, server, sharded="auto", timeout=30.0)
        for (figures,) in world.run(run_uploads, TP2, [Upload(bench.paths[0], None, meta)]):
            assert figures["weight_sync/sharded"] == 0, figures
        assert server.version == "1" and server.holds(bench.tensors[0])


def test_slices_are_tried_again_after_whole_tensors_have_failed(bench: Bench, world: World) -> None:
    """The servers may be others by then: here it starts again with what receives slices."""
    with StockServer(bench.one.spec, loader=()) as server:  # nor does it take whole tensors
        first, second = (bench.meta(n, server, sharded="auto") for n in (1, 2))
        restart = server.address, "/restart", {"loader": bench.one.loader}
        uploads = [
            Upload(bench.paths[0], None, first),
            Upload(bench.paths[0], None, second, restart),
        ]
        for error, figures in world.run(run_uploads, TP2, uploads):
            assert "/init_weights_update_group" in error
            assert figures["weight_sync/sharded"] == 1, figures
        assert server.version == "2" and server.holds(bench.tensors[0])


@pytest.mark.parametrize("how", ("dies before its byte", "never gets its byte"))
def test_a_rank_that_is_gone_is_met_as_the_group_comes_together(
    bench: Bench, world: World, how: str
) -> None:
    """Within the time, and servers keep their version; a rank that only waits goes on then."""
    world.run(run_uploads, TP2, [Upload(bench.paths[0], None, bench.meta(1))])
    with StockServer(bench.one.spec, tp=2, whole=True, how=how) as victim:
        servers = bench.two, bench.one, victim
        victim.ask("params")  # when it has started
        bad = bench.meta(2, *servers, timeout=20.0)
        whole = bench.meta(3, *servers, sharded="off")
        uploads = [Upload(bench.paths[1], None, meta) for meta in (bad, whole)]
        began = time.monotonic()
        for error, figures in world.run(run_uploads, TP2, uploads):
            assert "connecting to 3 servers" in error or "join" in error, error
            assert victim.address in error
            assert bench.two.address not in error and bench.one.address not in error, error
            assert isinstance(figures, dict) == (how == "never gets its byte"), figures
        assert time.monotonic() - began < bad.timeout + 28
        assert victim.version == ("3" if how == "never gets its byte" else "default")
    if how == "dies before its byte":
        bench.check(0, 1)
    again = Upload(bench.paths[1], None, bench.meta(4))
    for (figures,) in world.run(run_uploads, TP2, [again]):
        assert figures["weight_sync/sharded"] == 1, figures
    bench.check(1, 4)


def test_a_trainer_that_sends_no_byte_is_an_error_on_all(bench: Bench, world: World) -> None:
    world.run(run_uploads, TP2, [Upload(bench.paths[0], None, bench.meta(1))])
    before = bench.one.commands.count("receive")
    bad, good = bench.meta(2), bench.meta(3)
    call = "torch.distributed.batch_isend_irecv"
    for outcome in world.run(run_one_that_cannot, call, "no byte", bench.paths[1], bad, good):
        assert "rank 1" in outcome.error and "no byte" in outcome.error
        assert outcome.seconds < 20
    bench.check(1, 3)
    assert bench.one.commands.count("receive") == before + 1, "the good one"


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "slices from tp2": ("on", TP2),
    "slices from replicas": ("on", {}),
    "whole tensors from pp2": ("off", dict(pp=2)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_full_comparison_names_tensor_server_and_rank(
    bench: Bench, world: World, way: str
) -> None:
    sharded, parallel = WAYS[way]
    metas = [bench.meta(n, sharded=sharded, verify="full") for n in (1, 2, 3)]
    uploads = [Upload(bench.paths[i], None, meta) for i, meta in zip((0, 1, 0), metas)]
    for figures in world.run(run_uploads, parallel, uploads[:2]):
        for f in figures:
            assert isinstance(f, dict) and f["weight_sync/verified"] == 1, f
            assert f["weight_sync/sharded"] == (sharded == "on") and f["weight_sync/verify_s"] > 0
    bench.check(1, 2)
    wrong = "model.layers.1.self_attn.o_proj.weight"
    try:
        bench.two.corrupts = 1, wrong
        for (error,) in world.run(run_uploads, parallel, uploads[2:]):
            assert isinstance(error, str) and f"{bench.two.address}, rank 1: {wrong} [" in error
            assert error.count(", rank ") == 1 and bench.one.address not in error, error
    finally:
        bench.two.corrupts = None
    assert not bench.two.session and not bench.one.session


def run_heard(parallel: dict[str, Any], *uploads: Upload) -> tuple[Any, str]:
    """The figures of the last upload or its error, and what this rank logged meanwhile."""
    heard = io.StringIO()
    handler, log = logging.StreamHandler(heard), logging.getLogger("megarl.weight_sync")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        found = run_uploads(parallel, list(uploads))[-1]
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return found, heard.getvalue()


KEPT: list[WeightSender] = []  # of a rank, between two calls


def run_and_keep(source: Path, meta: WeightUpdateMeta) -> None:
    table, layout, rank, params = sharded(source, TP2)
    KEPT.append(WeightSender(WeightSource(table, layout, rank, params)))
    KEPT[-1].upload(meta)


def run_close() -> str:
    """Closes the sender that `run_and_keep` made. Returns the warnings of this rank."""
    heard = io.StringIO()
    handler, log = logging.StreamHandler(heard), logging.getLogger("megarl.weight_sync")
    handler.setLevel(logging.WARNING)
    log.addHandler(handler)
    try:
        KEPT.pop().close()
    finally:
        log.removeHandler(handler)
    return heard.getvalue()


@pytest.mark.parametrize("other", (False, True), ids=("all ended", "one goes on"))
def test_servers_that_ended_before_the_sender_are_no_warning(
    bench: Bench, world: World, other: bool
) -> None:
    with StockServer(bench.one.spec, tp=2) as victim:
        meta = bench.meta(21, victim, *([bench.two] if other else []))
        world.run(run_and_keep, bench.paths[0], meta)
    heard = world.run(run_close)
    assert any(victim.address in text for text in heard) == other, heard


def test_a_run_that_sends_whole_tensors_instead_says_so_at_every_sync(
    bench: Bench, world: World
) -> None:
    """A server without the receiver, and one that is busy at first."""
    for given, said_at in (({"loader": ()}, "12"), ({"busy": 1}, "1")):
        with StockServer(bench.one.spec, tp=2, whole=True, **given) as server:  # type: ignore[arg-type]
            metas = [bench.meta(n, server, sharded="auto") for n in (1, 2)]
            uploads = [Upload(bench.paths[0], None, meta) for meta in metas]
            (figures, said), (_, other) = world.run(run_heard, TP2, *uploads)
        assert figures["weight_sync/sharded"] == ("2" not in said_at), figures
        for n in "12":
            line = f"weights of version {n} go to 1 server(s) as whole tensors: "
            assert said.count(line) == (n in said_at) and line not in other, said


def run_over_nccl(cache: Path, proved: bool, upload: Upload) -> tuple[Any, str]:
    """As `run_heard`, on machines of which one or all have passed."""
    with patch.dict(os.environ, XDG_CACHE_HOME=str(cache / str(dist.get_rank()))):
        if proved or dist.get_rank() == 0:
            write_proof(torch.device("cpu"), "0")
        return run_heard(TP2, upload)


@pytest.mark.parametrize("proved", (False, True))
def test_auto_goes_over_nccl_where_that_has_passed_on_all_machines(
    bench: Bench, world: World, tmp_path: Path, proved: bool
) -> None:
    """Without a GPU nothing gets there: by what is tried, and by the words, one sees the choice."""
    with StockServer(bench.one.spec) as server:
        meta = bench.meta(1, server, sharded="auto", comm_backend="nccl")
        upload = Upload(bench.paths[0], None, meta)
        (error, said), _ = world.run(run_over_nccl, tmp_path, proved, upload)
        assert isinstance(error, str) and "as whole tensors" in said
        assert ("record" in server.commands) == proved
        assert ("slices over NCCL have not passed" in said) != proved
        assert ("connecting to 1 servers over nccl" in said) == proved, said


def test_what_fingerprints_do_not_prove_is_named(bench: Bench, world: World) -> None:
    """A server that computes some parameters and holds all in another dtype than is sent."""
    with StockServer(
        bench.one.spec, tp=2, whole=True, how="doubles q_norm", dtype=torch.bfloat16
    ) as server:
        meta = bench.meta(1, server, sharded="auto", verify="full")
        upload = Upload(bench.paths[0], None, meta)
        (figures, said), _ = world.run(run_heard, TP2, upload)
        name = "model.layers.0.self_attn.q_norm.weight"
        assert figures["weight_sync/sharded"] == figures["weight_sync/verified"] == 0, figures
        count = len(bench.one.spec) - 2
        assert f"fingerprints of {count} tensors agree with all ranks of server" in said
        assert f"not proved: {name} (" in said and "is computed from it" in said, said
        assert "not verified" not in said
        server.corrupts = 0, "model.norm.weight"
        (error, _), _ = world.run(run_heard, TP2, upload)
        assert f"server {server.address}, rank 0: model.norm.weight [" in error
        server.loader = ()
        (figures, said), _ = world.run(run_heard, TP2, upload)
        assert figures["weight_sync/verified"] == 0
        reason = "it was not started with --custom-weight-loader"
        assert f"weights on {server.address} not verified: {reason}" in said
