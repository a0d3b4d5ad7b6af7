"""Requests through SGLang's own router to both servers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megarl.api.records import ModelRequest
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig
from megarl.rollout.client import RemoteSGLangEngine
from megarl.utils.env import free_port
from megarl.utils.http import HttpError, call_json
from tests.sglang.conftest import Pair
from tests.sglang.servers import PYTHON, hf_logprobs

START = 120.0


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a router without workers."""
    port, log = free_port(), tmp_path_factory.mktemp("router") / "router.log"
    command = [str(PYTHON), "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--policy", "cache_aware"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=os.environ)
        try:
            _wait(f"127.0.0.1:{port}", process, log)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def _wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START
    while time.monotonic() < deadline and process.poll() is None:
        try:
            call_json("GET", address, "/workers", timeout=5)
            return
        except HttpError:
            time.sleep(0.1)
    raise RuntimeError(f"the router did not come up:\n{log.read_text()}")


def test_requests_go_through_the_router_and_pauses_to_the_servers(pair: Pair, router: str) -> None:
    for server in pair.both:
        if server.version != "default":
            server.load(pair.m0)
            server.ok("/update_weight_version", {"new_version": "default"})
    config = RolloutConfig(
        addresses=list(pair.addresses), router=router, request_timeout=120, setup_timeout=60
    )
    client = RemoteSGLangEngine(config)
    client.initialize()
    g = GenerationHyperparameters(max_new_tokens=200, ignore_eos=True)
    prompts = [[2, *range(3 + i, 30 + i)] for i in range(6)]
    reqs = [ModelRequest(rid=str(i), input_ids=p, gconfig=g) for i, p in enumerate(prompts)]

    async def paused() -> list:
        task = asyncio.ensure_future(client.agenerate_many(reqs))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(client.pause)
        ready = [s.get("/ready")[0] for s in pair.both]
        await asyncio.to_thread(client.resume)
        return [ready, *await asyncio.wait_for(task, 120)]

    try:
        ready, *out = asyncio.run(paused())
    finally:
        client.destroy()
    assert ready == [503, 503]
    found = call_json("GET", router, "/workers", timeout=30)["workers"]
    assert {w["url"] for w in found} == {f"http://{a}" for a in pair.addresses}
    for prompt, r in zip(prompts, out, strict=True):
        assert r.output_len == 200 and r.output_versions == [0] * 200
        expected = hf_logprobs(pair.m0, prompt, r.output_tokens)
        torch.testing.assert_close(torch.tensor(r.output_logprobs), expected, atol=2e-5, rtol=0)
