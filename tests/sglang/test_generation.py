"""megarl's client against a real server: tokens, logprobs, stops, pauses, aborts."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.api.records import ModelRequest, ModelResponse
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig, WeightSyncConfig
from megarl.rollout.client import RemoteSGLangEngine
from megarl.weight_sync.servers import Deadline, Servers
from tests.sglang.conftest import Pair
from tests.sglang.servers import RealServer, hf_greedy, hf_logprobs
from tests.teaching import check_teacher

PROMPT = [2, 40, 50, 60]
LONG = 800  # tokens that take seconds
PROMPTS = [[2, *range(3, 4 + 7 * i)] for i in range(6)]


def request(
    ids: list[int] = PROMPT, rid: str = "r", seed: int | None = None, **g: Any
) -> ModelRequest:
    given: dict[str, Any] = {"max_new_tokens": 16, "ignore_eos": True}
    gconfig = GenerationHyperparameters(**(given | g))
    return ModelRequest(rid=rid, input_ids=list(ids), gconfig=gconfig, seed=seed)


def ask(client: RemoteSGLangEngine, *reqs: ModelRequest) -> list[ModelResponse]:
    return asyncio.run(client.agenerate_many(reqs))


@pytest.fixture(autouse=True)
def original_weights(pair: Pair) -> None:
    for server in pair.both:
        if server.version != "default":
            server.load(pair.m0)
            server.ok("/update_weight_version", {"new_version": "default"})


@pytest.mark.parametrize("temperature", (1.0, 0.7))
def test_a_batch_has_hfs_logprobs(pair: Pair, temperature: float) -> None:
    reqs = [request(p, rid=str(i), temperature=temperature) for i, p in enumerate(PROMPTS)]
    out = ask(pair.client, *reqs)
    assert len({tuple(r.output_tokens) for r in out}) == len(reqs)
    for prompt, r in zip(PROMPTS, out, strict=True):
        expected = hf_logprobs(pair.m0, prompt, r.output_tokens, temperature)
        torch.testing.assert_close(torch.tensor(r.output_logprobs), expected, atol=2e-5, rtol=0)
        assert r.stop_reason == "length" and r.output_versions == [0] * 16


def test_greedy_is_hfs_greedy(pair: Pair, client_of_two: RemoteSGLangEngine) -> None:
    expected = hf_greedy(pair.m0, PROMPT, 16)
    for client in (pair.client, client_of_two):
        (r,) = ask(client, request(greedy=True))
        assert r.output_tokens == expected
        wanted = hf_logprobs(pair.m0, PROMPT, expected)
        torch.testing.assert_close(torch.tensor(r.output_logprobs), wanted, atol=2e-5, rtol=0)


def test_what_ends_an_answer(pair: Pair) -> None:
    whole = hf_greedy(pair.m0, PROMPT, 16)
    at = next(i for i in range(1, 16) if whole[i] not in whole[:i])
    stop: dict[str, Any] = dict(greedy=True, stop_token_ids=[whole[at]], ignore_eos=False)
    (by_token,) = ask(pair.client, request(**stop))
    assert by_token.stop_reason == "stop" and by_token.output_tokens == whole[: at + 1]
    (late,) = ask(pair.client, request(**stop, min_new_tokens=at + 3))
    assert late.output_len >= at + 3
    # none of eight has an EOS, which a token is in one of 130 cases, in 10^-9 of all runs
    for ends in ({"ignore_eos": False}, {"stop": ["e"]}):
        out = ask(pair.client, *[request(rid=str(i), max_new_tokens=300, **ends) for i in range(8)])
        stopped = [r for r in out if r.stop_reason == "stop"]
        assert stopped and all(r.output_len == 300 for r in out if r.stop_reason == "length")
        if "stop" not in ends:
            assert all(r.output_tokens.index(1) == r.output_len - 1 for r in stopped)
    (short,) = ask(pair.client, request(max_new_tokens=3))
    assert short.stop_reason == "length" and short.output_len == 3


def test_a_teacher_asks_for_logprobs_of_prompts(pair: Pair) -> None:
    """Of both servers, as of the embedded one (tests/system/test_server_generate.py)."""
    model = AutoModelForCausalLM.from_pretrained(pair.m0, dtype=torch.float32)
    for k in (1, 5):
        check_teacher(pair.addresses, model, k)


def test_a_refused_request_is_an_error_with_the_servers_words(pair: Pair) -> None:
    with pytest.raises(RuntimeError, match=r"answered 400.*context length"):
        ask(pair.client, request(list(range(3, 100)) * 11))
    assert ask(pair.client, request())[0].output_len == 16


def running(pair: Pair) -> bool:
    return any(load["num_running_reqs"] for load in pair.one.get("/v1/loads")[1]["loads"])


async def interrupted(pair: Pair, client: RemoteSGLangEngine, act: Any) -> ModelResponse:
    """The answer to a long request, `act`ed upon in the middle."""
    long = request(greedy=True, max_new_tokens=LONG, rid="long")
    task = asyncio.ensure_future(client.agenerate(long))
    deadline = time.monotonic() + 120
    while not await asyncio.to_thread(running, pair):
        assert time.monotonic() < deadline
        if task.done():  # nobody looked in time
            task = asyncio.ensure_future(client.agenerate(long))
        await asyncio.sleep(0.02)
    await asyncio.to_thread(act)
    return await asyncio.wait_for(task, 120)


def client_of(server: RealServer, mode: str, kv: str = "flush") -> RemoteSGLangEngine:
    config = RolloutConfig(
        addresses=[server.address], request_timeout=120, setup_timeout=60, kv_after_sync=kv
    )
    return RemoteSGLangEngine(config, weight_sync=WeightSyncConfig(pause_mode=mode))


@pytest.mark.parametrize("mode", ("abort", "drain", "retract"))
def test_a_paused_answer_goes_on_where_it_was(pair: Pair, mode: str) -> None:
    client = client_of(pair.one, mode)
    client.initialize()
    whole = hf_greedy(pair.m0, PROMPT, LONG)

    def pause_and_resume() -> None:
        client.pause()
        assert pair.one.get("/ready")[0] == 503
        client.resume()
        assert pair.one.get("/ready")[0] == 200

    try:
        r = asyncio.run(interrupted(pair, client, pause_and_resume))
    finally:
        client.destroy()
    assert r.output_tokens == whole and r.stop_reason == "length"
    expected = hf_logprobs(pair.m0, PROMPT, whole)
    torch.testing.assert_close(torch.tensor(r.output_logprobs), expected, atol=2e-5, rtol=0)


def test_an_answer_that_others_abort_is_finished_all_the_same(pair: Pair) -> None:
    def abort() -> None:
        assert pair.one.post("/abort_request", {"abort_all": True})[0] == 200

    r = asyncio.run(interrupted(pair, pair.client, abort))
    assert r.output_len == LONG and r.stop_reason == "length"


def test_what_a_server_says_of_itself(pair: Pair) -> None:
    pair.client.check_health()
    infos = Servers(pair.addresses).info(Deadline(60))
    for server, tp in zip(pair.both, (1, 2), strict=True):
        info = infos[server.address]
        assert info.tp == tp and server.version == "default"
        assert not info.embedded
        assert len(server.checksums()) == tp


def test_it_answers_to_those_who_know_the_jobs_token_alone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command line does not show it, and what would show it asks for it."""
    token = os.environ["MEGARL_JOB_TOKEN"]
    assert pair.one.get("/server_info")[1]["api_key"] == token
    assert token not in Path(f"/proc/{pair.one.process.pid}/cmdline").read_text()
    monkeypatch.delenv("MEGARL_JOB_TOKEN")
    for path in ("/pause_generation", "/update_weights_from_disk", "/generate"):
        assert pair.one.post(path, {})[0] == 401
    assert pair.one.get("/server_info")[0] == 401 and pair.one.get("/health")[0] == 200
