"""Routes from a real server: over interruptions and turns, and through a whole run."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megarl.api.records import ModelRequest
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig
from megarl.rollout.client import RemoteSGLangEngine
from megarl.rollout.trajectory import Trajectory, to_batch
from megarl.wire.routes import RouteShape
from tests.dist.moe_routing import hf_routes
from tests.dist.world import free_port
from tests.embedded_server import Server, address, embedded_server, load
from tests.tiny import save_tiny
from tests.tiny_tokenizer import save_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SHAPE = RouteShape(layers=3, experts=4, top_k=2)
FLAG = "--enable-return-routed-experts"
SIZES = ("--context-length", "256", "--dtype", "float32", "--max-running-requests", "64")

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape, whose layer 1 is dense."""
    root = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        save_tiny(root / f"m{seed}", "qwen3_moe", layers=3, seed=seed)
        save_tokenizer(root / f"m{seed}")
    return [root / "m0", root / "m1"]


@pytest.fixture(scope="module")
def server(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    with embedded_server(models[0], FLAG, *SIZES, log=log) as s:
        yield s


@pytest.fixture
def client(server: Server) -> Iterator[RemoteSGLangEngine]:
    engine = RemoteSGLangEngine(RolloutConfig(addresses=[address(server)], setup_timeout=30))
    engine.initialize()
    engine.record_routes(SHAPE)
    yield engine
    engine.destroy()


def ask(tokens: list[int], n: int, known: int = 0) -> ModelRequest:
    g = GenerationHyperparameters(max_new_tokens=n, ignore_eos=True)
    return ModelRequest(input_ids=tokens, gconfig=g, routes_from=known)


def test_turns_bring_what_is_new(client: RemoteSGLangEngine, models: list[Path]) -> None:
    talk = Trajectory()
    asked = []
    for said in ([2, 40, 50, 60], [7, 8, 9], [11]):
        head = talk.read(said)
        request = ask(talk.tokens, 5, head.routed())
        asked.append(request.routes_from)
        talk.wrote(asyncio.run(client.agenerate(request)))
    assert asked == [0, 8, 16]
    routes = to_batch([talk], [1.0])["routed_experts"][0]
    assert routes.dtype == torch.int8 and (routes[-1] == -1).all()
    assert torch.equal(routes[:-1].long().sort().values, hf_routes(models[0], talk.tokens))


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_every_token_keeps_the_routes_it_was_written_with(
    server: Server, client: RemoteSGLangEngine, models: list[Path], mode: str
) -> None:
    """New weights come in the middle of an answer."""
    load(server, models[0])
    prompt = [2, 40, 50, 60, 9]
    loop = client.opened().loop
    answer = loop.submit(client.agenerate(ask(prompt, 200)))
    server.wait_running()
    server.ok("/pause_generation", {"mode": mode})
    new = {"model_path": str(models[1]), "weight_version": "1", "flush_cache": mode != "in_place"}
    server.ok("/update_weights_from_disk", new)
    server.ok("/continue_generation", {})
    response = answer.result(60)
    server.ok("/update_weight_version", {"new_version": "default"})
    routes, versions = response.routed_experts, response.output_versions
    assert routes is not None and len(routes) == len(prompt) + 199
    tokens = response.input_tokens + response.output_tokens
    first = len(prompt) + versions.index(1)  # the first token of the new weights
    assert len(prompt) < first < len(tokens) - 1
    old, later = (hf_routes(m, tokens) for m in models)
    ours = routes.long().sort().values
    written = slice(len(prompt) - 1, first - 1)  # positions that predicted tokens of the old
    if mode == "retract":  # the server has read them again
        assert (ours[written] == -1).all()
        assert torch.equal(ours[: len(prompt) - 1], later[: len(prompt) - 1])
    else:
        assert torch.equal(ours[: first - 1], old[: first - 1])
    if mode != "in_place":  # there the new weights go on from keys and values of the old
        assert torch.equal(ours[first - 1 :], later[first - 1 :])
    assert not torch.equal(old, later)


@pytest.mark.parametrize("replay", ["rollout", pytest.param("trainer", marks=pytest.mark.full)])
def test_a_run_against_a_noisy_server(models: list[Path], tmp_path: Path, replay: str) -> None:
    """The server's routers choose otherwise than the trainer's: with their routes both sides still
    compute the same logprobs, at every step, and without them they do not."""
    log = tmp_path / "server.log"
    with embedded_server(models[0], FLAG, *SIZES, log=log, module="tests.noisy_server") as noisy:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        command += ["megarl/run.py", "--config", "configs/quickstart_grpo.yaml"]
        command += [f"rollout.addresses=[{address(noisy)}]", f"actor.path={models[0]}"]
        command += [f"fileroot={tmp_path}", "experiment_name=e", "total_train_steps=2"]
        command += ["valid_dataset=null", "ref=null", "train_dataset.batch_size=8"]
        command += ["train_dataset.size=40", "train_dataset.options.level=1"]
        command += ["train_dataset.reward=tests.sglang.rewards:many_digits"]
        command += ["server.context_length=256", "actor.parallel.tp=1", "actor.parallel.ep=2"]
        command += [f"actor.router_replay={replay}", "actor.optimizer.lr=1e-3"]
        done = subprocess.run(
            command, cwd=ROOT, timeout=280, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout
    lines = (tmp_path / "e" / "grpo" / "stats.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [r["step"] for r in rows] == [1, 2]
    gap = max(r["train_rollout_logprob_abs_diff/max"] for r in rows)
    if replay == "rollout":
        assert all(r["moe/routes_known"] == 1 for r in rows)
        assert all(r["moe/replay_flips"] > 0.05 for r in rows)
        assert gap < 1e-4
    else:
        assert all("moe/routes_known" not in r for r in rows) and gap > 0.05
    assert all(r["update_successful"] == 1 and r["grad_norm"] > 0 for r in rows)
