"""Stands in for verifiers in a worker: makes the requests of a recorded episode, compares the
answers with the recorded ones, and returns the recorded episode."""

import asyncio
import contextlib
import json
import os
import urllib.request
from pathlib import Path

WIRE = json.loads((Path(__file__).parent.parent / "wire.json").read_text())
NEVER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Environment:
    def __init__(self, settings):
        print("an import may print")
        self.id, self._how = settings["env"]["taskset"]["id"], settings["env"]["taskset"]
        if self._how.get("broken"):
            raise ValueError("no such taskset")

    @contextlib.asynccontextmanager
    async def serving(self):
        yield

    def tasks(self, count):
        return WIRE["tasks"][:count]

    async def run(self, message, client):
        assert message["task"] == WIRE["tasks"][0] and client["api_key_var"] in os.environ
        assert sorted(message["sampling"]) == ["max_tokens", "session", "temperature"]
        assert sorted(message["client"]) == ["base_url", "renderer", "renderer_model_name"]
        marker = Path(self._how["marker"])
        if "die" in self._how and not marker.exists():
            marker.touch()
            os._exit(9)
        if "hang" in self._how:
            await asyncio.sleep(600)
        answer = await asyncio.to_thread(play, message, client, os.environ[client["api_key_var"]])
        if "agents" in self._how:
            answer["traces"] *= 2
            if "once" in self._how and not marker.exists():
                marker.touch()
                answer["ok"] = False
        if "wrong" in self._how:
            answer["traces"][0]["samples"][0]["logprobs"][-1] -= 0.25
        if "fail" in self._how:
            answer |= {"ok": False, "errors": ["EnvError: the game broke down"]}
        return answer


def play(message, client, key):
    """Makes the recorded requests, in another session and by another key."""
    root = client["base_url"].removesuffix("/v1")
    models = ask(root + "/v1/models", key)
    assert models["data"][0]["id"] == message["model"] and models["data"][0]["max_model_len"] > 0
    for call in WIRE["calls"]:
        body = json.loads(json.dumps(call["body"]))
        body["sampling_params"]["session"] = message["sampling"]["session"]
        trace = {"X-Session-ID": call["trace"]}
        found = ask(root + "/inference/v1/generate", key, body, trace)
        found.pop("request_id")
        assert found == call["answer"], (found, call["answer"])
    return json.loads(json.dumps(WIRE["episode"]))


def ask(url, key, body=None, headers=None):
    head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, head | (headers or {}))
    with NEVER.open(request, timeout=20) as answer:
        return json.loads(answer.read())
