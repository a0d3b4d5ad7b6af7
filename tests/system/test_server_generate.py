"""/generate of the embedded server: against HF, and as SGLang answers it."""

from __future__ import annotations

import http.client
import json

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.embedded_server import embedded_server
from tests.teaching import check_teacher
from tests.tiny import VOCAB, save_tiny, tiny_hf
from tests.tiny_tokenizer import save_tokenizer

CONTEXT = 200
PROMPT = [5, 6, 7, 8, 100, 101]


@pytest.fixture(scope="module")
def model():
    return tiny_hf("qwen3", tie=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = save_tiny(tmp_path_factory.mktemp("model"), "qwen3", tie=True)
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def server(model_dir, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "server"
    flags = ("--dtype", "float32", "--context-length", str(CONTEXT), "--random-seed", "1")
    with embedded_server(model_dir, *flags, log=log) as s:
        yield s


@pytest.fixture(scope="module")
def exact(model_dir, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "exact"
    flags = ("--dtype", "float32", "--deterministic", "--max-running-requests", "24")
    with embedded_server(model_dir, *flags, log=log) as s:
        yield s


def logprobs_of(answer):
    return torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])


def hf_logprobs(model, prompt, output, temperature=1.0):
    """log p of each output token at the temperature, from one plain forward."""
    ids = torch.tensor([prompt + output])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(output)[:, None])[:, 0]


def prompts(count, seed=0, longest=60):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=g).tolist()
    return [torch.randint(3, VOCAB, (n,), generator=g).tolist() for n in lengths]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_equal_hf(server, model, temperature):
    given = prompts(12)
    params = [
        {"temperature": temperature, "max_new_tokens": 3 + 4 * i, "ignore_eos": True}
        for i in range(12)
    ]
    answers = server.ok(
        "/generate", {"input_ids": given, "sampling_params": params, "return_logprob": True}
    )
    for p, a, want in zip(given, answers, params, strict=True):
        assert len(a["output_ids"]) == want["max_new_tokens"]
        assert [e[1] for e in a["meta_info"]["output_token_logprobs"]] == a["output_ids"]
        expected = hf_logprobs(model, p, a["output_ids"], temperature or 1.0)
        torch.testing.assert_close(logprobs_of(a), expected, atol=1e-5, rtol=0)


def test_greedy_equals_hf_generate(server, model):
    want = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=20, min_new_tokens=20, do_sample=False
    )
    got = server.generate(PROMPT, temperature=0, max_new_tokens=20, ignore_eos=True)
    assert got["output_ids"] == want[0, len(PROMPT) :].tolist()


def test_truncation_bounds_what_is_drawn_and_not_what_is_reported(server, model):
    for params in ({"top_k": 2}, {"top_p": 0.05}):
        answer = server.generate(PROMPT, max_new_tokens=60, ignore_eos=True, **params)
        output = answer["output_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + output])).logits[0, len(PROMPT) - 1 : -1]
        likelier = logits > logits.gather(1, torch.tensor(output)[:, None])
        assert int(likelier.sum(1).max()) < params.get("top_k", VOCAB)
        assert float((logits.softmax(-1) * likelier).sum(1).max()) <= params.get("top_p", 1.0)
        expected = hf_logprobs(model, PROMPT, output)
        torch.testing.assert_close(logprobs_of(answer), expected, atol=1e-5, rtol=0)


def test_top_k_one_equals_greedy(server):
    greedy = server.generate(PROMPT, temperature=0, max_new_tokens=30)
    top_one = server.generate(PROMPT, temperature=1.0, top_k=1, max_new_tokens=30)
    assert greedy["output_ids"] == top_one["output_ids"]


def test_shape_of_the_answer(server):
    answer = server.generate(
        PROMPT, body={"rid": "mine"}, temperature=0, max_new_tokens=4, ignore_eos=True
    )
    meta = answer["meta_info"]
    assert set(answer) == {"text", "output_ids", "meta_info"}
    assert meta["id"] == "mine" and meta["prompt_tokens"] == 6 and meta["completion_tokens"] == 4
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert meta["weight_version"] == "default" and meta["num_retractions"] == 0
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 4}]
    assert meta["cached_tokens"] == 0 and meta["e2e_latency"] > 0
    assert [e[1:] for e in meta["output_token_logprobs"]] == [
        [token, None] for token in answer["output_ids"]
    ]
    nothing = server.generate(PROMPT, max_new_tokens=0)
    assert nothing["output_ids"] == [] and nothing["meta_info"]["output_token_logprobs"] == []


