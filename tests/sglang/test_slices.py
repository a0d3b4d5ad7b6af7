"""Weights go by slices from sharded ranks to real servers.

What is right: a server's own checksums after a sync equal those it shows after it has loaded, from
disk, what `save` wrote.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.api.records import SaveLoadMeta, WeightUpdateMeta
from tests.dist.engine_jobs import SP, batch, loss_fn, make_engine, weight_fn
from tests.dist.uploads import Upload, run_uploads
from tests.dist.world import World
from tests.sglang.conftest import Pair
from tests.sglang.servers import SAID, RealServer, hf_logprobs, launch, save_model, serving

SOME = 100_000  # bytes of two rounds: several of them
PLUGINS = Path(__file__).parent / "plugins"
_versions = itertools.count(1000)


def check(
    world: World,
    servers: Sequence[RealServer],
    models: tuple[Path, Path],
    saved: Path,
    parallel: dict[str, Any],
) -> dict[str, float]:
    """Sends the second model, the first, the second; returns the last figures."""
    uploads = [
        Upload(models[i], saved if last else None, meta_for(servers))
        for i, last in ((1, False), (0, False), (1, True))
    ]
    found: dict[str, float] = {}
    for figures in world.run(run_uploads, parallel, uploads):
        assert all(isinstance(f, dict) and f["weight_sync/sharded"] for f in figures), figures
        found = figures[-1]
    check_held(servers, saved, uploads[-1].meta.version)
    return found


def meta_for(servers: Sequence[RealServer]) -> WeightUpdateMeta:
    return WeightUpdateMeta(
        type="distributed",
        version=next(_versions),
        addresses=tuple(s.address for s in servers),
        bucket_bytes=SOME,
        timeout=120.0,
        sharded="on",
    )


def check_held(servers: Sequence[RealServer], saved: Path, version: int | None) -> None:
    """They hold, and answer by, what a load of `saved` gives them."""
    assert [s.version for s in servers] == [str(version)] * len(servers)
    held, said = [s.checksums() for s in servers], [s.said() for s in servers]
    for s in servers:
        s.load(saved)
    assert [s.checksums() for s in servers] == held
    assert [s.said() for s in servers] == said


@pytest.mark.parametrize("parallel", (dict(tp=2), dict(pp=2)), ids=("tp2", "pp2"))
def test_slices_are_what_a_load_from_disk_makes_of_them(
    pair: Pair, world: World, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    """To servers of tp 1 and tp 2 at once: both ranks of two keep all norms."""
    pair.load(pair.m0)
    figures = check(world, pair.both, (pair.m0, pair.m1), tmp_path / "saved", parallel)
    tensors = load_file(next(pair.m1.glob("*.safetensors")))
    whole = sum(t.nbytes for t in tensors.values())
    norms = sum(t.nbytes for t in tensors.values() if t.dim() == 1)
    assert figures["weight_sync/slice_bytes"] == whole  # of tp 1
    assert figures["weight_sync/bytes"] == 2 * whole + norms
    assert figures["weight_sync/senders"] == 2
    assert figures["weight_sync/server_extra_bytes"] <= SOME


def share_of_rank_0(model: Path) -> float:
    """Half of everything and all norms, and more of what SGLang pads: of 130 tokens 96 (a
    vocabulary is a multiple of 64), of an intermediate size of 96 on a CPU 64 (of 32 a rank)."""
    share = 0.0
    for name, tensor in load_file(next(model.glob("*.safetensors"))).items():
        part = 1.0 if tensor.dim() == 1 else 0.5
        part = 96 / 130 if len(tensor) == 130 else part
        share += tensor.nbytes * (64 / 96 if ".mlp." in name else part)
    return share


def run_engine(
    model: Path, parallel: dict[str, Any], saved: Path, metas: list[WeightUpdateMeta]
) -> list[dict[str, float]]:
    """An engine's figures of a sync after each of its steps. It saves what it has in the end."""
    engine = make_engine(str(model), parallel)
    try:
        found = []
        for meta in metas:
            engine.train_batch(batch(), loss_fn, weight_fn, outputs=("logprobs", "entropy"))
            found.append(engine.upload_weights(meta))
        engine.save(SaveLoadMeta(path=str(saved)))
        return found
    finally:
        engine.destroy()


