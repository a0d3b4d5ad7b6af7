"""RemoteSGLangEngine against a small double of SGLang's protocol: retries, aborts, versions."""

import asyncio
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from aiohttp import web
from transformers import BatchEncoding

from megarl.api.inference import RolloutFailed, RolloutWorkflow
from megarl.api.records import ModelRequest, WeightUpdateMeta
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig, WeightSyncConfig
from megarl.rollout.client import RemoteSGLangEngine
from megarl.rollout.episode_context import EpisodeContext, Home, current_episode, stable_seed
from megarl.utils.http import MAX_RETRY_DELAY, RETRY_DELAY, backoff, call_json, retry_after
from tests.dist.world import free_port
from tests.unit.rollout_fakes import trajectory


@pytest.fixture
def connect():
    clients = []

    def build(*addresses, sync=None, **config):
        config = {"setup_timeout": 5.0, "request_timeout": 10.0} | config
        client = RemoteSGLangEngine(
            RolloutConfig(addresses=list(addresses), **config), weight_sync=sync
        )
        clients.append(client)
        client.initialize()
        return client

    yield build
    for c in clients:
        c.destroy()


def request(ids=(1, 2, 3), *, seed=None, rid="r", **gconfig):
    g = GenerationHyperparameters(**({"max_new_tokens": 6} | gconfig))
    return ModelRequest(rid=rid, input_ids=list(ids), gconfig=g, seed=seed)


def test_a_request_takes_what_a_chat_template_returns() -> None:
    encoded = BatchEncoding({"input_ids": [5, 6], "attention_mask": [1, 1]})
    assert ModelRequest(input_ids=encoded).input_ids == [5, 6]


def generate(client, *reqs):
    return asyncio.run(client.agenerate_many(list(reqs)))


def test_one_batch_request_carries_every_samples_own_parameters(servers, connect):
    client = connect(servers[0].address)
    out = generate(
        client,
        request(seed=5, temperature=0.7, top_p=0.9, top_k=3, stop_token_ids=[8], stop=["."]),
        request((4, 5), greedy=True, max_new_tokens=2, min_new_tokens=1, ignore_eos=True),
    )
    (body,) = servers[0].requests
    assert body["input_ids"] == [[1, 2, 3], [4, 5]]
    assert body["return_logprob"] is True
    assert body["sampling_params"] == [
        {
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 3,
            "stop_token_ids": [8],
            "stop": ["."],
            "ignore_eos": False,
            "max_new_tokens": 6,
            "min_new_tokens": 0,
            "sampling_seed": 5,
        },
        {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 2, "min_new_tokens": 1},
    ]
    assert len(set(body["rid"])) == 2
    assert out[0].input_tokens == [1, 2, 3]
    assert out[0].output_tokens == [103, 104, 105, 106, 107, 108]
    assert out[0].output_logprobs == [-103.0, -104.0, -105.0, -106.0, -107.0, -108.0]
    assert out[0].output_versions == [0] * 6
    assert out[1].output_tokens == [102, 103]
    assert [r.stop_reason for r in out] == ["length", "length"]
    assert out[0].latency >= 0


def test_aborted_samples_are_continued_with_what_they_had(servers, connect):
    server = servers[0]
    server.abort_after = [2, None, 0, 1]  # request 1: both samples; then the first one twice more
    client = connect(server.address)
    first, second = generate(
        client, request(seed=3, min_new_tokens=5), request((7,), max_new_tokens=3)
    )
    assert [r["input_ids"] for r in server.requests] == [
        [[1, 2, 3], [7]],
        [[1, 2, 3, 103, 104]],
        [[1, 2, 3, 103, 104]],
        [[1, 2, 3, 103, 104, 105]],
    ]
    assert [r["written"] for r in server.requests] == [[0, 0], [2], [2], [3]]
    budgets = [
        (p["max_new_tokens"], p["min_new_tokens"], p["sampling_seed"])
        for p in (r["sampling_params"][0] for r in server.requests)
    ]
    assert budgets == [(6, 5, 3), (4, 3, 3), (4, 3, 3), (3, 2, 3)]
    assert first.output_tokens == [103, 104, 105, 106, 107, 108]
    assert first.output_logprobs == [-103.0, -104.0, -105.0, -106.0, -107.0, -108.0]
    assert second.output_tokens == [101, 102, 103]
    rids = [r["rid"][0] for r in server.requests]
    assert len(set(rids)) == 4


def test_continuation_stamps_tokens_with_the_version_that_wrote_them(servers, connect):
    server = servers[0]
    server.abort_after, server.versions = [2], ["default", "4"]
    out = generate(connect(server.address), request())[0]
    assert out.output_versions == [0, 0, 4, 4, 4, 4]


def test_an_answer_that_is_cut_again_and_again_goes_on_without_its_last_bits(servers, connect):
    server = servers[0]
    server.abort_after = [2, 0, 0, 1]
    assert generate(connect(server.address), request())[0].stop_reason == "length"
    assert [r["written"] for r in server.requests] == [[0], [2], [2], [0], [3]]