def test_a_group_shares_its_prompt_and_differs_in_its_samples(server):
    params = [{"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": i} for i in range(6)]
    answers = server.generate([PROMPT] * 6, body={"sampling_params": params})
    assert len({tuple(a["output_ids"]) for a in answers}) == 6
    assert sorted(a["meta_info"]["cached_tokens"] for a in answers) == [0] + [5] * 5
    again = server.generate([PROMPT] * 6, body={"sampling_params": params})
    assert [a["output_ids"] for a in again] == [a["output_ids"] for a in answers]
    keyed = server.generate([PROMPT] * 4, body={"extra_key": ["a", "b", "a", ""]}, max_new_tokens=1)
    assert sorted(a["meta_info"]["cached_tokens"] for a in keyed) == [0, 0, 0, 5]


def test_batch_of_items_keeps_order_and_rids(server):
    body = {"rid": ["a", "b"], "return_logprob": [True, False]}
    answers = server.generate(
        [[5, 6], [7, 8, 9]], body=body | {"sampling_params": [{"max_new_tokens": 2}] * 2}
    )
    assert [a["meta_info"]["id"] for a in answers] == ["a", "b"]
    assert [a["meta_info"]["prompt_tokens"] for a in answers] == [2, 3]
    assert ["output_token_logprobs" in a["meta_info"] for a in answers] == [True, False]
    two = server.generate([[5, 6], [7, 8]], body={"rid": "r"}, max_new_tokens=1)
    assert [a["meta_info"]["id"] for a in two] == ["r_0", "r_1"]


def test_stop_tokens(server):
    stops = list(range(3, 40))
    answer = server.generate(PROMPT, max_new_tokens=150, stop_token_ids=stops)
    *before, last = answer["output_ids"]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": last}
    assert last in [1, *stops] and not set(before) & {1, *stops}
    params = {"max_new_tokens": 150, "sampling_seed": 4, "temperature": 0.9}
    trimmed = server.generate(PROMPT, stop_token_ids=stops, **params)
    untrimmed = server.generate(PROMPT, **params)
    written = len(trimmed["output_ids"])
    assert untrimmed["output_ids"][:written] == trimmed["output_ids"]
    one_less = server.generate(PROMPT, **params | {"max_new_tokens": written - 1})
    assert trimmed["text"] == one_less["text"]


def test_ignore_eos_and_min_new_tokens(server):
    everything = list(range(3, VOCAB))  # with EOS (1): only ids 0 and 2 are no stop tokens
    through = server.generate(PROMPT, max_new_tokens=40, stop_token_ids=everything, ignore_eos=True)
    assert len(through["output_ids"]) == 40
    held = server.generate(
        PROMPT, max_new_tokens=40, min_new_tokens=7, stop_token_ids=everything, temperature=1.0
    )
    assert set(held["output_ids"][:7]) <= {0, 2} and len(held["output_ids"]) >= 8
    assert held["meta_info"]["finish_reason"]["type"] == "stop"


def test_stop_strings(server):
    params = {"max_new_tokens": 150, "sampling_seed": 11, "ignore_eos": True}
    free = server.generate(PROMPT, **params)
    stop = free["text"][20:23]
    answer = server.generate(PROMPT, stop=[stop, "never there"], **params)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["text"] == free["text"][: free["text"].index(stop)]
    assert len(answer["output_ids"]) < 150


def test_seeds_are_reproducible_in_any_company(server):
    params = {"temperature": 1.0, "max_new_tokens": 25, "ignore_eos": True}
    alone = server.generate(PROMPT, sampling_seed=7, **params)
    others = [server.start([p, p], **params) for p in prompts(8, seed=2)]
    busy = server.generate(PROMPT, sampling_seed=7, **params)
    other_seed = server.generate(PROMPT, sampling_seed=8, **params)
    assert busy["output_ids"] == alone["output_ids"] != other_seed["output_ids"]
    unseeded = {tuple(server.generate(PROMPT, **params)["output_ids"]) for _ in range(3)}
    assert len(unseeded) == 3
    for future in others:
        assert all(len(a["output_ids"]) == 25 for a in future.result(60))


def test_a_seeded_sample_continues_as_it_would_have_gone_on(server):
    """The client resumes an aborted sample as a longer prompt: the same randomness must follow."""
    params = {"temperature": 1.0, "sampling_seed": 5, "ignore_eos": True}
    whole = server.generate(PROMPT, max_new_tokens=24, **params)["output_ids"]
    head = server.generate(PROMPT, max_new_tokens=10, **params)["output_ids"]
    tail = server.generate(PROMPT + head, max_new_tokens=14, **params)["output_ids"]
    assert head + tail == whole


