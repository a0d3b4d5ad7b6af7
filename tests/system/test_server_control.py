"""Pause, abort, weight updates and the end of the embedded server."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.api.records import ModelRequest, WeightUpdateMeta
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig, WeightSyncConfig
from megarl.rollout.client import RemoteSGLangEngine
from megarl.utils.http import authorization, in_thread
from megarl.weight_sync.receiver.megarl_receiver.fingerprint import hash_text, tensor_hash
from megarl.wire.process_group import destroy_update_group, init_update_group
from tests.dist.world import free_port
from tests.embedded_server import address, checksums, embedded_server
from tests.system.test_server_generate import hf_logprobs
from tests.tiny import save_tiny

PROMPT = [5, 6, 7, 8]
LONG = {"temperature": 0, "max_new_tokens": 900, "ignore_eos": True}
ROPE = {"max_position_embeddings": 1024}


@pytest.fixture(scope="module")
def dirs(tmp_path_factory):
    """Two models of one shape."""
    root = tmp_path_factory.mktemp("models")
    return [save_tiny(root / f"m{seed}", "qwen3", tie=True, seed=seed, **ROPE) for seed in (0, 1)]


@pytest.fixture(scope="module")
def weights(dirs):
    return [load_file(d / "model.safetensors") for d in dirs]


@pytest.fixture(scope="module")
def served(dirs, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "server"
    flags = ("--dtype", "float32", "--dist-timeout", "3")
    with embedded_server(dirs[0], *flags, log=log) as s:
        yield s


@pytest.fixture
def server(served, dirs):
    """The server, back at the first model and unpaused before every test."""
    served.ok("/continue_generation")
    served.ok("/update_weights_from_disk", {"model_path": str(dirs[0]), "weight_version": "0"})
    return served


class Sender:
    """Rank 0 of an update group, as the trainer would be."""

    def __init__(self, server, name="g"):
        self.server, self.name = server, name
        port = free_port()
        body = {
            "master_address": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": name,
            "backend": "gloo",
        }
        asked = self._post("/init_weights_update_group", body)
        self.group = init_update_group(
            master_address="127.0.0.1",
            master_port=port,
            rank=0,
            world_size=2,
            group_name=name,
            backend="gloo",
            timeout=20,
        )
        assert asked() == (
            200,
            {"success": True, "message": "Succeeded to initialize custom process group."},
        )

    def _post(self, path, body):
        out = {}
        thread = threading.Thread(target=lambda: out.update(r=self.server.post(path, body)))
        thread.start()

        def result():
            thread.join(60)
            return out["r"]

        return result

    def send(self, tensors, *, session=True, **extra):
        """(status, answer) of one update with everything that belongs to it."""
        body = {
            "names": list(tensors),
            "group_name": self.name,
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
            "shapes": [list(t.shape) for t in tensors.values()],
            "load_format": "flattened_bucket",
        } | extra
        if session:
            self.server.ok("/begin_weight_update")
        answer = self._post("/update_weights_from_distributed", body)
        raw = [t.contiguous().flatten().view(torch.uint8) for t in tensors.values()]
        dist.broadcast(torch.cat(raw), src=0, group=self.group)
        result = answer()
        if session:
            self.server.ok("/end_weight_update")
        return result

    def close(self):
        assert self.server.ok("/destroy_weights_update_group", {"group_name": self.name})["success"]
        destroy_update_group(self.group)


@pytest.fixture(scope="module")
def sender(served):
    s = Sender(served)
    yield s
    s.close()


def sums_of(tensors):
    return {name: hash_text(tensor_hash(t)) for name, t in tensors.items()}


def greedy(server, count=6):
    return server.generate(PROMPT, temperature=0, max_new_tokens=count, ignore_eos=True)


# ---- weights


def test_distributed_updates_arrive_bit_for_bit(server, sender, weights):
    base = greedy(server)
    status, answer = sender.send(weights[1], weight_version="7")
    assert (status, answer) == (
        200,
        {
            "success": True,
            "message": "Succeeded to update parameter online. Weight version updated to 7.",
        },
    )
    assert checksums(server) == sums_of(weights[1])
    after = greedy(server)
    assert after["meta_info"]["weight_versions"] == [{"version": "7", "start": 0, "end": 6}]
    assert after["meta_info"]["output_token_logprobs"] != base["meta_info"]["output_token_logprobs"]
    sender.send(weights[0], weight_version="8")
    again = greedy(server)
    assert again["meta_info"]["output_token_logprobs"] == base["meta_info"]["output_token_logprobs"]
    assert server.get("/model_info")[1]["weight_version"] == "8"


def test_updates_cast_to_the_servers_dtype_and_may_carry_the_tied_head(server, sender, weights):
    half = {n: t.bfloat16() for n, t in weights[1].items()}
    half["lm_head.weight"] = half["model.embed_tokens.weight"]
    status, answer = sender.send(half)
    assert status == 200, answer
    assert checksums(server) == sums_of({n: weights[1][n].bfloat16().float() for n in weights[1]})


def test_updates_are_refused_outside_a_session(server, weights):
    body = {"names": [], "dtypes": [], "shapes": [], "group_name": "g"}
    status, answer = server.post("/update_weights_from_distributed", body)
    assert status == 400 and answer == {
        "success": False,
        "message": "update_weights_from_distributed must run between begin_weight_update() and "
        "end_weight_update()",
    }
    assert server.post("/end_weight_update", {})[0] == 400


def test_a_wrong_tensor_is_named_and_changes_nothing(server, sender, weights):
    first, second = list(weights[1])[:2]
    before = checksums(server)
    for tensors, words in (
        ({first: weights[1][first], "model.nope": torch.zeros(3)}, ["model.nope", "no such"]),
        ({second: weights[1][second], first: torch.zeros(2, 3)}, [first, "[2, 3]"]),
        ({first: weights[1][first].to(torch.float64)[:1]}, [first, "shape"]),
    ):
        status, answer = sender.send(tensors)
        assert status == 400 and answer["success"] is False
        assert all(w in answer["message"] for w in words), answer
        assert checksums(server) == before
    # the group is still in step: the next bucket is taken for itself
    assert sender.send(weights[1])[0] == 200
    assert checksums(server) == sums_of(weights[1])


def test_malformed_lists_are_refused_before_anything_is_received(server, sender):
    server.ok("/begin_weight_update")
    good = {"names": ["a"], "dtypes": ["float32"], "shapes": [[2]], "group_name": "g"}
    for change, word in (
        ({"names": "a"}, "names"),
        ({"dtypes": []}, "differ in length"),
        ({"dtypes": ["int7"]}, "int7"),
        ({"shapes": [["x"]]}, "shape"),
        ({"group_name": "other"}, "other"),
        ({"load_format": "zip"}, "zip"),
    ):
        status, answer = server.post("/update_weights_from_distributed", good | change)
        assert status == 400 and word in answer["message"], answer
    server.ok("/end_weight_update")


def test_a_lost_sender_is_an_error_after_the_timeout(server, dirs, weights):
    before, lost = checksums(server), Sender(server, name="lost")
    server.ok("/begin_weight_update")
    name = "model.norm.weight"
    status, answer = server.post(
        "/update_weights_from_distributed",
        {
            "names": [name],
            "dtypes": ["float32"],
            "shapes": [list(weights[0][name].shape)],
            "group_name": "lost",
            "load_format": "flattened_bucket",
        },
    )
    assert status == 400 and name in answer["message"]
    server.ok("/end_weight_update")
    lost.close()
    # a bucket is loaded once it is whole: the server goes on with the weights that it had
    assert checksums(server) == before
    assert len(greedy(server)["output_ids"]) == 6
    assert server.get("/health")[0] == 200
    server.ok("/update_weights_from_disk", {"model_path": str(dirs[0])})
    assert checksums(server) == sums_of(weights[0])
    assert len(greedy(server)["output_ids"]) == 6


def test_group_errors(server, sender):
    body = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1}
    join = "/init_weights_update_group"
    for extra, words in (
        ({"world_size": 2, "group_name": "g", "backend": "gloo"}, "exists"),
        ({"world_size": 2, "group_name": "h"}, "nccl"),
        ({"group_name": "h", "backend": "gloo"}, "world_size"),
        ({"world_size": 2, "group_name": "h", "backend": "gloo"}, "Failed to initialize"),
        ({"world_size": 2, "group_name": "h", "backend": "mpi"}, "mpi"),
        ({"world_size": 1, "group_name": "h", "backend": "gloo"}, "world_size=1"),
    ):
        status, answer = server.post(join, body | extra)
        assert status == 400 and words in answer["message"], answer
    status, answer = server.post("/destroy_weights_update_group", {"group_name": "h"})
    assert status == 400 and "'h'" in answer["message"]


def test_update_from_disk(server, dirs, weights, tmp_path):
    answer = server.ok(
        "/update_weights_from_disk", {"model_path": str(dirs[1]), "weight_version": "disk"}
    )
    assert answer == {
        "success": True,
        "num_paused_requests": 0,
        "message": "Succeeded to update model weights. Weight version updated to disk.",
    }
    assert checksums(server) == sums_of(weights[1])
    info = server.get("/model_info")[1]
    assert info["model_path"] == str(dirs[1])


def with_index(path, text):
    path.mkdir()
    (path / "model.safetensors.index.json").write_text(text)
    return path


def test_update_from_disk_takes_all_or_nothing(server, dirs, weights, tmp_path):
    other = save_tiny(tmp_path / "other", "qwen3", tie=True, layers=2, **ROPE)
    longer = save_tiny(tmp_path / "longer", "qwen3", tie=True, layers=5, **ROPE)
    cut = tmp_path / "cut"
    cut.mkdir()
    raw = (dirs[1] / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(raw[: len(raw) // 2])
    for path, word in (
        (other, "lacks model.layers.2"),
        (longer, "model.layers.4"),
        (cut, "cannot read"),
        (tmp_path / "none", "neither model.safetensors nor"),
        (tmp_path, "model.safetensors"),
        (with_index(tmp_path / "number", '{"weight_map": {"a": 5}}'), "5"),
        (with_index(tmp_path / "list", '{"weight_map": {"a": ["b"]}}'), "['b']"),
        (with_index(tmp_path / "words", "no json"), "index.json"),
    ):
        status, answer = server.post("/update_weights_from_disk", {"model_path": str(path)})
        assert status == 400 and answer["success"] is False and word in answer["message"], answer
    assert checksums(server) == sums_of(weights[0])
    assert server.get("/model_info")[1]["model_path"] == str(dirs[0])


# ---- memory


def memory(server):
    """(bytes by tag, released tags)."""
    state = server.state()
    return state["memory_bytes"], state["released"]


@pytest.mark.parametrize("way", ["broadcast", "disk"])
def test_released_memory_is_free_and_weights_come_back_by_an_update(
    server, sender, dirs, weights, way
):
    base, (held, _) = greedy(server), memory(server)
    assert held["weights"] == sum(t.nbytes for t in weights[0].values()) and held["kv_cache"] > 0
    server.ok("/pause_generation", {})
    server.ok("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
    assert memory(server) == ({"weights": 0, "kv_cache": 0}, ["kv_cache", "weights"])
    for path, body in (
        ("/weights_checker", {}),
        ("/update_weights_from_disk", {"model_path": str(dirs[1])}),
        ("/release_memory_occupation", {"tags": ["weights"]}),
        ("/resume_memory_occupation", {"tags": None}),  # cuda_graph is not away
        ("/resume_memory_occupation", {"tags": ["wieghts"]}),
    ):
        status, answer = server.post(path, body)
        assert status == 400 and answer["success"] is False, (path, answer)
    waiting = server.start(PROMPT, temperature=0, max_new_tokens=6, ignore_eos=True)
    server.wait_waiting()
    server.ok("/resume_memory_occupation", {"tags": ["weights"]})
    assert memory(server) == (held | {"kv_cache": 0}, ["kv_cache"])
    if way == "disk":
        server.ok("/update_weights_from_disk", {"model_path": str(dirs[0])})
    else:
        assert sender.send(weights[0])[0] == 200
    assert memory(server)[0]["kv_cache"] == 0  # the update needed none
    assert checksums(server) == sums_of(weights[0])
    server.ok("/resume_memory_occupation", {"tags": ["kv_cache"]})
    server.ok("/continue_generation")
    logprobs = waiting.result(30)["meta_info"]["output_token_logprobs"]
    assert logprobs == base["meta_info"]["output_token_logprobs"]


def test_nothing_is_generated_with_memory_that_is_away(server, dirs):
    running = server.start(PROMPT, **LONG)
    server.wait_running()
    status, answer = server.post("/release_memory_occupation", {})
    assert status == 400 and "pause with mode 'abort'" in answer["message"]
    server.ok("/abort_request", {"abort_all": True})
    running.result(30)
    server.ok("/release_memory_occupation", {})
    request = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
    status, answer = server.post("/generate", request)
    assert status == 500 and "weights and kv_cache" in answer["error"]["message"]
    server.ok("/resume_memory_occupation", {})
    status, answer = server.post("/generate", request)  # the numbers are gone
    assert status == 500 and "update the weights" in answer["error"]["message"]
    server.ok("/update_weights_from_disk", {"model_path": str(dirs[0])})
    assert server.post("/generate", request)[0] == 200


def test_no_checksums_are_made_of_memory_that_is_away_by_then(server, dirs, weights):
    """A release and a check wait for the same job, here an update that is given up."""
    Sender(server, name="left")
    server.ok("/begin_weight_update")
    name = "model.norm.weight"
    body = {"names": [name], "dtypes": ["float32"], "shapes": [[*weights[0][name].shape]]}
    calls = []
    for path, sent in (
        ("/update_weights_from_distributed", body | {"group_name": "left"}),
        ("/release_memory_occupation", {"tags": ["weights"]}),
        ("/weights_checker", {"action": "checksum"}),
    ):
        calls.append(in_thread(server.post, path, sent))
        time.sleep(0.2)
    server.ok("/destroy_weights_update_group", {"group_name": "left"})
    assert [c.result(10)[0] for c in calls] == [400, 200, 400]
    assert "released" in calls[2].result()[1]["message"]
    server.ok("/end_weight_update")
    server.ok("/resume_memory_occupation", {"tags": ["weights"]})


def test_versions_and_what_is_not_supported(server):
    answer = server.ok("/update_weight_version", {"new_version": "zz"})
    assert answer["new_version"] == "zz" and answer["success"]
    assert greedy(server)["meta_info"]["weight_version"] == "zz"
    assert server.post("/weights_checker", {"action": "reset_tensors"})[0] == 400
    assert server.get("/weights_checker")[1]["success"]


def test_an_unpaused_update_waits_for_requests_in_flight(server, sender, weights):
    first = server.start(PROMPT, temperature=0, max_new_tokens=400, ignore_eos=True)
    server.wait_running()
    sender.send(weights[1], weight_version="9")
    assert first.result(0.5)["meta_info"]["weight_versions"] == [
        {"version": "0", "start": 0, "end": 400}
    ]
    running = server.start(PROMPT, **LONG)
    server.wait_running()
    sender.send(weights[0], weight_version="10", abort_all_requests=True)
    meta = running.result(20)["meta_info"]
    assert meta["finish_reason"]["type"] == "abort" and meta["completion_tokens"] < 900


def test_an_update_whose_caller_leaves_while_it_waits_is_not_run(server, dirs, weights):
    running = server.start(PROMPT, **LONG)
    server.wait_running()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"model_path": str(dirs[1]), "weight_version": "gone"}
    headers = {"Content-Type": "application/json"} | authorization()
    connection.request("POST", "/update_weights_from_disk", json.dumps(body), headers)
    server.wait_waiting()
    connection.close()
    assert len(running.result(60)["output_ids"]) == 900
    meta = greedy(server)["meta_info"]
    assert meta["weight_version"] == "0" and checksums(server) == sums_of(weights[0])


def test_requests_behind_a_waiting_update_run_after_it(server, dirs):
    first = server.start(PROMPT, temperature=0, max_new_tokens=600, ignore_eos=True)
    server.wait_running()
    done = {}
    update = threading.Thread(
        target=lambda: done.update(
            r=server.post(
                "/update_weights_from_disk", {"model_path": str(dirs[1]), "weight_version": "1"}
            )
        )
    )
    update.start()
    server.wait_waiting()
    late = greedy(server)
    update.join(20)
    assert done["r"][0] == 200 and late["meta_info"]["weight_version"] == "1"
    assert first.result(1)["meta_info"]["weight_version"] == "0"


# ---- pause and abort


def pause(server, mode):
    return server.ok("/pause_generation", {"mode": mode})


def test_pause_abort_returns_what_there_is(server):
    future = server.start(PROMPT, **LONG)
    server.wait_running()
    assert pause(server, "abort") == {"message": "Generation paused successfully.", "status": "ok"}
    answer = future.result(10)
    meta = answer["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert meta["finish_reason"]["message"] == "Aborted"
    count = len(answer["output_ids"])
    assert 0 < count < 900 and meta["completion_tokens"] == count
    assert len(meta["output_token_logprobs"]) == count
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": count}]
    assert server.get("/ready")[0] == 503 and server.get("/health")[0] == 200
    waiting = server.start(PROMPT, temperature=0, max_new_tokens=3, ignore_eos=True)
    server.wait_waiting()
    assert not waiting.done()
    answer = server.ok("/continue_generation")
    assert answer == {"message": "Generation continued successfully.", "status": "ok"}
    assert len(waiting.result(10)["output_ids"]) == 3
    assert server.get("/ready")[0] == 200


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_pause_update_continue_spans_versions(server, sender, weights, mode):
    futures = [server.start(PROMPT[:n], **LONG) for n in (4, 3)]
    server.wait_running(2)
    pause(server, mode)
    status, text = server.post("/flush_cache")
    if mode == "retract":
        assert status == 200 and text.startswith("Cache flushed.\n")
    else:
        assert (status, text) == (400, "Flush cache failed.\n")
    sender.send(weights[1], weight_version="1", flush_cache=mode == "retract")
    server.ok("/continue_generation")
    for future, prompt in zip(futures, (PROMPT, PROMPT[:3]), strict=True):
        answer = future.result(30)
        meta = answer["meta_info"]
        old, new = meta["weight_versions"]
        assert (old["version"], new["version"]) == ("0", "1")
        assert old["start"] == 0 < old["end"] == new["start"] < new["end"] == 900
        assert meta["num_retractions"] == (mode == "retract")
        # greedy under the old weights up to the cut; after a retraction under the new ones alone
        cut, output = old["end"], answer["output_ids"]
        rest = server.generate(
            prompt + output[:cut], temperature=0, max_new_tokens=8, ignore_eos=True
        )
        same = rest["output_ids"] == output[cut : cut + 8]
        got = [e[0] for e in meta["output_token_logprobs"][cut : cut + 8]]
        want = [e[0] for e in rest["meta_info"]["output_token_logprobs"]]
        close = same and got == pytest.approx(want, abs=1e-4)
        assert close == (mode == "retract")  # in place the old keys and values stay


@pytest.mark.parametrize(
    ("kv", "mode"),
    [("flush", "abort"), ("flush", "retract"), ("keep", "in_place")],
)
def test_answers_in_flight_read_kv_of_older_weights_with_keep_alone(server, dirs, kv, mode):
    """Four answers share their prompt. After the update they go on as a server would that had the
    new weights from the beginning; with keep they do not, and the gap is printed."""
    config = RolloutConfig(addresses=[address(server)], kv_after_sync=kv)
    client = RemoteSGLangEngine(config, weight_sync=WeightSyncConfig(pause_mode=mode))
    gconfig = GenerationHyperparameters(max_new_tokens=300, ignore_eos=True, seed=3)
    reqs = [ModelRequest(rid=f"{i}", input_ids=PROMPT, gconfig=gconfig) for i in range(4)]
    body = {"model_path": str(dirs[1]), "weight_version": "1", "flush_cache": kv == "flush"}

    def update():
        server.wait_running(4)
        client.pause()
        server.ok("/update_weights_from_disk", body)
        client.update_weights(WeightUpdateMeta(type="distributed", version=1)).result(20)
        client.resume()

    async def answers():
        asked = asyncio.ensure_future(client.agenerate_many(reqs))
        await asyncio.to_thread(update)
        return await asyncio.wait_for(asked, 60)

    client.initialize()
    try:
        found = asyncio.run(answers())
    finally:
        client.destroy()
    model = AutoModelForCausalLM.from_pretrained(dirs[1], dtype=torch.float32)
    gaps = []
    for r in found:
        assert set(r.output_versions) == {0, 1}
        want = hf_logprobs(model, PROMPT, r.output_tokens)
        gap = (torch.tensor(r.output_logprobs) - want).abs()
        gaps.append(gap[torch.tensor(r.output_versions) == 1])
    gap = torch.cat(gaps)
    print(f"kv_after_sync={kv}, pause_mode={mode}: |logprob - fresh| mean {gap.mean():.2g}")
    assert (gap.mean() > 0.05) if kv == "keep" else (gap.max() < 1e-4)


def test_an_update_that_cannot_flush_says_so(server, sender, weights):
    running = server.start(PROMPT, **LONG)
    server.wait_running()
    pause(server, "in_place")
    status, answer = sender.send(weights[1])
    assert status == 400 and "flush_cache=false" in answer["message"]
    assert checksums(server) == sums_of(weights[0])
    server.ok("/abort_request", {"abort_all": True})
    assert running.result(10)["meta_info"]["finish_reason"]["type"] == "abort"


def test_abort_by_prefix_and_in_the_queue(server):
    one = server.start(PROMPT, body={"rid": "x-1"}, **LONG)
    two = server.start(PROMPT, body={"rid": "x-2"}, **LONG)
    other = server.start(PROMPT, body={"rid": "y"}, **LONG)
    server.wait_running(3)
    status, body = server.post("/abort_request", {"rid": "x-"})
    assert (status, body) == (200, "")
    for future in (one, two):
        answer = future.result(10)
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(answer["output_ids"]) < 900
    assert len(other.result(20)["output_ids"]) == 900
    pause(server, "in_place")
    queued = server.start(PROMPT, body={"rid": "q"}, **LONG)
    server.wait_waiting()
    server.ok("/abort_request", {"rid": "q"})
    answer = queued.result(10)
    assert answer["output_ids"] == [] and answer["meta_info"]["completion_tokens"] == 0
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.post("/abort_request", {})[0] == 400


def test_flush_needs_an_idle_server(server):
    running = server.start(PROMPT, temperature=0, max_new_tokens=300, ignore_eos=True)
    server.wait_running()
    assert server.post("/flush_cache")[0] == 400
    assert len(running.result(20)["output_ids"]) == 300
    assert server.post("/flush_cache")[0] == 200


def test_control_bodies(server):
    assert server.post("/continue_generation")[0] == 400  # SGLang, too, wants a body
    status, data = server.post("/pause_generation", {"mode": "soft"})
    assert status == 400 and "soft" in data["error"]["message"]
    assert server.post("/begin_weight_update", {"selector": "experts"})[0] == 400


# ---- the end


@pytest.mark.full
def test_sigterm_ends_it_whatever_it_does(dirs, tmp_path):
    """In flight, queued behind a pause, inside a collective: soon, and with status 0."""
    with embedded_server(dirs[0], log=tmp_path / "a") as server:
        running = server.start(PROMPT, **LONG)
        server.wait_running()
        pause(server, "in_place")
        queued = server.start(PROMPT, **LONG)
        server.wait_waiting()
        begun = time.monotonic()
        assert server.terminate() == 0
        assert time.monotonic() - begun < 10
        for future in (running, queued):
            assert future.result(5)["meta_info"]["finish_reason"]["type"] == "abort"
    with embedded_server(dirs[0], log=tmp_path / "b") as server:
        Sender(server, name="stuck")
        server.ok("/begin_weight_update")
        body = {
            "names": ["model.norm.weight"],
            "dtypes": ["float32"],
            "shapes": [[64]],
            "group_name": "stuck",
            "load_format": "flattened_bucket",
        }
        stuck = threading.Thread(
            target=lambda: server.post("/update_weights_from_distributed", body), daemon=True
        )
        stuck.start()
        time.sleep(0.3)
        waiting = [server.start(PROMPT, **LONG) for _ in range(5)]  # behind it
        time.sleep(0.3)
        assert server.terminate() == 0
        assert all(future.exception(5) is not None for future in waiting)
    assert "Traceback" not in (tmp_path / "b").read_text()


def test_a_model_that_turns_nan_is_an_error_not_a_sample(server, sender, weights):
    name = "model.layers.0.input_layernorm.weight"  # its NaN reaches keys and values
    base = greedy(server, 20)["meta_info"]["output_token_logprobs"]
    nan = torch.full_like(weights[0][name], float("nan"))
    sender.send({name: nan})
    status, data = server.post("/generate", {"input_ids": PROMPT * 20})
    assert status == 500 and "NaN" in data["error"]["message"]
    assert server.get("/health")[0] == 200
    # nothing of it stays behind in the cache
    sender.send({name: weights[0][name]}, flush_cache=False)
    answers = server.generate(
        [PROMPT, PROMPT * 2], temperature=0, max_new_tokens=20, ignore_eos=True
    )
    got = [e[0] for e in answers[0]["meta_info"]["output_token_logprobs"]]
    assert got == pytest.approx([e[0] for e in base], abs=1e-5)