def test_pause_holds_requests_back_and_resume_lets_them_go(servers, connect):
    server = servers[0]
    client = connect(*(s.address for s in servers), sync=WeightSyncConfig(pause_mode="retract"))
    client.pause()
    assert [s.calls for s in servers] == [[("/pause_generation", {"mode": "retract"})]] * 2

    async def blocked():
        task = asyncio.ensure_future(client.agenerate(request()))
        await asyncio.sleep(0.2)
        assert not task.done()
        assert not any(s.requests for s in servers)
        await asyncio.to_thread(client.resume)
        return await asyncio.wait_for(task, 5)

    assert asyncio.run(blocked()).output_len == 6
    assert server.calls[-1] == ("/continue_generation", {})


def test_servers_go_on_also_where_the_answers_cannot_be_noted(servers, connect, monkeypatch):
    client = connect(servers[0].address)

    def fails():
        raise OverflowError

    monkeypatch.setattr(client.executor.episodes, "cut", fails)
    client.pause()
    with pytest.raises(OverflowError):
        client.resume()
    assert servers[0].calls[-1][0] == "/continue_generation"
    assert generate(client, request())[0].output_len == 6
    client.resume()


def test_failed_pause_names_the_server(servers, connect):
    client = connect(*(s.address for s in servers))
    servers[1].pause_answer = web.json_response(
        {"success": False, "message": "cannot pause now"}, status=400
    )
    with pytest.raises(RuntimeError, match=f"{servers[1].address}.*cannot pause now") as info:
        client.pause()
    assert servers[0].address not in str(info.value)
    servers[1].pause_answer = None


def test_pause_without_resume_is_an_error_in_the_end(servers, connect):
    client = connect(servers[0].address, sync=WeightSyncConfig(timeout=0.1), request_timeout=0.2)
    client.pause()
    with pytest.raises(TimeoutError, match="paused for"):
        generate(client, request())


def test_something_that_keeps_aborting_is_an_error(servers, connect, monkeypatch):
    monkeypatch.setattr("megarl.rollout.generation.ABORT_DELAY", 0.0)
    servers[0].abort_after = [0] * 1000
    client = connect(servers[0].address)
    with pytest.raises(RuntimeError, match="aborted 20 times in a row"):
        generate(client, request())


def test_connection_errors_are_retried_on_another_server(servers, connect, monkeypatch):
    monkeypatch.setattr("megarl.utils.http.RETRY_DELAY", 0.01)
    servers[0].fail = ["drop"]
    client = connect(*(s.address for s in servers))
    assert generate(client, request())[0].output_len == 6
    assert len(servers[0].requests) == len(servers[1].requests) == 1


def test_a_silent_server_is_warned_of_once_and_asked_last(servers, connect, monkeypatch, capsys):
    monkeypatch.setattr("megarl.utils.http.RETRY_DELAY", 0.01)
    client = connect(*(s.address for s in servers))
    servers[0].fail = ["drop"] * 9
    for _ in range(4):
        assert generate(client, request())[0].output_len == 6
    assert len(servers[0].requests) == 1 and len(servers[1].requests) == 4
    assert capsys.readouterr().err.count(f"{servers[0].address}: /generate failed") == 1
    servers[0].fail = []
    client.pause()  # it answers: it is one of them again
    client.resume()
    generate(client, request()), generate(client, request())
    assert len(servers[0].requests) == 2


def test_what_does_not_answer_a_pause_is_dropped_while_others_are_left(servers, connect, capsys):
    client = connect(*(s.address for s in servers))
    servers[0].close()
    client.pause()
    assert client.addresses == [servers[1].address]
    warning = capsys.readouterr().err
    assert "going on with 1 server(s)" in warning and servers[0].address in warning
    servers[1].weight_version = "1"
    meta = WeightUpdateMeta(type="distributed", version=1, timeout=60)
    client.update_weights(meta).result(timeout=60)
    client.resume()
    assert generate(client, request())[0].output_versions == [1] * 6
    servers[1].close()
    with pytest.raises(RuntimeError, match=f"no generation server is left: .*{servers[1].address}"):
        client.pause()


def test_a_server_gone_after_its_update_is_not_waited_for(servers, connect):
    client = connect(*(s.address for s in servers))
    servers[1].weight_version = "1"
    servers[0].close()
    meta = WeightUpdateMeta(type="distributed", version=1, timeout=600)
    client.update_weights(meta).result(timeout=60)
    assert client.addresses == [servers[1].address]


