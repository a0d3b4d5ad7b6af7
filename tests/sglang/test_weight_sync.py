"""Weights from sharded ranks reach real servers, tp 1 and tp 2 at once.

What is right: a server's own checksums after a sync equal those it shows after it has loaded, from
disk, what `save` wrote.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.api.records import ModelResponse, WeightUpdateMeta
from megarl.config.rollout import RolloutConfig
from megarl.rollout.client import RemoteSGLangEngine
from megarl.rollout.episode_context import EpisodeContext, current_episode
from tests.dist.uploads import Upload, run_uploads
from tests.dist.world import World
from tests.sglang.conftest import Pair
from tests.sglang.servers import hf_greedy, hf_logprobs, save_model
from tests.sglang.test_generation import LONG, PROMPT, client_of, interrupted, request

TP2, DP2 = dict(tp=2), dict(tp=1)
SOME = 100_000  # bytes of a bucket: several of them
PREFIX = [2, *range(3, 100), *range(3, 100)]
_versions = itertools.count(1)


def meta(pair: Pair, **kw: Any) -> WeightUpdateMeta:
    # whole tensors: test_slices.py has the rest
    given: dict[str, Any] = dict(
        type="distributed", bucket_bytes=SOME, timeout=120.0, sharded="off"
    )  # fmt: skip
    return WeightUpdateMeta(version=next(_versions), addresses=pair.addresses, **(given | kw))


def check_holds(pair: Pair, saved: Path, version: int) -> None:
    """Every server holds, by its own checksums, what it loads from `saved`."""
    assert [s.version for s in pair.both] == [str(version)] * 2
    held, said = [s.checksums() for s in pair.both], [s.said() for s in pair.both]
    pair.load(saved)
    assert [s.checksums() for s in pair.both] == held
    assert [s.said() for s in pair.both] == said


WAYS = {
    "tp2": (TP2, {}),
    "dp2": (DP2, {}),
    "tp2-disk": (TP2, dict(type="disk")),
    "tp2-colocated": (TP2, dict(type="colocated")),
    "dp2-colocated": (DP2, dict(type="colocated")),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_there_and_back_again(pair: Pair, world: World, tmp_path: Path, way: str) -> None:
    parallel, kw = WAYS[way]
    if kw.get("type") == "disk":
        kw = kw | {"path": str(tmp_path / "shared")}
    pair.load(pair.m0)
    before, checksums = [s.said() for s in pair.both], [s.checksums() for s in pair.both]
    new = Upload(pair.m1, tmp_path / "saved", meta(pair, **kw))
    for figures in world.run(run_uploads, parallel, [new]):
        assert isinstance(figures[0], dict), figures[0]
    assert all(s.said() != was for s, was in zip(pair.both, before))
    check_holds(pair, tmp_path / "saved", new.meta.version)
    back = Upload(pair.m0, None, meta(pair, **kw))
    world.run(run_uploads, parallel, [back])
    assert [s.said() for s in pair.both] == before
    assert [s.checksums() for s in pair.both] == checksums


def test_a_staged_wake_brings_weights_before_the_cache(
    pair: Pair, world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a run that takes turns: release all, resume weights, sync, resume the KV cache. On a
    CPU SGLang takes these calls and keeps its memory, of which the log tells once."""
    pair.load(pair.m0)
    config = RolloutConfig(addresses=[*pair.addresses], request_timeout=120, setup_timeout=60)
    client = RemoteSGLangEngine(config)
    client.initialize()
    try:
        memory = client.pauses.memory
        for source, saved in ((pair.m1, tmp_path / "m1"), (pair.m0, tmp_path / "m0")):
            client.pause()
            memory.release(("weights", "kv_cache"))
            memory.resume(("weights",))
            new = Upload(source, saved, meta(pair, type="colocated"))
            for figures in world.run(run_uploads, TP2, [new]):
                assert isinstance(figures[0], dict), figures[0]
            memory.resume(("weights", "kv_cache"))
            assert memory.usage()["kv_cache"] > 0
            client.resume()
            check_holds(pair, saved, new.meta.version)
    finally:
        client.destroy()
    assert caplog.text.count("keep(s) its memory while the trainers work") == 1