def check_engine(
    world: World, server: RealServer, model: Path, saved: Path, parallel: dict[str, Any]
) -> dict[str, float]:
    """Trains and sends twice; returns the last figures."""
    metas = [meta_for([server]) for _ in range(2)]
    server.load(model)
    before = server.checksums()
    for found in world.run(run_engine, model, parallel, saved, metas):
        assert all(f["weight_sync/sharded"] for f in found), found
        figures: dict[str, float] = found[-1]
    assert server.checksums() != before
    check_held([server], saved, metas[-1].version)
    tokens, logprobs = zip(*server.said(), strict=True)
    theirs = hf_logprobs(saved, SAID, list(tokens))
    torch.testing.assert_close(torch.tensor(logprobs), theirs, atol=2e-5, rtol=0)
    return figures


def test_an_engine_sends_a_rank_of_two_its_share(pair: Pair, world: World, tmp_path: Path) -> None:
    """Of data-parallel ranks, which take turns to send, after steps of the optimizer they share."""
    figures = check_engine(world, pair.two, pair.m0, tmp_path / "saved", {})
    assert figures["weight_sync/slice_bytes"] == share_of_rank_0(pair.m0)
    assert figures["weight_sync/senders"] == 2


def test_auto_takes_slices_and_off_does_not(pair: Pair, world: World) -> None:
    """By default, as in a run; then whole tensors through another group; then slices again."""
    pair.load(pair.m0)
    uploads = [
        Upload(
            pair.m1,
            None,
            WeightUpdateMeta(
                type="distributed",
                version=next(_versions),
                addresses=pair.addresses,
                timeout=120.0,
                flush_cache=False,
                verify="full",
                **given,
            ),
        )
        for given in ({}, dict(sharded="off"), {})
    ]
    for figures in world.run(run_uploads, dict(tp=2), uploads):
        assert [f["weight_sync/sharded"] for f in figures] == [1, 0, 1], figures
    held = [s.checksums() for s in pair.both]
    pair.load(pair.m1)
    assert [s.checksums() for s in pair.both] == held


FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, dict(tp=2)),
    "qwen2": (dict(tie=True), dict(pp=2)),
    "glm4": ({}, dict(tp=2)),
    "mixtral": ({}, dict(tp=1, etp=2)),
    "qwen3_moe": (dict(mlp_only_layers=[], norm_topk_prob=True), dict(ep=2)),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", FAMILIES)
def test_families(world: World, tmp_path: Path, kind: str) -> None:
    over, parallel = FAMILIES[kind]
    models = [
        save_model(tmp_path / str(seed), kind, seed, vocab_size=1000, **over) for seed in (0, 1)
    ]
    server = launch(models[0], tmp_path / "log", tp=2)
    with serving(server):
        check(world, [server], (models[0], models[1]), tmp_path / "saved", parallel)


# sizes without padding: a rank of two keeps half of each tensor that it does not keep whole
EVEN: dict[str, Any] = dict(vocab_size=256, intermediate_size=128)
MOE: dict[str, Any] = dict(moe_intermediate_size=64, mlp_only_layers=[], norm_topk_prob=True)
ENGINES: dict[str, tuple[str, dict[str, Any], list[str], list[tuple[int, dict[str, Any]]]]] = {
    "qwen3": ("qwen3", {}, [], [(2, {}), (4, dict(tp=2, pp=2))]),
    "qwen3_moe": ("qwen3_moe", MOE, [], [(2, dict(ep=2)), (4, dict(**SP, ep=2))]),
    "mixtral": ("mixtral", {}, [], [(2, dict(etp=2)), (4, dict(**SP, etp=2, pp=2))]),
    "experts dealt out": (
        "qwen3_moe", MOE, ["--ep-size", "2"], [(2, dict(ep=2)), (4, dict(**SP, pp=2))],
    ),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("case", ENGINES)
def test_engines_of_every_layout(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """To a server of two ranks: half of the model to each, and norms and routers to both. Where
    experts are dealt out, half is whole experts."""
    kind, over, flags, layouts = ENGINES[case]
    if flags:
        path = [str(PLUGINS), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    model = save_model(tmp_path / "model", kind, 0, **(EVEN | over))
    tensors = load_file(next(model.glob("*.safetensors")))
    on_both = sum(t.nbytes for n, t in tensors.items() if t.dim() == 1 or n.endswith("gate.weight"))
    share = (sum(t.nbytes for t in tensors.values()) + on_both) / 2
    server = launch(model, tmp_path / "log", tp=2, flags=flags)
    with serving(server), World(4, timeout=240) as four:
        for number, (ranks, parallel) in enumerate(layouts):
            saved = tmp_path / f"saved{number}"
            figures = check_engine(four if ranks == 4 else world, server, model, saved, parallel)
            assert figures["weight_sync/slice_bytes"] == share
            assert figures["weight_sync/bytes"] == 2 * share
            assert figures["weight_sync/senders"] == ranks