def test_a_dropped_server_that_answers_again_joins_the_next_update(servers, connect, monkeypatch):
    """It is paused with the others, and gets no request before it serves what they do."""
    client = connect(*(s.address for s in servers))
    lost, other = servers

    def update(version, *got_it):
        client.pause()
        for server in got_it:
            server.weight_version = str(version)
        meta = WeightUpdateMeta(type="distributed", version=version, timeout=60)
        client.update_weights(meta).result(timeout=60)
        client.resume()

    client.pause()
    client.drop_servers({lost.address: f"server {lost.address}: silent"})
    assert client.addresses == [other.address]
    other.weight_version = "1"
    client.update_weights(WeightUpdateMeta(type="distributed", version=1, timeout=60)).result(60)
    client.resume()
    assert [path for path, _ in lost.calls] == ["/pause_generation"]
    for _ in range(3):
        generate(client, request())
    assert not lost.requests and len(other.requests) == 3

    client.pause()
    assert sorted(client.addresses) == sorted([lost.address, other.address])
    client.resume()  # without an update: what it holds is still unknown
    for _ in range(3):
        generate(client, request())
    assert not lost.requests

    update(2, *servers)
    for _ in range(2):
        assert generate(client, request())[0].output_versions == [2] * 6
    assert lost.requests


def test_servers_join_and_leave_as_the_file_of_addresses_says(servers, connect, tmp_path):
    """1 -> 2 -> 1: a new one gets requests once it has an update's weights; one that leaves goes on
    by itself, and what it was asked is not lost."""
    first, second = servers
    file = tmp_path / "servers"
    file.write_text(f"{first.address}  # the first\n")
    client = connect(addresses_file=str(file))
    assert client.addresses == [first.address]

    def update(version, *got_it):
        client.pause()
        for server in got_it:
            server.weight_version = str(version)
        meta = WeightUpdateMeta(type="distributed", version=version, timeout=60)
        client.update_weights(meta).result(timeout=60)
        client.resume()

    file.write_text(f"{first.address}\n\nhttp://{second.address}\n")
    generate(client, request(), request())
    assert not second.requests
    update(1, first, second)
    assert client.addresses == [first.address, second.address]
    for _ in range(2):
        assert generate(client, request())[0].output_versions == [1] * 6
    assert second.requests

    file.write_text(f"{second.address}\n")
    update(2, second)
    assert client.addresses == [second.address]
    assert [path for path, _ in first.calls][-1] == "/continue_generation"
    asked = len(first.requests)
    for _ in range(2):
        assert generate(client, request())[0].output_versions == [2] * 6
    assert len(first.requests) == asked

    # no address, and nobody there
    for version, text in ((3, "nowhere\n"), (4, f"127.0.0.1:{free_port()}\n")):
        file.write_text(text)
        update(version, second)
        assert client.addresses == [second.address]
    file.unlink()
    update(5, second)
    assert generate(client, request())[0].output_versions == [5] * 6


def test_what_a_dropped_server_was_asked_is_asked_of_another(servers, connect, monkeypatch):
    monkeypatch.setattr("megarl.utils.http.RETRY_DELAY", 0.01)
    client = connect(*(s.address for s in servers), request_timeout=600.0)
    lost, other = servers
    lost.delay = 600.0

    async def dropped():
        task = asyncio.ensure_future(client.agenerate(request()))
        while not lost.requests:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(client.drop_servers, {lost.address: "silent"})
        return await asyncio.wait_for(task, 5)

    assert asyncio.run(dropped()).output_len == 6
    assert len(lost.requests) == len(other.requests) == 1


def test_a_server_that_was_started_again_gets_no_more_requests(
    servers, connect, monkeypatch, capsys
):
    """Its first weights are of no version; what it answers with them is asked of another one."""
    monkeypatch.setattr("megarl.utils.http.RETRY_DELAY", 0.01)
    client = connect(*(s.address for s in servers))
    for server in servers:
        server.weight_version = "1"
    client.update_weights(WeightUpdateMeta(type="distributed", version=1, timeout=60)).result(60)
    servers[0].fail, servers[0].weight_version = ["drop"], "default"
    for _ in range(4):
        assert generate(client, request())[0].output_versions == [1] * 6
    assert len(servers[0].requests) == 1  # the one that was lost with it
    servers[1].weight_version = "default"  # nobody noticed
    with pytest.raises(RuntimeError, match=r"no generation server is left.*was started again"):
        generate(client, request())
    assert f"{servers[0].address}" in capsys.readouterr().err


def test_the_end_resumes_what_is_paused(servers, connect):
    client = connect(*(s.address for s in servers))
    client.pause()
    client.destroy()
    assert [s.calls[-1][0] for s in servers] == ["/continue_generation"] * 2


def test_requests_name_the_adapter_of_the_last_update(servers, connect):
    client = connect(servers[0].address)
    generate(client, request())
    servers[0].weight_version = "4"
    meta = WeightUpdateMeta(type="adapter", version=4, path="shared", timeout=60)
    client.update_weights(meta).result(60)
    generate(client, request(), request())
    asked = [r.get("lora_path") for r in servers[0].requests]
    assert asked == [None, ["megarl-v4", "megarl-v4"]]


