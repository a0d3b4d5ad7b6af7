"""Every family this server serves on a CPU: transformers' logprobs, and new weights from the
trainer. (SGLang takes every layer of Qwen3-MoE for a sparse one.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.api.records import ModelRequest, WeightUpdateMeta
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig
from megarl.rollout.client import RemoteSGLangEngine
from megarl.rollout.trajectory import Trajectory, to_batch
from megarl.wire.routes import RouteShape
from tests.dist.moe_routing import hf_routes
from tests.dist.uploads import Upload, run_uploads
from tests.dist.world import World
from tests.sglang.servers import RealServer, hf_logprobs, launch, save_model, serving

PROMPT = [2, 40, 50, 60, 7, 120]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": dict(tie=True),
    "glm4": {},
    "mixtral": {},
    "qwen3_moe": dict(mlp_only_layers=[], norm_topk_prob=True),
    # on CPUs with AMX this server does not scale the angles of layers without a window
    "gemma3_text": dict(
        tie=True,
        rope_parameters={
            f"{kind}_attention": dict(rope_type="default", rope_theta=base)
            for kind, base in (("full", 5e4), ("sliding", 300.0))
        },
    ),
}
OPTIONS = {"mixtral": {"enable_return_routed_experts": True}}
LAYOUTS = {
    "llama": dict(pp=2), "qwen2": dict(tp=2), "glm4": dict(tp=2), "mixtral": dict(etp=2),
    "qwen3_moe": dict(ep=2), "gemma3_text": dict(tp=2),
}  # fmt: skip
_versions = itertools.count(1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for (kind, over), seed in itertools.product(FAMILIES.items(), (0, 1)):
        save_model(root / f"{kind}{seed}", kind, seed, **over)
    return root


@pytest.fixture(scope="module")
def servers(models: Path) -> Iterator[dict[str, RealServer]]:
    """All at once: what they take is mostly imports."""
    started = {
        kind: launch(models / f"{kind}0", models / f"{kind}.log", options=OPTIONS.get(kind))
        for kind in FAMILIES
    }
    with serving(*started.values()):
        yield started


def check_logprobs(server: RealServer, model: Path) -> None:
    params = dict(temperature=1.0, max_new_tokens=24, ignore_eos=True)
    meta = server.generate(PROMPT, **params)["meta_info"]
    tokens = [t for _, t, _ in meta["output_token_logprobs"]]
    logprobs = torch.tensor([lp for lp, _, _ in meta["output_token_logprobs"]])
    torch.testing.assert_close(logprobs, hf_logprobs(model, PROMPT, tokens), atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family(
    servers: dict[str, RealServer], models: Path, world: World, tmp_path: Path, kind: str
) -> None:
    server, saved = servers[kind], tmp_path / "saved"
    old, new = models / f"{kind}0", models / f"{kind}1"
    check_logprobs(server, old)
    before = server.checksums()
    uploads = [
        Upload(
            new, saved,
            WeightUpdateMeta(
                type=way, version=next(_versions), addresses=(server.address,),
                bucket_bytes=100_000, timeout=120.0,
            ),
        )
        for way in ("distributed", "colocated")
    ]  # fmt: skip
    for upload in uploads:
        server.load(old)
        assert server.checksums() == before
        for figures in world.run(run_uploads, LAYOUTS[kind], [upload]):
            assert isinstance(figures[0], dict), figures[0]
        assert server.version == str(upload.meta.version)
        streamed, said = server.checksums(), server.said()
        assert streamed != before
        check_logprobs(server, new)
        server.load(saved)
        assert server.checksums() == streamed and server.said() == said


def test_routes_over_turns_and_an_interruption(
    servers: dict[str, RealServer], models: Path, tmp_path: Path
) -> None:
    """Prompts that the cache has, and an answer that newer weights go on with: every token keeps
    the routes that it was written with."""
    server, (old, new) = servers["mixtral"], (models / f"mixtral{i}" for i in (0, 1))
    server.load(old)
    client = RemoteSGLangEngine(RolloutConfig(addresses=[server.address], setup_timeout=60))
    client.initialize()
    try:
        client.record_routes(RouteShape(layers=2, experts=4, top_k=2))
        talk = Trajectory()
        for told, n in ((PROMPT, 6), ([9, 8], 6), ([7], 400)):
            asked = ModelRequest(
                input_ids=talk.read(told).path_tokens(),
                gconfig=GenerationHyperparameters(max_new_tokens=n, ignore_eos=True),
                routes_from=talk.head.routed(),
            )
            answer = client.opened().loop.submit(client.agenerate(asked))
            if n == 400:
                server.wait_running()
                server.ok("/pause_generation", {"mode": "abort"})
                server.ok("/update_weights_from_disk", _named(new, "1"))
                server.ok("/continue_generation", {})
            talk.wrote(answer.result(120))
            assert talk.answers[-1].routes_from == asked.routes_from
    finally:
        client.destroy()
        server.ok("/update_weights_from_disk", _named(old, "default"))
    batch = to_batch([talk], [1.0])
    routes, versions = batch["routed_experts"][0], batch["versions"][0].tolist()
    assert routes.dtype == torch.int8 and (routes[-1] == -1).all()
    first = versions.index(1)  # the first token that the new weights wrote
    assert first > len(PROMPT) + 15
    found = routes[:-1].long().sort().values
    by_old, by_new = (hf_routes(model, talk.tokens) for model in (old, new))
    assert torch.equal(found[: first - 1], by_old[: first - 1])
    assert torch.equal(found[first - 1 :], by_new[first - 1 :])
    assert not torch.equal(by_old, by_new)


def _named(path: Path, version: str) -> dict[str, str]:
    return {"model_path": str(path), "weight_version": version}