def test_deterministic_mode_is_bitwise_independent_of_the_rest(exact):
    """Rows that come, go and move, longer neighbours, a grown cache: not one bit may change."""
    given = prompts(6, seed=3)
    params = {"temperature": 0.8, "top_p": 0.95, "max_new_tokens": 40, "ignore_eos": True}

    def one(i):
        return exact.start(given[i], sampling_seed=i, **params)

    alone = [one(i).result(60) for i in range(6)]
    noise = [
        exact.start(p, max_new_tokens=5 + 11 * i, ignore_eos=True)
        for i, p in enumerate(prompts(12, seed=9, longest=150))
    ]
    exact.wait_running(3)
    busy = [f.result(60) for f in [one(i) for i in range(6)]]
    batch = exact.generate(
        [given[0]] * 4 + given[1:],
        body={"sampling_params": [params | {"sampling_seed": i} for i in (0, 0, 0, *range(6))]},
    )[3:]
    for a, b, c in zip(alone, busy, batch, strict=True):
        told = [answer["meta_info"]["output_token_logprobs"] for answer in (a, b, c)]
        assert told[0] == told[1] == told[2]
    for future in noise:
        future.result(60)


def told(*answers):
    """Tokens and logprobs of answers one behind the other, to the bit."""
    return [entry for a in answers for entry in a["meta_info"]["output_token_logprobs"]]


@pytest.mark.parametrize("seed", range(4))
def test_a_deterministic_answer_that_is_cut_anywhere_goes_on_to_the_bit(exact, seed):
    """What was written is read again one by one, as it was written."""
    prompt, n = prompts(4, seed=seed)[seed], 24
    params = {"temperature": 1.0, "sampling_seed": seed, "ignore_eos": True}
    whole = exact.generate(prompt, max_new_tokens=n, **params)
    ids = whole["output_ids"]
    tails = exact.generate(
        [prompt + ids[:cut] for cut in range(n)],
        body={
            "written": list(range(n)),
            "sampling_params": [params | {"max_new_tokens": n - cut} for cut in range(n)],
        },
    )
    assert [told(tail) for tail in tails] == [told(whole)[cut:] for cut in range(n)]


def test_a_deterministic_answer_that_is_retracted_goes_on_to_the_bit(exact):
    params = {"temperature": 1.0, "sampling_seed": 3, "max_new_tokens": 100, "ignore_eos": True}
    whole = exact.generate(PROMPT, **params)
    again = exact.start(PROMPT, **params)
    exact.wait_running()
    while exact.state()["num_running_reqs"]:
        exact.ok("/pause_generation", {"mode": "retract"})
        retracted = exact.state()["num_waiting_reqs"]
        exact.ok("/continue_generation")
        if not retracted:
            break
    answer = again.result(60)
    assert answer["meta_info"]["num_retractions"] and told(answer) == told(whole)


def test_deterministic_logprobs_equal_hf(exact, model):
    answer = exact.generate(PROMPT, temperature=0.7, max_new_tokens=50, ignore_eos=True)
    expected = hf_logprobs(model, PROMPT, answer["output_ids"], 0.7)
    torch.testing.assert_close(logprobs_of(answer), expected, atol=1e-5, rtol=0)


def test_more_requests_than_rows(exact):
    answers = exact.generate([PROMPT] * 40, max_new_tokens=6, ignore_eos=True)
    assert [len(a["output_ids"]) for a in answers] == [6] * 40


def test_logprobs_of_prompts_are_answered_where_they_were_asked_for(server):
    body = {"return_logprob": [True, False], "logprob_start_len": 0}
    answers = server.generate([[5, 6], [7, 8]], body=body, max_new_tokens=1)
    assert ["input_token_logprobs" in a["meta_info"] for a in answers] == [True, False]


def refused(server, body, status=400):
    got, data = server.post("/generate", body)
    assert got == status, (got, data)
    return data["error"]["message"]