def before_a_request(client, monkeypatch, then):
    """Calls `then` once, when the next request is made and not yet sent."""
    pool = client.opened().pool
    send = pool.call

    async def late(*args, **kw):
        monkeypatch.setattr(pool, "call", send)
        await asyncio.to_thread(then)
        return await send(*args, **kw)

    monkeypatch.setattr(pool, "call", late)


def test_a_request_that_crosses_an_update_is_asked_again(servers, connect, monkeypatch):
    """It names an adapter that the server has unloaded meanwhile."""
    server, client = servers[0], connect(servers[0].address)
    gone = (400, {"error": {"message": "no such adapter"}})

    def update(version):
        client.pause()
        server.weight_version = str(version)
        meta = WeightUpdateMeta(type="adapter", version=version, path="shared", timeout=60)
        client.update_weights(meta).result(60)
        client.resume()

    def meanwhile():
        update(2)
        server.fail = [gone]

    update(1)
    before_a_request(client, monkeypatch, meanwhile)
    assert generate(client, request())[0].output_versions == [2] * 6
    assert [r["lora_path"] for r in server.requests] == [["megarl-v1"], ["megarl-v2"]]
    server.fail = [gone]
    with pytest.raises(RuntimeError, match="no such adapter"):
        generate(client, request())


def updated(client, server, version):
    client.pause()
    server.weight_version = str(version)
    client.update_weights(WeightUpdateMeta(type="distributed", version=version)).result(60)
    client.resume()


async def episode(client, version, *, then):
    """An episode that begins at `version`, and asks before and after `then` is called."""
    current_episode.set(EpisodeContext(began=version))
    await client.agenerate(request())
    await asyncio.to_thread(then)
    await client.agenerate(request())


@pytest.mark.parametrize("mode", ["flush", "keep"])
def test_requests_share_kv_within_a_version_and_with_keep_within_an_episode(servers, connect, mode):
    server, client = servers[0], connect(servers[0].address, kv_after_sync=mode)
    updated(client, server, 1)
    asyncio.run(episode(client, 1, then=lambda: updated(client, server, 2)))
    asyncio.run(episode(client, 2, then=lambda: None))
    keys = [r["extra_key"] for r in server.requests]
    first, second = keys[0], keys[2]
    assert first.endswith("-v1") and second == first[:-1] + "2"
    assert keys == [first, first if mode == "keep" else second, second, second]
    client.set_version(0)  # back to older weights, after which other weights come
    updated(client, server, 1)
    generate(client, request())
    assert server.requests[-1]["extra_key"] not in keys
    other = connect(server.address)
    other.set_version(1)
    generate(other, request())
    assert server.requests[-1]["extra_key"] not in keys


def test_a_treatment_of_kv_that_the_pause_undoes_is_refused(connect):
    sync = WeightSyncConfig(pause_mode="retract")
    with pytest.raises(ValueError, match=r"kv_after_sync=keep .*pause_mode=in_place"):
        connect("127.0.0.1:1", sync=sync, kv_after_sync="keep")


def test_a_server_that_fails_for_too_long_is_a_failed_rollout(servers, connect, monkeypatch):
    monkeypatch.setattr("megarl.utils.http.RETRY_DELAY", 0.01)
    servers[0].fail = [(500, {"error": {"message": "out of memory"}})] * 1000
    client = connect(servers[0].address, request_timeout=0.2)
    with pytest.raises(RolloutFailed) as failed:
        generate(client, request())
    assert failed.value.kind == "server" and servers[0].address in str(failed.value)
    assert "out of memory" in str(failed.value) and len(servers[0].requests) > 3
    servers[0].fail = []
    assert generate(client, request())[0].output_len == 6


def test_where_no_server_answers_none_is_left(servers, connect, monkeypatch):
    """It is an error of the run, not of a rollout."""
    monkeypatch.setattr("megarl.utils.http.RETRY_DELAY", 0.01)
    client = connect(*(s.address for s in servers), request_timeout=0.2)
    for server in servers:
        server.close()
    with pytest.raises(RuntimeError) as lost:
        generate(client, request())
    assert not isinstance(lost.value, RolloutFailed) and client.addresses == []
    with pytest.raises(RuntimeError):
        generate(client, request())


@pytest.mark.parametrize("failure", ["drop", (503, {"message": "starting"})])
def test_a_server_that_comes_back_goes_on_under_new_ids(servers, connect, monkeypatch, failure):
    """SGLang knows the ids of a lost connection for seconds, and refuses them meanwhile."""
    monkeypatch.setattr("megarl.utils.http.RETRY_DELAY", 0.01)
    servers[0].fail = [failure] * 6
    client = connect(servers[0].address)
    assert [a.output_len for a in generate(client, request(), request())] == [6, 6]
    rids = [rid for r in servers[0].requests for rid in r["rid"]]
    assert len(rids) == len(set(rids)) == 14


