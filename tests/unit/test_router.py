"""Requests through a router that is strict as SGLang's is; tests/sglang has SGLang's own."""

from __future__ import annotations

import asyncio
import itertools

import aiohttp
import pytest
from aiohttp import web

from megarl.api.records import ModelRequest, WeightUpdateMeta
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig
from megarl.rollout.client import RemoteSGLangEngine
from megarl.rollout.loop_thread import LoopThread


class FakeRouter:
    """Sends requests to its workers in turn, and takes a list for a prompt's tokens alone."""

    def __init__(self, *workers: str) -> None:
        self.workers = {f"id{i}": f"http://{w}" for i, w in enumerate(workers)}
        self.turn = itertools.count()
        self.loop = LoopThread("fake-router")
        self.address = self.loop.run(self._start(), timeout=10)

    async def _start(self) -> str:
        app = web.Application()
        app.router.add_get("/workers", self._listed)
        app.router.add_post("/workers", self._add)
        app.router.add_delete("/workers/{id}", self._remove)
        app.router.add_post("/generate", self._generate)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, shutdown_timeout=0.1).start()
        host, port = self._runner.addresses[0]
        return f"{host}:{port}"

    def close(self) -> None:
        self.loop.run(self._runner.cleanup(), timeout=10)
        self.loop.close()

    async def _listed(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"workers": [{"id": i, "url": u} for i, u in self.workers.items()]}
        )

    async def _add(self, request: web.Request) -> web.Response:
        url = (await request.json())["url"]
        asyncio.get_running_loop().call_later(
            0.1, self.workers.__setitem__, f"id{len(self.workers)}{url[-5:]}", url
        )
        return web.json_response({"status": "accepted"}, status=202)

    async def _remove(self, request: web.Request) -> web.Response:
        self.workers.pop(request.match_info["id"])
        return web.json_response({"status": "accepted"}, status=202)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if any(isinstance(v, list) for k, v in body.items() if k != "input_ids"):
            return web.json_response({"message": "expected a string"}, status=422)
        urls = list(self.workers.values())
        body |= {k: [body[k]] for k in ("rid", "input_ids", "sampling_params")}
        url = f"{urls[next(self.turn) % len(urls)]}/generate"
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
            return web.json_response((await answer.json())[0], status=answer.status)


@pytest.fixture
def routed(servers):
    """(client, router) with these workers at first."""
    opened = []

    def build(*workers):
        router = FakeRouter(*workers)
        opened.append(router.close)
        config = RolloutConfig(
            addresses=[s.address for s in servers], router=router.address, setup_timeout=10
        )
        client = RemoteSGLangEngine(config)
        opened.append(client.destroy)
        client.initialize()
        return client, router

    yield build
    for close in reversed(opened):
        close()


def requests(count):
    g = GenerationHyperparameters(max_new_tokens=4)
    return [ModelRequest(rid="r", input_ids=[1] * (i + 1), gconfig=g, seed=i) for i in range(count)]


def test_samples_go_one_by_one_and_come_back_in_order(servers, routed):
    client, router = routed()
    out = asyncio.run(client.agenerate_many(requests(6)))
    assert [r.output_tokens[0] for r in out] == [101 + i for i in range(6)]
    assert sorted(router.workers.values()) == sorted(f"http://{s.address}" for s in servers)
    assert [len(s.requests) for s in servers] == [3, 3]
    seeds = [b["sampling_params"][0]["sampling_seed"] for s in servers for b in s.requests]
    assert sorted(seeds) == list(range(6))


def test_pauses_and_versions_go_to_the_servers(servers, routed):
    client, router = routed(*(s.address for s in servers))
    lost, other = servers
    client.pause()
    client.drop_servers({lost.address: "silent"})
    other.weight_version = "1"
    client.update_weights(WeightUpdateMeta(type="distributed", version=1, timeout=10)).result(5)
    client.resume()
    assert all(s.calls[0][0] == "/pause_generation" for s in servers)
    for r in asyncio.run(client.agenerate_many(requests(4))):
        assert r.output_versions == [1] * 4
    assert not lost.requests and list(router.workers.values()) == [f"http://{other.address}"]

    client.pause()  # it answers again, and serves once it has the weights
    for server in servers:
        server.weight_version = "2"
    client.update_weights(WeightUpdateMeta(type="distributed", version=2, timeout=10)).result(5)
    client.resume()
    asyncio.run(client.agenerate_many(requests(4)))
    assert len(lost.requests) == 2


def test_workers_that_no_update_would_reach_are_refused(servers, routed):
    with pytest.raises(RuntimeError, match=r"workers \['10.0.0.9:1'\].*weights would not reach"):
        routed(servers[0].address, "10.0.0.9:1")


def test_a_refused_request_is_an_error(servers, routed):
    client, _ = routed()
    servers[0].fail = [(400, [{"message": "too long"}])]
    with pytest.raises(RuntimeError, match="answered 400"):
        asyncio.run(client.agenerate_many(requests(2)))
