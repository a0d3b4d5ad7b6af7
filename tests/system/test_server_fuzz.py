"""Five hundred generated requests to one embedded server, and requests that are wrong in ways a
generator would not find. Each gets an answer of its own; nothing else changes.
"""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import wait

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from megarl.utils.env import free_port
from megarl.utils.http import in_thread
from tests.embedded_server import embedded_server
from tests.tiny import VOCAB, save_tiny
from tests.tiny_tokenizer import save_tokenizer

CONTEXT = 100
GOOD = {
    "input_ids": [[5, 6, 7, 8], [9, 10, 11]],
    "sampling_params": {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True},
    "return_logprob": True,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    home = tmp_path_factory.mktemp("fuzz")
    model = save_tokenizer_beside(save_tiny(home / "model", "qwen3", tie=True))
    flags = ("--dtype", "float32", "--context-length", str(CONTEXT), "--dist-timeout", "1")
    with embedded_server(model, *flags, log=home / "log") as s:
        yield s


def save_tokenizer_beside(path):
    save_tokenizer(path)
    return path


def said(server):
    """What it answers to a good request, to the bit."""
    answers = server.ok("/generate", GOOD)
    return [(a["text"], a["output_ids"], a["meta_info"]["output_token_logprobs"]) for a in answers]


# ---- what is generated

big = st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 1e308, -1e308, 5e-324])
numbers = st.integers(-5, 2 * VOCAB) | big | st.floats()
scalars = st.none() | st.booleans() | numbers | st.text(max_size=6)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=CONTEXT + 5)


def odd(usual):
    """Mostly what belongs there, so that the rest of a body is looked at, too."""
    return st.one_of(usual, usual, usual, anything)


sampling = st.fixed_dictionaries(
    {},
    optional={
        "max_new_tokens": odd(st.integers(0, CONTEXT)),
        "min_new_tokens": odd(st.integers(0, 9)),
        "temperature": odd(st.floats(0, 3)),
        "top_p": odd(st.floats(0, 1)),
        "top_k": odd(st.integers(-1, 9)),
        "min_p": odd(st.floats(0, 1)),
        "n": odd(st.just(1)),
        "stop": odd(st.lists(st.text(max_size=3), max_size=3)),
        "stop_token_ids": odd(st.lists(st.integers(0, VOCAB - 1), max_size=3)),
        "ignore_eos": odd(st.booleans()),
        "sampling_seed": odd(st.integers(0, 2**63 - 1)),
        "no_stop_trim": odd(st.booleans()),
        "frequency_penalty": anything,
        "regex": anything,
    },
)
prompt = st.fixed_dictionaries({"input_ids": odd(tokens | st.lists(tokens, max_size=3))})
options = st.fixed_dictionaries(
    {},
    optional={
        "sampling_params": odd(sampling | st.lists(sampling, max_size=3)),
        "return_logprob": odd(st.booleans()),
        "logprob_start_len": odd(st.integers(-1, CONTEXT)),
        "top_logprobs_num": odd(st.integers(0, 5)),
        "text": odd(st.just("")),
        "stream": odd(st.booleans()),
        "rid": odd(st.text(max_size=5) | st.lists(st.text(max_size=3), max_size=3)),
        "lora_path": odd(st.none()),
        "input_embeds": anything,
    },
)
generate = st.tuples(
    st.just("/generate"), st.builds(lambda p, o: p | o, prompt, options) | anything
)
names = st.lists(odd(st.sampled_from(["model.norm.weight", "lm_head.weight"])), max_size=2)
FIELDS = {
    "abort_request": {"rid": st.text(max_size=4), "abort_all": st.booleans()},
    "pause_generation": {"mode": st.sampled_from(["abort", "retract", "in_place"])},
    "continue_generation": {},
    "flush_cache": {},
    "begin_weight_update": {"selector": st.just("all")},
    "end_weight_update": {},
    "init_weights_update_group": {
        "master_address": st.just("127.0.0.1"),
        "master_port": st.integers(1, 70000),
        "rank_offset": st.integers(0, 3),
        "world_size": st.integers(0, 3),
        "group_name": st.text(max_size=2),
        "backend": st.sampled_from(["gloo", "nccl", "mpi"]),
    },
    "destroy_weights_update_group": {"group_name": st.text(max_size=2)},
    "update_weights_from_distributed": {
        "names": names,
        "dtypes": st.lists(odd(st.just("float32")), max_size=2),
        "shapes": st.lists(st.lists(numbers, max_size=3), max_size=2),
        "group_name": st.text(max_size=2),
        "load_format": st.sampled_from([None, "flattened_bucket", "delta"]),
        "weight_version": scalars,
        "flush_cache": scalars,
    },
    "update_weights_from_tensor": {
        "serialized_named_tensors": st.lists(st.text(max_size=9) | st.just("gASVAAAA"), max_size=2),
        "load_format": st.sampled_from([None, "flattened_bucket"]),
    },
    "update_weights_from_disk": {
        "model_path": st.sampled_from(["/", "/nowhere", "\0", "", "~"]),
        "weight_version": scalars,
    },
    "update_weight_version": {"new_version": scalars, "abort_all_requests": scalars},
    "load_lora_adapter": {"lora_name": st.text(max_size=4), "lora_path": st.just("/nowhere")},
    "unload_lora_adapter": {"lora_name": st.text(max_size=4)},
    "weights_checker": {"action": st.just("checksum")},
}
control = st.one_of(
    *(
        st.tuples(
            st.just(f"/{path}"),
            odd(st.fixed_dictionaries({}, optional={k: odd(v) for k, v in fields.items()})),
        )
        for path, fields in FIELDS.items()
    )
)
paths = st.sampled_from(["/generate", *(f"/{path}" for path in FIELDS)])
raw = st.tuples(
    paths,
    st.binary(max_size=20)
    | st.sampled_from(
        [
            b'{"input_ids": [1e400]}',
            b'{"input_ids": [NaN]}',
            b'{"text": "\\ud800"}',
            b"[" * 5000,
            b'{"input_ids": [5], "sampling_params": {"temperature": 1e400}}',
        ]
    ),
)