def test_refused_request_is_not_retried(servers, connect):
    servers[0].fail = [(400, {"error": {"message": "longer than the context length"}})]
    client = connect(servers[0].address)
    with pytest.raises(RuntimeError, match="400: longer than the context length"):
        generate(client, request())
    assert len(servers[0].requests) == 1


@pytest.mark.parametrize("status", (429, 503))
def test_a_server_that_asks_for_time_gets_it(servers, connect, status):
    """While another has none to ask for, that one is asked."""
    busy, other = servers
    busy.fail = [(status, {"message": "full"}, {"Retry-After": "1"})]
    begun = time.monotonic()
    assert generate(connect(busy.address), request())[0].output_len == 6
    assert len(busy.requests) == 2 and time.monotonic() - begun >= 1

    busy.fail = [(status, {"message": "full"}, {"Retry-After": "1000"})]
    client = connect(busy.address, other.address)
    for _ in range(4):
        assert generate(client, request())[0].output_len == 6
    assert len(busy.requests) == 3 and len(other.requests) == 4


def test_retry_after_is_seconds_or_a_date():
    later = formatdate(time.time() + 100, usegmt=True)
    assert retry_after("7") == 7.0 and 90 < retry_after(later) <= 100
    assert retry_after(formatdate(0, usegmt=True)) == 0.0
    assert retry_after(None) is retry_after("soon") is retry_after("nan") is None


def test_delays_between_tries_double_within_a_bound_and_differ():
    for attempt in range(40):
        whole = min(RETRY_DELAY * 2**attempt, MAX_RETRY_DELAY)
        delays = [backoff(attempt) for _ in range(20)]
        assert all(whole / 2 <= d <= whole for d in delays) and len(set(delays)) > 1


def turns(client, count, home):
    async def ask():
        current_episode.set(EpisodeContext(home=home))
        return [await client.agenerate(request()) for _ in range(count)]

    return asyncio.run(ask())


def test_an_episodes_requests_stay_with_one_server_until_it_fails(servers, connect, monkeypatch):
    monkeypatch.setattr("megarl.utils.http.RETRY_DELAY", 0.01)
    client, homes = connect(*(s.address for s in servers)), [Home() for _ in range(4)]
    for _ in range(3):
        for home in homes:
            turns(client, 2, home)
    assert sorted(h.address for h in homes) == sorted([s.address for s in servers] * 2)
    assert [len(s.requests) for s in servers] == [12, 12]
    lost, other = servers
    lost.fail = ["drop"] * 100
    turns(client, 1, next(h for h in homes if h.address == lost.address))
    for home in homes:
        turns(client, 3, home)
    assert {h.address for h in homes} == {other.address}
    assert len(lost.requests) <= 12 + 2


def test_without_affinity_an_episodes_requests_are_spread(servers, connect):
    turns(connect(*(s.address for s in servers), affinity=0.0), 8, Home())
    assert [len(s.requests) for s in servers] == [4, 4]


def test_an_overloaded_server_is_left(servers, connect):
    """Each request has 9 tokens: the fourth finds 27 where the other would have 9 with it."""
    client, (full, idle) = connect(*(s.address for s in servers)), servers
    full.delay = idle.delay = 1.0
    home = Home(full.address)

    async def crowd():
        tasks = []
        for i in range(5):
            tasks.append(asyncio.ensure_future(asyncio.to_thread(turns, client, 1, home)))
            while len(full.requests) + len(idle.requests) == i:
                await asyncio.sleep(0.01)
        await asyncio.gather(*tasks)

    asyncio.run(crowd())
    assert len(full.requests) == 3 and len(idle.requests) == 2
    assert home.address == idle.address


def test_drain_lets_answers_end_before_it_pauses(servers, connect):
    client = connect(*(s.address for s in servers), sync=WeightSyncConfig(pause_mode="drain"))
    for server in servers:
        server.delay = 0.5

    async def under_way():
        task = asyncio.ensure_future(client.agenerate(request()))
        while not any(s.requests for s in servers):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(client.pause)
        assert task.done() and task.result().output_len == 6
        late = asyncio.ensure_future(client.agenerate(request()))
        await asyncio.sleep(0.2)
        assert not late.done() and sum(len(s.requests) for s in servers) == 1
        await asyncio.to_thread(client.resume)
        return await asyncio.wait_for(late, 5)

    assert asyncio.run(under_way()).output_len == 6
    assert [s.calls[0] for s in servers] == [("/pause_generation", {"mode": "abort"})] * 2


def test_what_a_drain_waits_for_too_long_is_interrupted(servers, connect, capsys):
    sync = WeightSyncConfig(pause_mode="drain", timeout=0.5)
    client = connect(servers[0].address, sync=sync)
    servers[0].delay = 2.0

    async def under_way():
        task = asyncio.ensure_future(client.agenerate(request()))
        while not servers[0].requests:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(client.pause)
        assert not task.done() and servers[0].calls
        await asyncio.to_thread(client.resume)
        return await asyncio.wait_for(task, 5)

    assert asyncio.run(under_way()).output_len == 6
    assert "weight_sync.pause_mode=drain" in capsys.readouterr().err