def test_refusals_name_what_is_wrong(server):
    few = {"max_new_tokens": 2}
    assert refused(server, {"input_ids": [5] * CONTEXT, "sampling_params": few}) == (
        f"The input ({CONTEXT} tokens) is longer than the model's context length "
        f"({CONTEXT} tokens)."
    )
    assert f"a total of {CONTEXT + 1} tokens" in refused(
        server, {"input_ids": [5], "sampling_params": {"max_new_tokens": CONTEXT}}
    )
    assert str(VOCAB) in refused(server, {"input_ids": [5, VOCAB]})
    assert "-1" in refused(server, {"input_ids": [5, -1]})
    assert "input_ids.1" in refused(server, {"input_ids": [5, 6.5]})
    assert "input_ids" in refused(server, {"input_ids": []})
    assert "input_ids" in refused(server, {"sampling_params": few})
    assert "text is not supported" in refused(server, {"text": "a"})
    assert refused(server, {"input_ids": [5], "sampling_params": {"bogus": 1}}).startswith(
        "unknown field `bogus`, expected one of `max_new_tokens`"
    )
    assert "frequency_penalty" in refused(
        server, {"input_ids": [5], "sampling_params": {"frequency_penalty": 0.5}}
    )
    assert "lora_path" in refused(server, {"input_ids": [5], "lora_path": "x"})
    assert "sampling_params" in refused(server, {"input_ids": [[5], [6]], "sampling_params": [few]})
    assert "stop_token_ids" in refused(
        server, {"input_ids": [5], "sampling_params": {"stop_token_ids": [VOCAB]}}
    )
    assert "top_logprobs_num" in refused(server, {"input_ids": [5], "top_logprobs_num": 2})
    assert "logprob_start_len" in refused(server, {"input_ids": [5, 6], "logprob_start_len": 1})
    whole = {"input_ids": [5], "logprob_start_len": 0, "return_logprob": True}
    assert "max_new_tokens=0" in refused(server, whole | {"top_logprobs_num": 2})
    many = {"top_logprobs_num": VOCAB + 1, "sampling_params": {"max_new_tokens": 0}}
    assert "a number from 0" in refused(server, whole | many)
    assert "written=2 of 2" in refused(server, {"input_ids": [5, 6], "written": 2})
    routes = {"return_routed_experts": True, "routed_experts_start_len": 2}
    assert "routed_experts_start_len" in refused(server, {"input_ids": [5]} | routes)
    assert "extra_key" in refused(server, {"input_ids": [5], "extra_key": 3})
    assert "extra_key has 1 entries" in refused(
        server, {"input_ids": [[5], [6]], "extra_key": ["a"]}
    )
    assert "stream is not supported" in refused(server, {"input_ids": [5], "stream": True})
    assert "JSON" in server.post("/generate")[1]["error"]["message"]
    # unknown top-level keys are ignored, as SGLang does; the default bound is 128 tokens
    answer = server.ok(
        "/generate", {"input_ids": [5], "bogus": 1, "sampling_params": {"ignore_eos": True}}
    )
    assert answer["meta_info"]["completion_tokens"] == 128
    late = server.ok("/generate", {"input_ids": [5] * 150, "sampling_params": {"ignore_eos": True}})
    assert late["meta_info"]["completion_tokens"] == CONTEXT - 150


def test_unknown_routes_say_what_there_is(server):
    status, data = server.post("/v1/completions", {})
    assert status == 404 and "/v1/completions is not supported" in data["error"]["message"]
    assert "/generate" in data["error"]["message"]


def test_state_endpoints(server, model_dir):
    assert server.get("/health") == (200, "")
    assert server.get("/ready") == (200, "")
    info = server.get("/model_info")[1]
    assert info["model_path"] == str(model_dir) and info["weight_version"] == "default"
    info = server.get("/server_info")[1]
    assert info["context_length"] == CONTEXT and info["version"].startswith("0.5.23")


def test_its_counts_are_a_page_of_prometheus(server):
    def page():
        status, text = server.get("/metrics")
        assert status == 200
        found = {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples}
        return {name.removeprefix("megarl_server_"): value for name, value in found.items()}

    before = page()
    server.generate([PROMPT] * 3, max_new_tokens=4, ignore_eos=True)
    after = page()
    assert after["requests_total"] - before["requests_total"] == 3
    assert after["tokens_total"] - before["tokens_total"] == 12
    assert (after["running"], after["waiting"], after["paused"]) == (0, 0, 0)
    assert after["weights_bytes"] > 0 and after["cache_tokens"] > 0


def test_a_client_that_goes_away_frees_its_rows(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {
        "input_ids": [PROMPT] * 200,
        "sampling_params": {"max_new_tokens": 190, "ignore_eos": True},
    }
    connection.request("POST", "/generate", json.dumps(body))
    server.wait_running(100)
    connection.close()
    server.wait_idle()


@pytest.mark.parametrize("k", [1, 5, VOCAB])
def test_a_teacher_asks_for_logprobs_of_prompts(server, model, k):
    check_teacher([f"127.0.0.1:{server.port}"], model, k)