def test_one_sender_sends_again_and_again(pair: Pair, world: World) -> None:
    """Both ways through one group."""
    pair.load(pair.m1)
    checksums = [s.checksums() for s in pair.both]
    uploads = [
        Upload(source, None, meta(pair, verify=True))
        for source in (pair.m0, pair.m1, pair.m0, pair.m1)
    ]
    for figures in world.run(run_uploads, TP2, uploads):
        for f in figures:
            assert isinstance(f, dict), f
    assert [s.checksums() for s in pair.both] == checksums
    assert [s.version for s in pair.both] == [str(uploads[-1].meta.version)] * 2


def test_a_session_left_open_by_a_trainer_that_died(pair: Pair, world: World) -> None:
    for server in pair.both:
        server.ok("/begin_weight_update", {"selector": "all"})
    upload = Upload(pair.m1, None, meta(pair))
    for figures in world.run(run_uploads, TP2, [upload]):
        assert isinstance(figures[0], dict), figures[0]
    assert [s.version for s in pair.both] == [str(upload.meta.version)] * 2


def test_refused_weights_are_an_error_and_the_next_sync_works(
    pair: Pair, world: World, tmp_path: Path
) -> None:
    """A wider model reaches servers that have no room for it."""
    wide = save_model(tmp_path / "wide", "qwen3", 5, hidden_size=96)
    bad = Upload(wide, None, meta(pair))
    for (error,) in world.run(run_uploads, TP2, [bad]):
        assert isinstance(error, str) and any(a in error for a in pair.addresses), error
    good = Upload(pair.m1, tmp_path / "saved", meta(pair))
    for figures in world.run(run_uploads, TP2, [good]):
        assert isinstance(figures[0], dict), figures[0]
    check_holds(pair, tmp_path / "saved", good.meta.version)


async def answer(client: RemoteSGLangEngine, version: int) -> ModelResponse:
    """In an episode that began at `version`."""
    current_episode.set(EpisodeContext(began=version))
    return await client.agenerate(request(PREFIX, greedy=True))


@pytest.mark.parametrize(
    ("kv", "mode"),
    (
        ("flush", "abort"),
        ("flush", "retract"),
        ("keep", "abort"),
        ("keep", "in_place"),
    ),
)
def test_an_answer_says_which_weights_wrote_which_token(
    pair: Pair, world: World, kv: str, mode: str
) -> None:
    """A sync in the middle of an answer, and after a prefix was cached: every token has the version
    that wrote it. Where KV of older weights is read, and only there, logprobs differ from
    transformers' on the new weights; by how much is printed.
    """
    pair.load(pair.m0)
    old = next(_versions)
    for server in pair.both:
        server.ok("/update_weight_version", {"new_version": str(old)})
    upload = Upload(pair.m1, None, meta(pair, flush_cache=kv == "flush"))
    new = upload.meta.number
    client = client_of(pair.one, mode, kv)
    client.initialize()
    client.set_version(old)

    def sync() -> None:
        client.pause()
        for figures in world.run(run_uploads, TP2, [upload]):
            assert isinstance(figures[0], dict), figures[0]
        client.update_weights(upload.meta).result(60)
        client.resume()

    try:
        asyncio.run(answer(client, old))
        r = asyncio.run(interrupted(pair, client, sync))
        found = {
            "in flight": (PROMPT, r),
            "goes on": (PREFIX, asyncio.run(answer(client, old))),
            "begins": (PREFIX, asyncio.run(answer(client, new))),
        }
        assert client.get_version() == new
    finally:
        client.destroy()
    assert r.output_len == LONG and set(r.output_versions) == {old, new}
    assert r.output_versions == sorted(r.output_versions)
    written_by_m0 = r.output_versions.count(old)
    assert r.output_tokens[:written_by_m0] == hf_greedy(pair.m0, PROMPT, written_by_m0)
    gaps = {what: gap(pair.m1, prompt, r, new) for what, (prompt, r) in found.items()}
    print(f"kv_after_sync={kv}, pause_mode={mode}:", {k: f"{v:.1g}" for k, v in gaps.items()})
    for what, differs in gaps.items():
        old_kv = kv == "keep" and what != "begins"
        assert (differs > 0.01) if old_kv else (differs < 2e-5)


def gap(model: Path, prompt: list[int], r: ModelResponse, version: int) -> float:
    """The largest |logprob - transformers'| of the tokens of a version."""
    differs = (torch.tensor(r.output_logprobs) - hf_logprobs(model, prompt, r.output_tokens)).abs()
    return float(differs[torch.tensor(r.output_versions) == version].max())