def test_a_drain_does_not_wait_for_a_server_that_is_gone(servers, connect, monkeypatch):
    monkeypatch.setattr("megarl.utils.http.RETRY_DELAY", 0.01)
    sync = WeightSyncConfig(pause_mode="drain", server_timeout=0.5)
    client = connect(*(s.address for s in servers), sync=sync, request_timeout=600.0)
    silent, other = servers
    silent.delay = 600.0

    async def under_way():
        current_episode.set(EpisodeContext(home=Home(silent.address)))
        task = asyncio.ensure_future(client.agenerate(request()))
        while not silent.requests:
            await asyncio.sleep(0.01)
        silent.hang = True
        await asyncio.to_thread(client.pause)
        assert client.addresses == [other.address] and not other.requests
        await asyncio.to_thread(client.resume)
        silent.hang = False
        return await task

    assert asyncio.run(under_way()).output_len == 6
    assert len(silent.requests) == len(other.requests) == 1


def answer(**meta):
    """A good one, two tokens, but for `meta`."""
    known = {
        "finish_reason": {"type": "length", "length": 2},
        "output_token_logprobs": [[-1.0, 5, None], [-2.0, 6, None]],
        "weight_version": "default",
    }
    return {"output_ids": [5, 6], "meta_info": known | meta}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("<html>\n<p>a shop</p>", "answered '<html> <p>a shop</p>' to 1 samples"),
        ([], "to 1 samples"),
        ([{"text": "x"}], "to 1 samples"),
        ([{"meta_info": "x"}], "to 1 samples"),
        ([answer(), answer()], "to 1 samples"),
        (answer(finish_reason="stop"), "finish_reason stop is no object"),
        (answer(finish_reason={"type": "bored"}), "bored"),
        (answer(output_token_logprobs=[[-1.0, 5]]), "2 tokens came with 1 logprobs"),
        (answer(output_token_logprobs=None), "without output_token_logprobs"),
        (answer(output_token_logprobs="x"), "no list of"),
        (answer(output_token_logprobs=[[-1.0, "5"], [-1.0, 6]]), "no list of"),
        (answer(output_token_logprobs=[[None, 5], [-1.0, 6]]), "no list of"),
        (answer(output_token_logprobs=[[float("nan"), 5], [-1.0, 6]]), "a logprob of nan"),
        (answer(weight_versions=[{"version": "default"}]), "weight_versions"),
        (answer(weight_versions=[{"version": "default", "start": 0, "end": 1}]), "do not cover"),
        (answer(weight_version="mine"), "'mine' is not a number"),
        (answer() | {"output_ids": [1] * 9} | {"meta_info": answer()["meta_info"] | {
            "output_token_logprobs": [[-1.0, 1]] * 9}}, "9 tokens where 6 were asked for"),
    ],
)  # fmt: skip
def test_junk_is_one_line_that_names_who_sent_it(servers, connect, said, words):
    """It is asked for once, and trained on never."""
    servers[0].fail = [(200, said)]
    client = connect(servers[0].address)
    with pytest.raises((RuntimeError, ValueError)) as info:
        generate(client, request())
    text = str(info.value)
    assert f"server {servers[0].address}: /generate" in text and words in text
    assert "\n" not in text and len(servers[0].requests) == 1


@pytest.mark.parametrize(
    ("status", "page", "words"),
    [
        (404, "<html>\nNo such file\n</html>", "/health answered 404: <html> No such file </html>"),
        (200, "<html>\nWelcome\n</html>", "/model_info answered 200: <html> Welcome </html>"),
        (200, '{"name": "shop"}', "/model_info answered 200: {'name': 'shop'} instead of a JSON"),
    ],
)
def test_another_service_at_the_address_is_known_at_once(status, page, words):
    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *args): ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as http:
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        address = f"127.0.0.1:{http.server_port}"
        client = RemoteSGLangEngine(RolloutConfig(addresses=[address], setup_timeout=600))
        with pytest.raises(RuntimeError) as info:
            client.initialize()
        http.shutdown()
    text = str(info.value)
    assert f"server {address}: {words}" in text and "correct rollout.addresses" in text
    assert "\n" not in text


def test_every_call_carries_the_jobs_token(servers, connect, monkeypatch):
    monkeypatch.setenv("MEGARL_JOB_TOKEN", "the-secret")
    client = connect(servers[0].address)
    generate(client, request())
    client.pause()
    call_json("POST", servers[0].address, "/continue_generation", {}, timeout=60)
    assert set(servers[0].authorizations) == {"Bearer the-secret"}
    servers[0].pause_answer = web.json_response({"error": "Unauthorized"}, status=401)
    with pytest.raises(RuntimeError, match=r"401: Unauthorized \(set MEGARL_JOB_TOKEN"):
        client.pause()
    servers[0].pause_answer = None


