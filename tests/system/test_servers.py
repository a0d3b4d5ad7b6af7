"""Two embedded servers: episodes keep theirs, and tokens know the version of their weights."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.api.inference import RolloutWorkflow
from megarl.api.records import ModelRequest, WeightUpdateMeta
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig, WeightSyncConfig
from megarl.rollout.client import RemoteSGLangEngine
from megarl.utils.env import free_port
from megarl.weight_sync.broadcast import UpdateChannel
from megarl.weight_sync.servers import Deadline, Servers
from tests.embedded_server import Server, addresses, embedded_server, two_servers
from tests.tiny import save_tiny

TURNS, EPISODES = 5, 12


class Turns(RolloutWorkflow):
    """Writes turns of `tokens` tokens, and more in later rows, each with all before it as its
    prompt; keeps the answers."""

    def __init__(self, tokens: int = 24) -> None:
        self.tokens, self.answers = tokens, defaultdict(list)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, torch.Tensor]:
        ids = [5, 6, 7 + data["row_id"]]
        more = data["row_id"] % EPISODES  # so that they do not go in step
        g = GenerationHyperparameters(max_new_tokens=self.tokens + more, ignore_eos=True)
        written, n = [], len(ids)
        for _ in range(TURNS):
            r = await engine.agenerate(ModelRequest(rid="r", input_ids=ids, gconfig=g))
            self.answers[data["row_id"]].append(r)
            ids, written = ids + r.output_tokens, written + [r]
        mask = torch.arange(len(ids))[None] >= n
        lp = torch.tensor([[0.0] * n + [lp for r in written for lp in r.output_logprobs]])
        versions = torch.tensor([[-1] * n + [v for r in written for v in r.output_versions]])
        return {
            "input_ids": torch.tensor([ids]), "attention_mask": torch.ones_like(mask),
            "loss_mask": mask, "logprobs": lp, "versions": versions.to(torch.int32),
            "rewards": torch.zeros(1),
        }  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("models")
    return [save_tiny(home / f"m{i}", "qwen3", layers=2, seed=i) for i in (0, 1)]


@pytest.fixture(scope="module")
def pair(models: list[Path]) -> Iterator[list[Server]]:
    with two_servers(models[0], models[0].parent) as both:
        yield both


@pytest.fixture
def servers(models: list[Path], pair: list[Server]) -> list[Server]:
    """Both as they were started: the first model, version 0."""
    for server in pair:
        body = {"model_path": str(models[0]), "weight_version": "0"}
        server.ok("/update_weights_from_disk", body)
    return pair


def connect(servers: list[Server], sync: WeightSyncConfig | None = None, **config: Any):
    given = {"addresses": list(addresses(servers)), "request_timeout": 60.0, "setup_timeout": 30.0}
    client = RemoteSGLangEngine(RolloutConfig(**(given | config)), weight_sync=sync)
    client.initialize()
    return client


def watched(client: RemoteSGLangEngine) -> dict[int, list[str]]:
    """By row, the servers that answered its turns."""
    seen: dict[int, list[str]] = defaultdict(list)
    pool = client.opened().pool
    call = pool.call

    async def spy(address: str, method: str, path: str, body: Any = None, **kw: Any) -> Any:
        answer = await call(address, method, path, body, **kw)
        if path == "/generate":
            seen[body["input_ids"][0][2] - 7].append(address)
        return answer

    pool.call = spy  # type: ignore[method-assign]
    return seen


def hit_rate(seen: dict[int, list[str]]) -> float:
    """The part of the turns that went where the turn before is cached."""
    pairs = [(a, b) for turns in seen.values() for a, b in pairwise(turns)]
    return sum(a == b for a, b in pairs) / len(pairs)


def test_turns_stay_with_their_server(servers):
    """Without affinity, too, most do: a server is often the least loaded once it has answered."""
    rows = [{"row_id": i} for i in range(EPISODES)]
    rates = {}
    for affinity in (0.0, 1e6):  # no load is too much
        client = connect(servers, affinity=affinity)
        seen = watched(client)
        client.rollout_batch(rows, workflow=Turns())
        rates[affinity] = hit_rate(seen)
        assert {a for turns in seen.values() for a in turns} == set(client.addresses)
        client.destroy()
    print(f"hit rate with affinity {rates[1e6]:.2f}, without {rates[0.0]:.2f}")
    assert rates[1e6] == 1.0


@pytest.mark.parametrize(("mode", "kv"), [("drain", "flush"), ("in_place", "keep")])
def test_every_token_has_the_version_of_the_weights_that_wrote_it(models, servers, mode, kv):
    sync = WeightSyncConfig(pause_mode=mode)
    client = connect(servers, sync, kv_after_sync=kv, max_head_offpolicyness=8)
    flow = Turns(tokens=36)
    rows = [[{"row_id": 4 * i + j} for j in range(4)] for i in range(40)]
    data = type("Rows", (list,), {"batch_size": 4})(rows)
    for version in range(1, 5):
        client.prepare_batch(data, workflow=flow)
        client.pause()
        assert mode != "drain" or not any(s.state()["num_running_reqs"] for s in servers)
        body = {"model_path": str(models[version % 2]), "weight_version": str(version)}
        for server in servers:
            server.ok("/update_weights_from_disk", body | {"flush_cache": kv == "flush"})
        meta = WeightUpdateMeta(type="distributed", version=version, timeout=20)
        client.update_weights(meta).result(20)
        client.resume()
    stats = client.stats()  # which checks the books
    client.destroy()
    assert stats["handed_out"] == 16 and stats["failed"] == stats["dropped"] == 0
    answers = [r for turns in flow.answers.values() for r in turns]
    assert {v for r in answers for v in r.output_versions} >= {0, 1, 2, 3}
    assert all(r.output_versions == sorted(r.output_versions) for r in answers)
    mixed = sum(len(set(r.output_versions)) > 1 for r in answers)
    assert (mixed == 0) if mode == "drain" else (mixed > 0)
    both = [AutoModelForCausalLM.from_pretrained(m, dtype=torch.float32) for m in models]
    for r in answers:
        # behind its first version, in_place goes on with keys and values of older weights
        count = r.output_versions.count(first := r.output_versions[0])
        ids = torch.tensor([r.input_tokens + r.output_tokens[:count]])
        with torch.no_grad():
            logp = [torch.log_softmax(m(ids).logits[0, :-1], -1) for m in both]
        wrote, other = (
            lp.gather(1, ids[0, 1:, None])[-count:, 0]
            for lp in (logp[first % 2], logp[1 - first % 2])
        )
        got = torch.tensor(r.output_logprobs[:count])
        torch.testing.assert_close(got, wrote, atol=1e-4, rtol=0)
        assert count < 4 or (got - other).abs().max() > 1e-3


def generate(client: RemoteSGLangEngine, count: int, **gconfig: Any) -> list[Any]:
    g = GenerationHyperparameters(ignore_eos=True, greedy=True).new(**gconfig)
    reqs = [ModelRequest(rid="r", input_ids=[5, 6, 7 + i], gconfig=g) for i in range(count)]
    return asyncio.run(client.agenerate_many(reqs))


def test_a_request_that_takes_too_long_is_continued(servers):
    """Its server aborts it, and brings the tokens so far."""
    n = 240
    client = connect(servers[:1], request_timeout=0.1)
    try:
        answers = generate(client, 3, max_new_tokens=n)
    finally:
        client.destroy()
    assert [(a.output_len, a.stop_reason) for a in answers] == [(n, "length")] * 3
    assert [a.output_tokens[:4] for a in answers] == [
        a["output_ids"]
        for a in servers[1].generate(
            [[5, 6, 7 + i] for i in range(3)], temperature=0, max_new_tokens=4, ignore_eos=True
        )
    ]
    servers[0].wait_idle()  # nothing goes on that nobody waits for


def test_a_server_that_is_started_again_goes_on_with_what_it_was_asked(models, tmp_path):
    port = free_port()
    with embedded_server(models[0], log=tmp_path / "one.log", port=port) as first:
        client = connect([first])
        asked = ThreadPoolExecutor(1).submit(generate, client, 2, max_new_tokens=240)
        first.wait_running(2)
        first.process.kill()
    try:
        with embedded_server(models[0], log=tmp_path / "two.log", port=port):
            assert [a.output_len for a in asked.result(120)] == [240, 240]
    finally:
        client.destroy()


def test_an_id_under_way_is_refused_as_sglang_does(servers):
    server = servers[0]
    server.ok("/pause_generation", {"mode": "in_place"})
    waiting = server.start([5, 6], body={"rid": "mine"}, max_new_tokens=1)
    server.wait_waiting()
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}, "rid": "mine"}
    assert server.post("/generate", body)[0] == 400
    server.ok("/abort_request", {"rid": "mine"})
    assert waiting.result(20)["meta_info"]["finish_reason"]["type"] == "abort"
    server.ok("/continue_generation")
    assert server.post("/generate", body)[0] == 200


@pytest.mark.parametrize("ended", [True, False])
def test_a_server_that_has_ended_does_not_object_to_being_left(models, servers, tmp_path, ended):
    """As where a script ends its servers before its engines. One that lives does."""
    other = embedded_server(models[0], log=tmp_path / "log")
    with other if ended else nullcontext(servers[0]) as server:
        channel = UpdateChannel(
            Servers(addresses([server])),
            backend="gloo",
            device=torch.device("cpu"),
            deadline=Deadline(60.0),
        )
        if ended:
            server.terminate()
        else:
            server.ok("/destroy_weights_update_group", {"group_name": channel.group_name})
        assert bool(channel.close(abort=True)) != ended