def send(server, path, payload, kind="application/json", **headers):
    """(status, body) of a POST whose every byte is given."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request("POST", path, payload, {"Content-Type": kind} | headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_five_hundred_requests_leave_it_as_it_was(server):
    before, statuses = said(server), []

    @settings(
        max_examples=500, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.one_of(generate, generate, control, control, raw))
    def fuzz(request):
        path, body = request
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, answer = send(server, path, payload)
        statuses.append(status)
        assert status in (200, 400, 413, 503), (path, body, status, answer)
        if path == "/pause_generation":
            server.ok("/continue_generation")

    fuzz()
    assert server.process.poll() is None and server.get("/health")[0] == 200
    server.wait_idle()
    assert said(server) == before
    assert statuses.count(200) > 50 and statuses.count(400) > 100


# ---- what a generator would not find


def refused(server, path, body, status=400, **kw):
    got, answer = send(server, path, json.dumps(body), **kw)
    assert got == status, (path, got, answer[:300])
    data = json.loads(answer)
    error = data.get("error", data)
    return error["message"] if isinstance(error, dict) else error


def test_what_once_ended_the_scheduler_is_refused(server, tmp_path):
    before = said(server)
    weights, adapter = tmp_path / "weights", tmp_path / "adapter"
    for path in (weights, adapter):
        path.mkdir()
    (weights / "model.safetensors.index.json").write_text("[]")
    save_file({}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('{"r": 0, "lora_alpha": 1}')
    for path, body, words in (
        ("/generate", {"input_ids": [True]}, "input_ids.0"),
        ("/generate", {"input_ids": [5], "top_logprobs_num": -1}, "top_logprobs_num"),
        ("/update_weights_from_disk", {"model_path": str(weights)}, "not a safetensors index"),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": str(adapter)}, "r=0"),
        ("/update_weight_version", {"new_version": {}}, "new_version={}"),
        ("/destroy_weights_update_group", {"group_name": [1]}, "group_name=[1]"),
    ):
        assert words in refused(server, path, body), path
    assert said(server) == before


def test_bounds_are_named(server):
    one = {"input_ids": [5]}
    for params, words in (
        ({"n": 2}, "n=2 is not supported"),
        ({"stop": ["x"] * 2000}, "at most 1024 items"),
        ({"stop": ["x" * 5000]}, "at most 4096 characters"),
        ({"stop_token_ids": [5] * 2000}, "at most 1024 items"),
    ):
        assert words in refused(server, "/generate", one | {"sampling_params": params})
    many = {"input_ids": [[5]] * 8193}
    assert "8193 prompts; one request may have 8192" in refused(server, "/generate", many)
    assert len(refused(server, "/generate", one | {"lora_path": "x" * 10**5})) < 3000
    large = {"Content-Length": str(300 << 20)}  # refused before a byte of it is sent
    status, answer = send(server, "/generate", b"", **large)
    assert status == 413 and b"more than 256 MiB" in answer


def test_a_web_page_cannot_drive_it(server):
    port = server.port
    foreign = {"Origin": "http://evil.example"}
    for path in ("/pause_generation", "/generate", "/flush_cache"):
        assert "web pages" in refused(server, path, {}, 403, **foreign)
    other_port = {"Origin": f"http://127.0.0.1:{port + 1}"}
    assert "web pages" in refused(server, "/pause_generation", {}, 403, **other_port)
    rebound = {"Host": f"evil.example:{port}"}
    assert "Host: evil.example" in refused(server, "/continue_generation", {}, 403, **rebound)
    form = refused(server, "/pause_generation", {}, 415, kind="text/plain")
    assert "send the body as application/json" in form
    named = {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"}
    assert send(server, "/continue_generation", b"{}", **named)[0] == 200
    assert not server.state()["paused"]


def test_joins_that_nobody_answers_hold_up_nothing(server, tmp_path):
    flags = ("--context-length", "100", "--dist-timeout", "300")
    model = server.get("/model_info")[1]["model_path"]
    body = {
        "master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1,
        "world_size": 2, "backend": "gloo",
    }  # fmt: skip
    with embedded_server(model, *flags, log=tmp_path / "log") as busy:
        path = "/init_weights_update_group"
        calls = [in_thread(busy.post, path, body | {"group_name": str(i)}) for i in range(65)]
        deadline = time.monotonic() + 20
        while not (done := [c for c in calls if c.done()]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        ((status, answer),) = [c.result() for c in done]
        assert status == 503 and "64 groups wait for their other members" in answer["message"]
        waiting = next(str(i) for i, c in enumerate(calls) if not c.done())
        status, answer = busy.post(path, body | {"group_name": waiting})
        assert status == 400 and f"{waiting!r} is being joined" in answer["message"]
        assert busy.get("/health", timeout=5)[0] == 200
        assert busy.terminate() == 0
    assert not wait(calls, 10).not_done