def test_a_request_that_takes_too_long_goes_on_with_its_tokens(servers, connect):
    server = servers[0]
    server.delay, server.written = 60.0, 2
    client = connect(server.address, request_timeout=0.2)
    for answer in generate(client, request(rid="a"), request(rid="b")):
        assert answer.output_tokens == [103, 104, 105, 106, 107, 108]
        assert answer.stop_reason == "length"
    asked = [(len(r["input_ids"][0]), r["sampling_params"][0]["max_new_tokens"])
             for r in server.requests]  # fmt: skip
    assert asked == [(3, 6), (5, 4), (7, 2)]
    aborted = [body["rid"] for path, body in server.calls if path == "/abort_request"]
    assert sorted(aborted) == sorted(rid for r in server.requests for rid in r["rid"])


def test_the_time_of_a_pause_is_not_a_requests_time(servers, connect):
    """Where the server keeps requests meanwhile."""
    server = servers[0]
    sync = WeightSyncConfig(pause_mode="in_place")
    client = connect(server.address, request_timeout=0.3, sync=sync, kv_after_sync="keep")
    server.delay = 1.2
    future = ThreadPoolExecutor(1).submit(generate, client, request())
    while not server.requests:
        time.sleep(0.01)
    client.pause()
    assert future.result()[0].output_len == 6
    client.resume()
    assert len(server.requests) == 1
    assert "/abort_request" not in [path for path, _ in server.calls]


def test_a_server_that_brings_no_tokens_in_time_is_named(servers, connect, monkeypatch):
    monkeypatch.setattr("megarl.rollout.generation.ABORT_TIMEOUT", 0.1)
    servers[0].delay = 60.0
    client = connect(servers[0].address, request_timeout=0.1)
    with pytest.raises(RuntimeError) as lost:
        generate(client, request())
    assert servers[0].address in str(lost.value)


def test_servers_share_the_load(servers, connect):
    client = connect(*(s.address for s in servers))

    async def many():
        for s in servers:
            s.delay = 0.2
        big = client.agenerate_many([request(rid=str(i)) for i in range(4)])
        tasks = [asyncio.ensure_future(big)]
        await asyncio.sleep(0.05)
        tasks += [asyncio.ensure_future(client.agenerate(request())) for _ in range(4)]
        await asyncio.gather(*tasks)

    asyncio.run(many())
    samples = sorted(sum(len(r["rid"]) for r in s.requests) for s in servers)
    assert samples == [4, 4]


def test_unreachable_servers_are_named_with_the_fix(servers):
    servers[1].healthy = False
    dead = f"127.0.0.1:{free_port()}"
    addresses = [servers[0].address, servers[1].address, dead]
    client = RemoteSGLangEngine(RolloutConfig(addresses=addresses, setup_timeout=0.5))
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="2 of 3 generation servers were not reachable") as info:
        client.initialize()
    text = str(info.value)
    assert dead in text and servers[1].address in text and "rollout.addresses" in text
    assert servers[0].address not in text
    deadline = time.monotonic() + 10.0  # a call's thread ends a moment after its answer
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_addresses_come_from_the_environment(servers, connect, monkeypatch):
    monkeypatch.setenv("MEGARL_LLM_SERVER_ADDRS", ", ".join(s.address for s in servers))
    assert connect().addresses == [s.address for s in servers]
    monkeypatch.delenv("MEGARL_LLM_SERVER_ADDRS")
    with pytest.raises(ValueError, match="MEGARL_LLM_SERVER_ADDRS"):
        connect()
    with pytest.raises(ValueError, match="'nowhere'"):
        connect("nowhere")


def test_check_health_names_the_sick(servers, connect):
    client = connect(*(s.address for s in servers))
    client.check_health()
    servers[1].healthy = False
    with pytest.raises(RuntimeError, match=f"{servers[1].address}.*503"):
        client.check_health()


def test_update_weights_resolves_when_every_server_serves_the_version(servers, connect):
    client = connect(*(s.address for s in servers))
    future = client.update_weights(WeightUpdateMeta(type="distributed", version=3, timeout=60))
    servers[0].weight_version = "3"
    time.sleep(0.3)
    assert not future.done() and client.get_version() == 0
    servers[1].weight_version = "3"
    future.result(timeout=60)
    assert client.get_version() == 3


def test_update_weights_names_the_laggards(servers, connect):
    client = connect(*(s.address for s in servers))
    servers[0].weight_version = "3"
    future = client.update_weights(WeightUpdateMeta(type="distributed", version=3, timeout=0.3))
    with pytest.raises(TimeoutError, match=f"{servers[1].address} serves default") as info:
        future.result(timeout=60)
    assert servers[0].address not in str(info.value)
    assert client.get_version() == 0


def test_foreign_weight_versions_are_refused(servers, connect):
    servers[0].weight_version = "nightly"
    client = connect(servers[0].address)
    with pytest.raises(ValueError, match="'nightly'"):
        generate(client, request())


