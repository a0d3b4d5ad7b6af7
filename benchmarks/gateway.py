"""Measures what the gateway adds to a request, beside a server that answers the same bytes at once.

    python benchmarks/gateway.py [--requests 400] [--reps 3]

A stub stands for the generation servers: it answers 64 tokens at once. Agents are coroutines of one
process that post chats of so many turns over kept connections. Prints a Markdown table:

agents      that ask at the same time
turns       of the history that every request sends again, 100 words each
bare, ms    per request, to a server that reads the body and answers the bytes of an answer
gateway, ms per request (medians of the rounds)
added, ms   the difference, of which a process with one Python thread can give 1000 / added a second

A second table has the samples that a linear episode becomes, under a chat template that drops the
thoughts of earlier answers, with rollout.gateway.reuse and without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from megarl.api.records import ModelRequest, ModelResponse
from megarl.config.rollout import GenerationHyperparameters
from megarl.rollout.gateway.gateway import Gateway
from megarl.rollout.gateway.messages import GatewayConfig
from megarl.rollout.gateway.session import Session

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from tiny_model import make_tokenizer

ANSWER = 64  # tokens
# a chat template drops an answer up to its last "=", as others drop thoughts
CONTENT = "{{ m['content'] }}"
LATER = "{{ m['content'].split('=')[-1] if m['role'] == 'assistant' else m['content'] }}"
Chat = list[dict[str, str]]


class Stub:
    """Answers every request at once."""

    def __init__(self, tokenizer: Any) -> None:
        self.letters = tokenizer("0123456789+=", add_special_tokens=False)["input_ids"]
        self.rng = random.Random(0)

    def get_version(self) -> int:
        return 0

    async def agenerate_many(self, reqs: Sequence[ModelRequest]) -> list[ModelResponse]:
        return [
            ModelResponse(
                input_tokens=r.input_ids,
                output_tokens=self.rng.choices(self.letters, k=ANSWER),
                output_logprobs=[-1.0] * ANSWER,
                output_versions=[0] * ANSWER,
                stop_reason="length",
            )
            for r in reqs
        ]


async def post(client: aiohttp.ClientSession, url: str, key: str, messages: Chat) -> str:
    body = {"model": "policy", "messages": messages}
    headers = {"Authorization": f"Bearer {key}"}
    async with client.post(url + "/chat/completions", json=body, headers=headers) as answer:
        found = await answer.json()
        assert answer.status == 200, found
        return str(found["choices"][0]["message"]["content"])


async def talk(turns: int, ask: Callable[[Chat], Awaitable[str]]) -> Chat:
    """Returns a chat of `turns` turns, ready for the next request."""
    words = " ".join(["12+34="] * 100)
    chat: Chat = [{"role": "user", "content": words}]
    for _ in range(turns - 1):
        chat.append({"role": "assistant", "content": await ask(chat)})
        chat.append({"role": "user", "content": words})
    return chat


async def timed(agents: int, requests: int, ask: Callable[[int, int], Awaitable[str]]) -> float:
    """Returns milliseconds per request of agents that ask one after the other each."""

    async def one(agent: int) -> None:
        for k in range(requests // agents):
            await ask(agent, k)

    begun = time.perf_counter()
    await asyncio.gather(*(one(i) for i in range(agents)))
    return 1000 * (time.perf_counter() - begun) / (requests // agents * agents)


async def bare_server(answer: bytes) -> tuple[str, Callable[[], Awaitable[None]]]:
    """Starts a server that answers `answer`; returns its URL, and what ends it."""

    async def reply(request: Request) -> Response:
        json.loads(await request.body())
        return Response(answer, media_type="application/json")

    app = Starlette(routes=[Route("/v1/chat/completions", reply, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    task = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]

    async def end() -> None:
        server.should_exit = True
        await task

    return f"http://127.0.0.1:{port}/v1", end


async def measure(agents: int, turns: int, requests: int, reps: int) -> tuple[float, float]:
    """Returns milliseconds per request, bare and through the gateway."""
    tokenizer = make_tokenizer(1)
    gateway = Gateway(Stub(tokenizer), GatewayConfig())  # type: ignore[arg-type]

    async def context() -> int | None:
        return None

    await gateway.start(context)
    opened = [gateway.session(GenerationHyperparameters(), tokenizer) for _ in range(agents)]
    sessions: list[Session] = [s.__enter__() for s in opened]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        chats = [
            await talk(turns, lambda chat, s=s: post(client, s.base_url, s.api_key, chat))  # type: ignore[misc]
            for s in sessions
        ]
        s, chat = sessions[0], chats[0]
        body = {"model": "policy", "messages": chat}
        headers = {"Authorization": f"Bearer {s.api_key}"}
        url = s.base_url + "/chat/completions"
        async with client.post(url, json=body, headers=headers) as answer:
            raw = await answer.read()
        bare_url, end = await bare_server(raw)
        bare, ours = [], []
        for _ in range(reps):  # in turn
            bare.append(
                await timed(agents, requests, lambda i, _: post(client, bare_url, "k", chats[i]))
            )
            ours.append(
                await timed(
                    agents,
                    requests,
                    lambda i, _: post(client, sessions[i].base_url, sessions[i].api_key, chats[i]),
                )
            )
        await end()
    for session in opened:
        session.__exit__(None, None, None)
    await gateway.close()
    return statistics.median(bare), statistics.median(ours)


async def samples(turns: int, *, reuse: bool) -> int:
    """Returns how many samples an agent's episode becomes that never edits its history."""
    tokenizer = make_tokenizer(1)
    tokenizer.chat_template = tokenizer.chat_template.replace(CONTENT, LATER)
    gateway = Gateway(Stub(tokenizer), GatewayConfig(reuse=reuse))  # type: ignore[arg-type]

    async def context() -> int | None:
        return None

    await gateway.start(context)
    with gateway.session(GenerationHyperparameters(), tokenizer) as session:
        async with aiohttp.ClientSession() as client:
            url, key = session.base_url, session.api_key
            await talk(turns + 1, lambda chat: post(client, url, key, chat))
    await gateway.close()
    return sum(1 for _ in session.trajectory.rows())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--reps", type=int, default=3)
    args = parser.parse_args()
    print("| agents | turns | bare, ms | gateway, ms | added, ms |")
    print("| --- | --- | --- | --- | --- |")
    for agents, turns in ((1, 1), (64, 1), (64, 8), (64, 32)):
        bare, ours = asyncio.run(measure(agents, turns, args.requests, args.reps))
        print(f"| {agents} | {turns} | {bare:.2f} | {ours:.2f} | {ours - bare:.2f} |", flush=True)
    print("\n| turns | samples | without reuse |\n| --- | --- | --- |")
    for turns in (1, 8, 32):
        found = [asyncio.run(samples(turns, reuse=reuse)) for reuse in (True, False)]
        print(f"| {turns} | {found[0]} | {found[1]} |")


if __name__ == "__main__":
    main()