def test_seeds_are_keyed_when_gconfig_has_one(servers, connect):
    client = connect(servers[0].address)

    def seeds(*reqs):
        generate(client, *reqs)
        return [p.get("sampling_seed") for p in servers[0].requests[-1]["sampling_params"]]

    assert seeds(request()) == [None]
    first = seeds(request(max_new_tokens=6), request())
    assert first == [None, None]
    keyed = request()
    keyed.gconfig.seed = 11
    a = seeds(keyed, keyed)
    b = seeds(keyed, keyed)
    assert len({*a, *b}) == 4
    client.set_version(1)
    assert {*a, *b}.isdisjoint(seeds(keyed, keyed))
    client.set_version(0)
    assert seeds(keyed, keyed, keyed, keyed) == a + b
    assert seeds(request(seed=42)) == [42]


class OnePromptManyTimes(RolloutWorkflow):
    """Asks for samples of one prompt as scripts do: one by one, at the same time."""

    async def arun_episode(self, engine, data):
        reqs = [request(max_new_tokens=1) for _ in range(4)]
        for r in reqs:
            r.gconfig.seed = 11
        await asyncio.gather(*map(engine.agenerate, reqs))
        return trajectory([5], version=0)


def test_samples_of_one_prompt_have_seeds_of_their_own(servers, connect):
    server, seen = servers[0], []
    for _ in range(2):
        client = connect(server.address)
        client.rollout_batch([{"row_id": 1}, {"row_id": 2}], workflow=OnePromptManyTimes())
        asked, server.requests[:] = list(server.requests), []
        seen.append([p["sampling_seed"] for r in asked for p in r["sampling_params"]])
    assert len(set(seen[0])) == 8 and sorted(seen[0]) == sorted(seen[1])


def test_a_builder_makes_a_workflow_for_each_call(servers, connect):
    client, built = connect(servers[0].address), []

    def builder():
        built.append(OnePromptManyTimes())
        return built[-1]

    for row in range(2):
        client.submit({"row_id": row}, workflow_builder=builder)
    assert len(client.wait(2, timeout=60)["rewards"]) and len(built) == 2
    assert len(client.rollout_batch([{"row_id": 1}], workflow_builder=builder)) and len(built) == 3
    for flows in ({}, {"workflow": built[0], "workflow_builder": builder}):
        with pytest.raises(ValueError, match="workflow_builder"):
            client.submit({"row_id": 0}, **flows)


def test_stable_seed_is_the_same_in_every_process():
    assert stable_seed(1, 2, "x") == 2139474876
    assert 0 <= stable_seed(0) < 2**31


def test_destroy_leaves_no_thread_and_may_be_repeated(servers):
    before = threading.active_count()
    client = RemoteSGLangEngine(RolloutConfig(addresses=[servers[0].address]))
    client.initialize()
    servers[0].delay = 30.0
    future = client.opened().loop.submit(client.agenerate(request()))
    while not servers[0].requests:
        time.sleep(0.01)
    client.destroy()
    client.destroy()
    assert future.cancelled()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="initialize"):
        client.check_health()


def test_a_request_by_text_and_the_text_of_its_answer(servers):
    class Words:
        def __call__(self, text, add_special_tokens):
            return {"input_ids": [int(w) for w in text.split()]}

        def decode(self, ids, skip_special_tokens):
            return " ".join(map(str, ids))

    config = RolloutConfig(addresses=[servers[0].address])
    gconfig = GenerationHyperparameters(n_samples=4).new(n_samples=1, max_new_tokens=2)
    asked = ModelRequest(text="7 8 9", gconfig=gconfig)
    client = RemoteSGLangEngine(config, tokenizer=Words())
    try:
        client.initialize()
        (answer,) = generate(client, asked)
    finally:
        client.destroy()
    assert answer.input_tokens == asked.input_ids == [7, 8, 9] and answer.completion == "103 104"
    plain = RemoteSGLangEngine(config)
    try:
        plain.initialize()
        with pytest.raises(ValueError, match="has text and no input_ids: give the client a tok"):
            generate(plain, ModelRequest(text="7 8 9", gconfig=gconfig))
    finally:
        plain.destroy()


ENDS_BY_AN_ERROR = """
import asyncio, sys
from megarl.api.records import ModelRequest
from megarl.config.rollout import RolloutConfig
from megarl.rollout.client import RemoteSGLangEngine
client = RemoteSGLangEngine(RolloutConfig(addresses=[sys.argv[1]]))
client.initialize()
asyncio.run(client.agenerate(ModelRequest(input_ids=[1, 2])))
client.pause()
raise OverflowError("mine")
"""


def test_a_script_that_ends_by_an_error_shows_that_error_last(servers):
    """And leaves no server paused."""
    command = [sys.executable, "-c", ENDS_BY_AN_ERROR, servers[0].address]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "OverflowError: mine"
    assert servers[0].calls[-1][0] == "/continue_generation"
