"""The gateway with real clients and a stub in place of the servers: what is recorded is exactly
what was sampled, one line for a linear history, whatever the client does to the messages."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import tracemalloc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from megarl.api.records import ModelRequest, ModelResponse
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.config.rollout import GenerationHyperparameters
from megarl.rollout.episode_context import EpisodeContext, current_episode
from megarl.rollout.gateway.gateway import Gateway
from megarl.rollout.gateway.messages import GatewayConfig, call_parser
from megarl.rollout.gateway.session import Session
from megarl.rollout.loop_thread import take_counts
from megarl.rollout.rewards import no_reward
from megarl.rollout.trajectory import to_batch
from megarl.rollout.workflows.agent import AgentWorkflow
from megarl.trainer.user_code import check_code
from tests.tiny_tokenizer import save_tokenizer

GCONFIG = GenerationHyperparameters(max_new_tokens=64, temperature=0.7)
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"b": {"type": "integer"}}},
    },
}
# what reasoning models and tools do to history: thoughts of earlier turns go, results of tools are
# merged into one message, arguments are written anew
TEMPLATE = (
    "{%- if tools %}<bos>tools: {{ tools | tojson }}\n{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<bos>user:{% endif %}"
    " [{{ m.content }}]"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<eos>\n{% endif %}"
    "{%- else %}<bos>{{ m.role }}: "
    "{%- if m.role == 'assistant' %}{{ m.content.split('</think>')[-1].strip() }}"
    "{%- for c in m.tool_calls or [] %}<call>{{ c.function.arguments | tojson }}</call>{% endfor %}"
    "{%- else %}{{ m.content }}{% endif %}<eos>\n{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}<bos>assistant: {% endif %}"
)


def calls_look(text: str, tools: Any) -> tuple[str, list[tuple[str, str]]]:
    """Reads a call of `look` out of every answer, with arguments in an order of its own."""
    return f" {text[:3]} ", [("look", json.dumps({"b": len(text), "a": text[3:6]}, indent=1))]


class StubEngine:
    """Answers like a server that samples; keeps all it wrote."""

    def __init__(self, tokenizer: Any) -> None:
        self.letters = tokenizer("abcdefghij ", add_special_tokens=False)["input_ids"]
        self.thought = tokenizer("<think>ab</think>c", add_special_tokens=False)["input_ids"]
        self.eos, self.rng = tokenizer.eos_token_id, random.Random(0)
        self.wrote: list[ModelResponse] = []
        self.asked: list[ModelRequest] = []
        self.began: list[int | None] = []  # of the episode that asks
        self.fails = 0
        self.gate: asyncio.Event | None = None

    def get_version(self) -> int:
        return 3

    async def agenerate_many(self, reqs: Sequence[ModelRequest]) -> list[ModelResponse]:
        self.asked += reqs
        episode = current_episode.get()
        self.began.append(None if episode is None else episode.began)
        if self.gate is not None:
            await self.gate.wait()
        if self.fails:
            self.fails -= 1
            raise RuntimeError("no server is left")
        return [self._answer(r) for r in reqs]

    def _answer(self, request: ModelRequest) -> ModelResponse:
        most = request.gconfig.max_new_tokens
        body = [*self.thought, *self.rng.choices(self.letters, k=9), self.eos][:most]
        self.wrote.append(
            ModelResponse(
                input_tokens=list(request.input_ids),
                output_tokens=body,
                output_logprobs=[-self.rng.random() for _ in body],
                output_versions=[3] * len(body),
                stop_reason="length" if len(body) == most else "stop",
            )
        )
        return self.wrote[-1]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    found.chat_template = TEMPLATE
    return found


@asynccontextmanager
async def opened(
    tokenizer: Any, context_length: int | None = None, **config: Any
) -> AsyncIterator[tuple[Session, StubEngine, Gateway]]:
    engine = StubEngine(tokenizer)
    gateway = Gateway(engine, GatewayConfig(**config))

    async def context() -> int | None:
        return context_length

    await gateway.start(context)
    try:
        with gateway.session(GCONFIG, tokenizer, index=2, rewarded=False) as session:
            yield session, engine, gateway
    finally:
        await gateway.close()


def check_exact(session: Session, engine: StubEngine, *, rows: int) -> None:
    """Every sampled token is trained in one row, with its logprob and after its own prompt."""
    session.trajectory.score(1.0)
    batch = to_batch([session.trajectory])
    assert len(batch["input_ids"]) == rows
    assert int(batch["loss_mask"].sum()) == sum(w.output_len for w in engine.wrote)
    for wrote in engine.wrote:
        whole = [*wrote.input_tokens, *wrote.output_tokens]
        found = [
            k
            for k in range(rows)
            if batch["input_ids"][k, : len(whole)].tolist() == whole
            and batch["loss_mask"][k, len(wrote.input_tokens) : len(whole)].all()
        ]
        assert len(found) == 1
        part = slice(len(wrote.input_tokens), len(whole))
        expected = batch["logprobs"].new_tensor(wrote.output_logprobs)
        assert batch["logprobs"][found[0], part].equal(expected)


# -- one agent in each dialect: four turns, the messages as each vendor's users write them


async def chat_agent(session: Session) -> None:
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        messages: list[Any] = [{"role": "system", "content": "be brief"}]
        messages.append({"role": "user", "content": "go"})
        for _ in range(4):
            answer = await client.chat.completions.create(
                model="any",
                messages=messages,
                tools=[LOOK],
                temperature=2.0,
            )
            said = answer.choices[0].message
            assert answer.choices[0].finish_reason == "tool_calls" and said.tool_calls
            messages.append(
                {k: v for k, v in said.model_dump().items() if k in ("role", "content")}
            )
            call = said.tool_calls[0]
            function = {"name": "look", "arguments": rewritten(call.function.arguments)}
            messages[-1]["tool_calls"] = [{"id": call.id, "type": "function", "function": function}]
            messages[-1]["content"] = (said.content or "").strip() or None
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "seen"})
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "again"})


def rewritten(arguments: str) -> str:
    return json.dumps(json.loads(arguments), sort_keys=True)


async def streaming_agent(session: Session) -> None:
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        messages: list[Any] = [{"role": "user", "content": "go"}]
        for _ in range(4):
            content, calls, ends = "", [], []
            async for chunk in await client.chat.completions.create(
                model="any",
                messages=messages,
                tools=[LOOK],
                stream=True,
            ):
                delta = chunk.choices[0].delta
                content += delta.content or ""
                calls += [c.model_dump() for c in delta.tool_calls or []]
                ends.append(chunk.choices[0].finish_reason)
            assert ends[-1] == "tool_calls"
            messages.append({"role": "assistant", "content": content, "tool_calls": calls})
            messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": "seen"})


async def responses_agent(session: Session) -> None:
    tool = {"type": "function"} | LOOK["function"]
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        items: list[Any] = [{"role": "user", "content": "go"}]
        for _ in range(4):
            answer = await client.responses.create(model="any", input=items, tools=[tool])
            items += [item.model_dump() for item in answer.output]
            call = next(i for i in answer.output if i.type == "function_call")
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "seen"}
            items.append(result)


async def anthropic_agent(session: Session) -> None:
    tool: Any = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
    async with anthropic.AsyncAnthropic(
        base_url=session.anthropic_url, api_key=session.api_key
    ) as client:
        messages: list[Any] = [{"role": "user", "content": "go"}]
        for _ in range(4):
            answer = await client.messages.create(
                model="any", max_tokens=64, system="be brief", messages=messages, tools=[tool]
            )
            assert answer.stop_reason == "tool_use"
            blocks = [b.model_dump() for b in answer.content if b.type != "thinking"]
            messages.append({"role": "assistant", "content": blocks})
            used = next(b for b in answer.content if b.type == "tool_use")
            result = {"type": "tool_result", "tool_use_id": used.id, "content": "seen"}
            more = {"type": "text", "text": "go on"}
            messages.append({"role": "user", "content": [result, result, more]})


async def anthropic_streaming_agent(session: Session) -> None:
    tool: Any = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
    async with anthropic.AsyncAnthropic(
        base_url=session.base_url,
        api_key=session.api_key,  # the OpenAI URL does, too
    ) as client:
        messages: list[Any] = [{"role": "user", "content": "go"}]
        for _ in range(4):
            async with client.messages.stream(
                model="any", max_tokens=64, messages=messages, tools=[tool]
            ) as stream:
                answer = await stream.get_final_message()
            messages.append(
                {"role": "assistant", "content": [b.model_dump() for b in answer.content]}
            )
            used = next(b for b in answer.content if b.type == "tool_use")
            result = {"type": "tool_result", "tool_use_id": used.id, "content": "seen"}
            messages.append({"role": "user", "content": [result]})


AGENTS = [
    chat_agent,
    streaming_agent,
    responses_agent,
    anthropic_agent,
    anthropic_streaming_agent,
]
PARSER = f"{__name__}:calls_look"


@pytest.mark.parametrize("agent", AGENTS)
def test_a_linear_history_is_one_row_of_what_was_sampled(
    tokenizer: Any, agent: Callable[[Session], Any]
) -> None:
    async def run() -> None:
        async with opened(tokenizer, call_format=PARSER) as (session, engine, _):
            await agent(session)
            assert len(engine.wrote) == 4
            check_exact(session, engine, rows=1)
            assert all(r.gconfig.temperature == 0.7 for r in engine.asked)  # the trainer's

    asyncio.run(run())


@pytest.mark.parametrize("agent", AGENTS)
def test_without_reuse_every_turn_becomes_a_row(
    tokenizer: Any, agent: Callable[[Session], Any]
) -> None:
    async def run() -> None:
        async with opened(tokenizer, call_format=PARSER, reuse=False) as (session, engine, _):
            await agent(session)
            check_exact(session, engine, rows=4)

    asyncio.run(run())


def test_a_parser_of_calls_that_fails_is_named(tokenizer: Any) -> None:
    body = ask("go") | {"tools": [LOOK]}

    async def run() -> None:
        for parser in ("calls_wrongly", "calls_nothing"):
            name = f"{__name__}:{parser}"
            async with opened(tokenizer, call_format=name) as (session, _, _):
                answer = await post(session, "/chat/completions", body)
                assert answer.status_code >= 500
                assert "rollout.gateway.call_format" in answer.json()["error"]["message"]

    asyncio.run(run())


def calls_wrongly(text: str, tools: Any) -> Any:
    raise KeyError("name")


def calls_nothing(text: str, tools: Any) -> Any:
    return None


# -- what else agents do


async def post(session: Session, path: str, body: Any, **headers: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {session.api_key}"} | headers
    async with httpx.AsyncClient(timeout=20) as client:
        return await client.post(session.base_url + path, json=body, headers=headers)


def ask(*contents: str, **fields: Any) -> dict[str, Any]:
    """A body whose contents alternate between user and assistant."""
    roles = ("user", "assistant")
    return {
        "messages": [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]
    } | fields


def run(
    tokenizer: Any,
    test: Callable[[Session, StubEngine], Any],
    **config: Any,
) -> None:
    async def inner() -> None:
        async with opened(tokenizer, **config) as (session, engine, _):
            await test(session, engine)

    asyncio.run(inner())


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_a_fork_shares_what_came_before_and_trains_it_once(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        first = said(await post(session, "/chat/completions", ask("go")))
        for more in ("left", "right"):
            await post(session, "/chat/completions", ask("go", first, more))
        await post(session, "/chat/completions", ask("a summary"))  # compaction: a chat of its own
        check_exact(session, engine, rows=3)
        assert session.trajectory.forks == 2

    run(tokenizer, test)


def test_an_edited_answer_is_not_trained(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        first = said(await post(session, "/chat/completions", ask("go")))
        await post(session, "/chat/completions", ask("go", first + " edited", "on"))
        check_exact(session, engine, rows=2)

    run(tokenizer, test)


def test_a_cut_answer_gets_the_end_of_its_turn(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        first = await post(session, "/chat/completions", ask("go", max_tokens=12))
        assert first.json()["choices"][0]["finish_reason"] == "length"
        await post(session, "/chat/completions", ask("go", said(first), "on"))
        check_exact(session, engine, rows=1)
        before, after = engine.wrote
        read = after.input_tokens[len(before.input_tokens) + before.output_len :]
        assert tokenizer.decode(read) == "<eos>\n<bos>user:on<eos>\n<bos>assistant: "

    run(tokenizer, test)


def test_two_that_wait_at_once_are_two_samples(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        engine.gate = asyncio.Event()
        both = [asyncio.create_task(post(session, "/chat/completions", ask("go"))) for _ in "ab"]
        while len(engine.asked) < 2:
            await asyncio.sleep(0.01)
        engine.gate.set()
        one, two = [said(await t) for t in both]
        assert one != two
        check_exact(session, engine, rows=2)

    run(tokenizer, test)


def test_a_retry_gets_the_answer_of_its_first_attempt(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        engine.gate = asyncio.Event()
        first = asyncio.create_task(post(session, "/chat/completions", ask("go")))
        while not engine.asked:
            await asyncio.sleep(0.01)
        first.cancel()  # the client gave up waiting
        await asyncio.wait({first})
        await asyncio.sleep(0.1)
        retried = {"x-stainless-retry-count": "1"}
        again = asyncio.create_task(post(session, "/chat/completions", ask("go"), **retried))
        await asyncio.sleep(0.1)
        engine.gate.set()
        text = said(await again)
        assert len(engine.asked) == 1
        assert said(await post(session, "/chat/completions", ask("go"), **retried)) == text
        keyed = {"Idempotency-Key": "k1"}
        other = said(await post(session, "/chat/completions", ask("go"), **keyed))
        assert said(await post(session, "/chat/completions", ask("go"), **keyed)) == other != text
        assert len(engine.asked) == 2
        check_exact(session, engine, rows=2)

    run(tokenizer, test)


def test_the_same_request_is_another_sample_unless_the_client_says_otherwise(
    tokenizer: Any,
) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        first_try = {"x-stainless-retry-count": "0"}
        texts = [
            said(await post(session, "/chat/completions", ask("go"), **headers))
            for headers in ({}, {}, first_try, {"x-stainless-retry-count": "many"})
        ]
        assert len(set(texts)) == len(engine.asked) == 4
        retried = {"x-stainless-retry-count": "2"}
        assert said(await post(session, "/chat/completions", ask("go"), **retried)) == texts[-1]
        check_exact(session, engine, rows=4)

    run(tokenizer, test)


def test_a_retry_of_an_answer_that_came_late_gets_that_one(tokenizer: Any) -> None:
    """One of several equal requests lost its client: its retry gets its own sample."""

    async def test(session: Session, engine: StubEngine) -> None:
        engine.gate = asyncio.Event()
        left, stays = (
            asyncio.create_task(post(session, "/chat/completions", ask("go"))) for _ in "ab"
        )
        while len(engine.asked) < 2:
            await asyncio.sleep(0.01)
        left.cancel()
        await asyncio.wait({left})
        await asyncio.sleep(0.1)
        engine.gate.set()
        one = said(await stays)
        retried = {"x-stainless-retry-count": "1"}
        assert said(await post(session, "/chat/completions", ask("go"), **retried)) != one
        assert len(engine.asked) == 2
        check_exact(session, engine, rows=2)

    run(tokenizer, test)


def test_a_retry_of_a_failed_request_is_no_other_clients_sample(tokenizer: Any) -> None:
    """Of three equal requests one fails: its retry is another sample, and the next one a replay."""

    async def test(session: Session, engine: StubEngine) -> None:
        engine.fails = 1
        answers = [await post(session, "/chat/completions", ask("go")) for _ in "abc"]
        assert [a.status_code for a in answers] == [502, 200, 200]
        retried = {"x-stainless-retry-count": "1"}
        own = said(await post(session, "/chat/completions", ask("go"), **retried))
        texts = [said(a) for a in answers[1:]]
        assert own not in texts and len(engine.wrote) == 3
        again = said(await post(session, "/chat/completions", ask("go"), **retried))
        assert again == own and len(engine.wrote) == 3

    run(tokenizer, test)


def text_kept() -> int:
    """Bytes that are kept of what clients sent."""
    gc.collect()
    wanted = tracemalloc.Filter(True, "*/json/decoder.py")
    statistics = tracemalloc.take_snapshot().filter_traces([wanted]).statistics("filename")
    return sum(s.size for s in statistics)


def test_a_long_history_is_kept_once(tokenizer: Any) -> None:
    """What a session keeps grows with the chat, not with the chat times its turns."""

    async def test(session: Session, engine: StubEngine) -> None:
        contents, kept = ["go " + "long " * 4000], []
        for turn in range(14):
            contents.append(said(await post(session, "/chat/completions", ask(*contents))))
            contents.append("on")
            if turn in (3, 13):
                kept.append(text_kept())
        check_exact(session, engine, rows=1)
        assert kept[0] > 0 and kept[1] - kept[0] < 3 * len(contents[0])  # of ten turns

    tracemalloc.start()
    try:
        run(tokenizer, test)
    finally:
        tracemalloc.stop()


def test_an_answer_that_nobody_took_is_counted_and_not_trained(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        await post(session, "/chat/completions", ask("go"))
        engine.gate = asyncio.Event()
        lost = asyncio.create_task(post(session, "/chat/completions", ask("other")))
        while len(engine.asked) < 2:
            await asyncio.sleep(0.01)
        lost.cancel()
        await asyncio.wait({lost})
        await asyncio.sleep(0.1)
        engine.gate.set()
        await asyncio.sleep(0.2)
        session.close()
        assert session.lost == 1 and len(engine.wrote) == 2
        session.trajectory.score(1.0)
        assert len(to_batch([session.trajectory])["input_ids"]) == 1

    run(tokenizer, test)


def test_a_session_that_has_ended_tells_who_waits_and_counts_once(tokenizer: Any) -> None:
    ids = {"token_ids": [1, 2], "sampling_params": {}}

    async def test(session: Session, engine: StubEngine) -> None:
        engine.gate = asyncio.Event()
        headers = {"Authorization": f"Bearer {session.api_key}"}
        url = f"{session.anthropic_url}/inference/v1/generate"
        client = httpx.AsyncClient(timeout=20)
        chat = post(session, "/chat/completions", ask("go"))
        calls = (chat, client.post(url, json=ids, headers=headers))
        waiting = [asyncio.create_task(call) for call in calls]
        while len(engine.asked) < 2:
            await asyncio.sleep(0.01)
        session.close()
        session.close()
        assert session.lost == 2
        for call in (*waiting, post(session, "/reward", {"reward": 1})):
            assert (await call).status_code == 401
        await client.aclose()
        assert session.lost == 2 and session.reward is None
        recorded = (session.trajectory, *session.traces.values())
        assert all(len(trajectory.turns) == 1 for trajectory in recorded)

    run(tokenizer, test)


@pytest.mark.parametrize("keep_alive", [0.05, 30.0])
def test_a_stream_that_its_client_leaves_is_trained_by_nobody(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, keep_alive: float
) -> None:
    """It leaves before the stream begins, and between two signs of life."""
    monkeypatch.setattr("megarl.rollout.gateway.gateway.KEEP_ALIVE", keep_alive)

    async def test(session: Session, engine: StubEngine) -> None:
        engine.gate = asyncio.Event()
        stream = post(session, "/chat/completions", ask("go", stream=True))
        left = asyncio.create_task(stream)
        while not engine.asked:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        left.cancel()
        await asyncio.wait({left})
        await asyncio.sleep(0.1)
        engine.gate.set()
        await asyncio.sleep(0.2)
        session.close()
        assert len(engine.wrote) == session.lost == len(session.trajectory.turns) == 1

    run(tokenizer, test)


def test_a_body_that_ends_after_its_session_is_answered_by_nobody(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        sent, ends = asyncio.Event(), asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            raw = json.dumps(ask("go")).encode()
            yield raw[:9]
            sent.set()
            await ends.wait()
            yield raw[9:]

        headers = {"Authorization": f"Bearer {session.api_key}"}
        async with httpx.AsyncClient(timeout=20) as client:
            url = session.base_url + "/chat/completions"
            call = asyncio.create_task(client.post(url, content=body(), headers=headers))
            await sent.wait()
            await asyncio.sleep(0.1)
            session.close()
            ends.set()
            assert (await call).status_code == 401
        assert engine.asked == []

    run(tokenizer, test)


@pytest.mark.parametrize("path", ["/chat/completions", "/messages", "/responses"])
def test_a_stream_is_refused_by_its_status(tokenizer: Any, path: str) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        empty = {"messages": [], "input": [], "stream": True}
        assert (await post(session, path, empty)).status_code == 400
        engine.fails = 1
        content = {"messages": ask("go")["messages"], "input": "go", "stream": True}
        assert (await post(session, path, content)).status_code == 502
        assert (await post(session, path, content)).is_success

    run(tokenizer, test)


def test_a_failed_generation_is_retried_or_told(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        engine.fails = 1
        answer = await post(session, "/chat/completions", ask("go"))
        assert answer.status_code == 502 and "no server is left" in answer.text
        assert session.failures == ["RuntimeError: no server is left"]
        assert said(await post(session, "/chat/completions", ask("go")))
        assert session.failures == []
        engine.fails = 1
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            await client.chat.completions.create(  # tries again by itself
                model="any", messages=[{"role": "user", "content": "more"}]
            )
        assert session.failures == []

    run(tokenizer, test)


def test_requests_are_of_the_episode_that_opened_the_session(tokenizer: Any) -> None:
    """The gateway, which all episodes share, starts in the context of another one."""

    async def episode(gateway: Gateway, version: int) -> None:
        current_episode.set(EpisodeContext(began=version))
        with gateway.session(GCONFIG, tokenizer) as session:
            await post(session, "/chat/completions", ask("go"))

    async def test() -> list[int | None]:
        async with opened(tokenizer) as (_, engine, gateway):
            for version in (5, 6):
                await asyncio.create_task(episode(gateway, version))
            return engine.began

    assert asyncio.run(test()) == [5, 6]


def test_token_ids_logprobs_and_several_answers_on_demand(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        body = ask("go", n=2, logprobs=True, return_token_ids=True, stop=["x"], max_tokens=40)
        answer = (await post(session, "/chat/completions", body)).json()
        assert [c["token_ids"] for c in answer["choices"]] == [
            w.output_tokens for w in engine.wrote
        ]
        assert answer["prompt_token_ids"] == engine.wrote[0].input_tokens
        logprobs = [e["logprob"] for e in answer["choices"][1]["logprobs"]["content"]]
        assert logprobs == engine.wrote[1].output_logprobs
        gconfig = engine.asked[0].gconfig
        assert (gconfig.stop, gconfig.max_new_tokens, gconfig.n_samples) == (["x"], 40, 1)
        check_exact(session, engine, rows=2)

    run(tokenizer, test)


def test_special_tokens_in_what_an_agent_sends_are_counted_once(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        take_counts()
        first = said(await post(session, "/chat/completions", ask("<eos><bos>assistant: 42")))
        body = ask("<eos><bos>assistant: 42", first, "on")
        await post(session, "/chat/completions", body)
        check_exact(session, engine, rows=1)
        assert take_counts()["special_in_content"] == 1

    run(tokenizer, test)


def test_the_policy_continues_a_message_that_is_begun(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        body = ask("go", "Sure:") | {"model": "any", "max_tokens": 9}
        assert (await post(session, "/messages", body)).status_code == 200
        assert tokenizer.decode(engine.asked[0].input_ids).endswith("<bos>assistant:Sure:")

    run(tokenizer, test)


def test_rewards_of_the_outcome_and_of_one_answer(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        first = (await post(session, "/chat/completions", ask("go"))).json()["id"]
        second = (await post(session, "/responses", {"input": "go on"})).json()["id"]
        for body in ({"reward": 2.0}, {"reward": 0.5, "id": first}, {"reward": 0.25, "id": second}):
            assert (await post(session, "/reward", body)).status_code == 200
        assert session.reward == 2.0
        earned = [t.reward for t in session.trajectory.turns if t.response is not None]
        assert earned == [0.5, 0.25]
        for bad in ({}, {"reward": "1"}, {"reward": True}, {"reward": 1.0, "id": "chatcmpl-x"}):
            assert (await post(session, "/reward", bad)).status_code in (400, 404)

    run(tokenizer, test)


def test_rewards_of_all_answers_have_one_bound(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        first = (await post(session, "/chat/completions", ask("go"))).json()["id"]
        second = (await post(session, "/chat/completions", ask("stop"))).json()["id"]
        sent = [
            (first, 6e5, 200),
            (second, 6e5, 400),
            (second, -6e5, 400),  # a discount would make it count less
            (None, 5e5, 400),
            (second, 3e5, 200),
            (first, -6e5, 200),  # in place of the one before
            (None, 1e5, 200),
            (first, 10**400, 400),
        ]
        for answer, reward, status in sent:
            body = {"reward": reward} | ({} if answer is None else {"id": answer})
            got = await post(session, "/reward", body)
            assert got.status_code == status, body
            assert status == 200 or "reward" in got.text
        session.trajectory.score(session.reward or 0.0)
        assert session.trajectory.reward == 1e5 - 6e5 + 3e5

    run(tokenizer, test)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": [{"role": "user"}, *[7] * 2000]}),
        ("/messages", {"messages": [{"role": "user", "content": "a"}, *[7] * 2000]}),
        ("/messages/count_tokens", {"messages": [7] * 2000}),
        ("/responses", {"input": [{"type": "message"}, *[7] * 2000]}),
        ("/responses", {"messages": [], "input": [7] * 2000}),
    ],
)
def test_more_messages_than_a_context_has_tokens_are_not_read(
    tokenizer: Any, path: str, body: Any
) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        answer = await post(session, path, body)  # 7 is no message, which reading would find
        assert answer.status_code == 400 and "prompt is too long: 200" in answer.text
        assert engine.asked == []

    run(tokenizer, test, context_length=1000)


def test_an_answer_ends_where_the_context_does(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        assert (await post(session, "/chat/completions", ask("go"))).status_code == 200
        (asked,) = engine.asked
        room = 80 - len(asked.input_ids)
        assert 0 < asked.gconfig.max_new_tokens == room < GCONFIG.max_new_tokens

    run(tokenizer, test, context_length=80)


def test_a_chat_goes_on_with_the_same_tools_alone(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        first = said(await post(session, "/chat/completions", ask("go")))
        longer = {"messages": [*ask("go")["messages"], {"role": "assistant", "content": first}]}
        longer["messages"].append({"role": "user", "content": "on"})
        await post(session, "/chat/completions", longer | {"tools": [LOOK]})
        assert "tools:" in tokenizer.decode(engine.asked[1].input_ids)
        assert session.trajectory.forks == 1

    run(tokenizer, test)


@pytest.mark.parametrize("path", ["/chat/completions", "/messages", "/responses"])
def test_a_request_has_its_own_options_of_the_template(tokenizer: Any, path: str) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        body = ask("go") | {"max_tokens": 9, "input": "go"}
        for given in ({"quiet": True}, {}, None):
            answer = await post(session, path, body | {"chat_template_kwargs": given})
            assert answer.status_code == 200, answer.text
        assert [tokenizer.decode(a.input_ids).endswith("hush") for a in engine.asked] == [
            True,
            0,
            0,
        ]
        for wrong in ({"tokenize": True}, {"chat_template": "x"}, [1]):
            answer = await post(session, path, body | {"chat_template_kwargs": wrong})
            assert answer.status_code == 400 and "chat_template_kwargs" in answer.text

    plain = tokenizer.chat_template
    tokenizer.chat_template = plain + "{% if quiet %}hush{% endif %}"
    try:
        run(tokenizer, test)
    finally:
        tokenizer.chat_template = plain


def test_a_chat_goes_on_with_the_same_options_alone(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        quiet = {"chat_template_kwargs": {"quiet": True}}
        first = said(await post(session, "/chat/completions", ask("go") | quiet))
        longer = {"messages": [*ask("go")["messages"], {"role": "assistant", "content": first}]}
        longer["messages"].append({"role": "user", "content": "on"})
        await post(session, "/chat/completions", longer | quiet)
        assert session.trajectory.forks == 0
        await post(session, "/chat/completions", longer)
        assert session.trajectory.forks == 1

    run(tokenizer, test)


@pytest.mark.parametrize("format", ["hermes", "llama3", "deepseek", "glm", "qwen3_coder"])
def test_a_call_that_nests_too_deep_is_text_for_the_agent(tokenizer: Any, format: str) -> None:
    deep = '{"name": "look", "parameters": {"a": ' + "[" * 2000
    for text in (f"<tool_call>{deep}", deep, f"<｜tool▁call▁begin｜>look<｜tool▁sep｜>{deep}"):
        assert call_parser(format)(text, [LOOK]) == (text, [])


@pytest.mark.parametrize("path", ["/chat/completions", "/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_string_is_in_the_tokens_alone(tokenizer: Any, path: str, stream: bool) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        anthropic = path == "/messages"
        stops = {"stop_sequences" if anthropic else "stop": ["</think>"]}
        body = ask("go") | stops | {"max_tokens": 60, "stream": stream}
        answer = await post(session, path, body)
        assert answer.status_code == 200 and "ab" in answer.text
        assert "</think>" not in answer.text.replace('"stop_sequence":"</think>"', "")
        assert tokenizer.decode(engine.wrote[0].output_tokens).count("</think>") == 1
        if anthropic:
            assert '"stop_reason":"stop_sequence"' in answer.text
            assert '"stop_sequence":"</think>"' in answer.text
        history = [*ask("go")["messages"], {"role": "assistant", "content": "<think>ab"}]
        history.append({"role": "user", "content": "on"})
        await post(session, path, body | {"messages": history})
        assert session.trajectory.forks == 0

    run(tokenizer, test)


@pytest.mark.parametrize("path", ["/chat/completions", "/messages", "/responses"])
@pytest.mark.parametrize("name", ["guided_json", "guided_regex", "structured_outputs", "ebnf"])
def test_constraints_of_a_servers_own_are_refused(tokenizer: Any, path: str, name: str) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        body = ask("go") | {"input": "go", "max_tokens": 9}
        answer = await post(session, path, body | {name: {"type": "object"}})
        assert answer.status_code == 400 and name in answer.text and not engine.asked

    run(tokenizer, test)


def test_a_url_of_ipv6_is_one(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        assert session.base_url.startswith("http://[::1]:")
        said(await post(session, "/chat/completions", ask("go")))

    run(tokenizer, test, host="::1")


def test_a_call_without_arguments_has_none(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        for arguments in ("", None, {}, "{}"):
            call = {"id": "x", "type": "function"}
            call["function"] = {"name": "look", "arguments": arguments}
            messages = [*ask("go")["messages"], {"role": "assistant", "tool_calls": [call]}]
            messages.append({"role": "tool", "tool_call_id": "x", "content": "r"})
            said(await post(session, "/chat/completions", {"messages": messages}))
            assert "<call>{}</call>" in tokenizer.decode(engine.asked[-1].input_ids)

    run(tokenizer, test)


def test_a_prompt_that_is_asked_again_has_another_seed(tokenizer: Any) -> None:
    async def test() -> None:
        async with opened(tokenizer) as (_, engine, gateway):
            with gateway.session(GCONFIG.new(seed=7), tokenizer) as session:
                for _ in range(3):
                    await post(session, "/chat/completions", ask("go"))
            seeds = [request.seed for request in engine.asked]
            assert len(set(seeds)) == 3 and None not in seeds

    asyncio.run(test())


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/chat/completions", ask(), "messages is empty"),
        ("/chat/completions", ask("go", n=0), "n=0"),
        ("/chat/completions", ask("go", response_format={"type": "json_object"}), "json_object"),
        ("/chat/completions", ask("go", tool_choice="required"), "tool_choice"),
        ("/chat/completions", ask("go", logit_bias={"1": 2}), "logit_bias"),
        ("/chat/completions", {"messages": [{"role": "robot"}]}, "robot"),
        ("/chat/completions", {"messages": "go"}, "list of objects"),
        (
            "/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "image_url",
        ),
        ("/chat/completions", ask("x" * 400), "maximum context length is 300 tokens"),
        ("/messages", ask("go", tools=[{"type": "web_search", "name": "w"}]), "input_schema"),
        ("/responses", {"input": "go", "previous_response_id": "r"}, "previous_response_id"),
        ("/responses", {"input": "go", "tools": [{"type": "web_search"}]}, "web_search"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(
    tokenizer: Any, path: str, body: Any, why: str
) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        answer = await post(session, path, body)
        assert answer.status_code == 400 and why in answer.json()["error"]["message"]
        assert engine.asked == []

    run(tokenizer, test, context_length=300)


# -- bounds


LONE = "\ud800"
MALFORMED = [
    ("/chat/completions", {"messages": [{"role": "user", "content": [5]}]}),
    ("/chat/completions", ask("go", tools=[{}])),
    ("/chat/completions", ask("go", tools=[{"function": "look"}])),
    ("/chat/completions", ask("go", tools=[{"function": {"name": 5}}])),
    ("/chat/completions", ask("go", response_format="json")),
    ("/chat/completions", ask("go", tool_choice={"type": "function"})),
    ("/chat/completions", ask("go", stream_options=5, model=LONE)),
    ("/chat/completions", ask(f"go {LONE}")),
    ("/chat/completions", ask("go", metadata={LONE: 1})),
    (
        "/chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": "look"}]}]},
    ),
    ("/chat/completions", json.dumps(ask("go")).encode().replace(b"go", b"\xed\xa0\x80")),
    ("/messages", ask("go", tool_choice="auto")),
    ("/messages", ask("go", tools=[{"name": 5, "input_schema": {}}])),
    ("/responses", {"input": "go", "text": "text"}),
    ("/responses", {"input": "go", "tools": [{"type": "function"}]}),
    ("/reward", {"reward": 10**400}),
    ("/reward", {"reward": 1e7}),
    ("/reward", {"reward": -1e38}),
]


@pytest.mark.parametrize(("path", "body"), MALFORMED)
def test_what_has_another_form_is_a_bad_request(tokenizer: Any, path: str, body: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {session.api_key}"}
        async with httpx.AsyncClient(timeout=20) as client:
            answer = await client.post(session.base_url + path, content=raw, headers=headers)
        assert answer.status_code == 400, answer.text
        assert engine.asked == [] and session.reward is None

    run(tokenizer, test)


def test_arguments_that_nest_too_deep_are_text_or_refused(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        for depth in (100, 950, 5_000):
            call = {"id": "c", "function": {"name": "look", "arguments": "[" * depth + "]" * depth}}
            body = ask("go") | {"tools": [LOOK]}
            body["messages"].append({"role": "assistant", "tool_calls": [call]})
            body["messages"].append({"role": "tool", "tool_call_id": "c", "content": "seen"})
            answer = await post(session, "/chat/completions", body)
            assert answer.status_code in (200, 400), answer.text

    run(tokenizer, test)


def test_what_an_answer_repeats_may_have_long_numbers(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        answer = await post(session, "/responses", {"input": "go", "metadata": {"n": 10**30}})
        assert answer.status_code == 200 and answer.json()["metadata"] == {"n": 10**30}

    run(tokenizer, test)


def test_answers_of_a_request_and_of_a_session_are_bounded(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.rollout.gateway.session.MAX_N", 3)
    monkeypatch.setattr("megarl.rollout.gateway.session.MAX_ANSWERS", 5)

    async def test(session: Session, engine: StubEngine) -> None:
        assert (await post(session, "/chat/completions", ask("go", n=3))).status_code == 200
        refused = await post(session, "/chat/completions", ask("go", n=4))
        assert refused.status_code == 400 and "at most 3 answers" in refused.text
        assert (await post(session, "/chat/completions", ask("go", n=2))).status_code == 200
        refused = await post(session, "/chat/completions", ask("more"))
        assert refused.status_code == 400 and "at most 5" in refused.text
        assert session.failures == []
        check_exact(session, engine, rows=5)

    run(tokenizer, test)


def test_a_text_that_no_context_holds_is_refused_before_it_is_rendered(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        tokenizer.chat_template = "{{ raise_exception('rendered') }}"
        answer = await post(session, "/chat/completions", ask("x" * 1_000_000))
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        large = await post(session, "/chat/completions", ask("x" * (9 << 20)))
        assert large.status_code == 413 and engine.asked == []

    try:
        run(tokenizer, test, context_length=300)
    finally:
        tokenizer.chat_template = TEMPLATE


def test_long_texts_are_rendered_beside_the_loop_and_each_for_itself(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        contents = [f"{i}" + " ab" * 25_000 for i in range(4)]
        answers = [
            asyncio.create_task(post(session, "/chat/completions", ask(c))) for c in contents
        ]
        for i in range(5):
            short = await post(session, "/chat/completions", ask(f"short {i}"))
            assert short.status_code == 200
        assert [(await a).status_code for a in answers] == [200] * 4
        prompts = [tokenizer.decode(r.input_ids) for r in engine.asked if len(r.input_ids) > 1000]
        assert len(prompts) == 4 and all(any(c in p for p in prompts) for c in contents)

    run(tokenizer, test)


@pytest.mark.parametrize(
    ("rewards", "rewarded", "status"),
    [
        ("auto", False, 200),
        ("auto", True, 403),
        ("auto", None, 403),  # a workflow of one's own, which scores
        ("always", True, 200),
        ("never", False, 403),
    ],
)
def test_who_may_send_rewards(tokenizer: Any, rewards: str, rewarded: Any, status: int) -> None:
    async def inner() -> None:
        async with opened(tokenizer, rewards=rewards) as (_, _, gateway):
            named = {} if rewarded is None else {"rewarded": rewarded}
            with gateway.session(GCONFIG, tokenizer, **named) as session:
                first = (await post(session, "/chat/completions", ask("go"))).json()["id"]
                for body in ({"reward": 1.0}, {"reward": 0.5, "id": first}):
                    assert (await post(session, "/reward", body)).status_code == status
                assert session.reward == (1.0 if status == 200 else None)

    asyncio.run(inner())


def test_a_key_opens_its_own_session_alone(tokenizer: Any) -> None:
    async def inner() -> None:
        async with opened(tokenizer) as (session, _, gateway):
            with gateway.session(GCONFIG, tokenizer) as other:
                stolen = {"Authorization": f"Bearer {other.api_key}"}
                answer = await post(session, "/chat/completions", ask("go"), **stolen)
                assert answer.status_code == 401
                by_key = f"{gateway.address}/v1/chat/completions"
                async with httpx.AsyncClient() as client:
                    answer = await client.post(by_key, json=ask("go"), headers=stolen)
                    assert answer.status_code == 200 and other.trajectory.answers
                    assert (await client.get(f"{session.base_url}/models")).status_code == 401
            assert not session.trajectory.answers
            answer = await post(other, "/chat/completions", ask("go"))
            assert answer.status_code == 401  # it has ended

    asyncio.run(inner())


def test_sessions_need_a_chat_template(tokenizer: Any, tmp_path: Path) -> None:
    plain = save_tokenizer(tmp_path)
    plain.chat_template = None

    async def inner() -> None:
        async with opened(tokenizer) as (_, _, gateway):
            with pytest.raises(ValueError, match="chat template"), gateway.session(GCONFIG, plain):
                pass

    asyncio.run(inner())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            'ok <tool_call>{"name": "look", "arguments": {"b": 1}}</tool_call>',
            ("ok", [("look", '{"b": 1}')]),
        ),
        ("<tool_call>{broken</tool_call>", ("<tool_call>{broken</tool_call>", [])),
        ("no call", ("no call", [])),
    ],
)
def test_calls_are_told_apart_from_the_text(text: str, expected: Any) -> None:
    assert call_parser("hermes")(text, [LOOK]) == expected
    with pytest.raises(ValueError, match="call_format='robot'"):
        call_parser("robot")


def test_what_is_wrong_is_said_before_anything_starts() -> None:
    for override in ("call_format=robot", "rewards=perhaps", "port=70000", "max_n=3"):
        with pytest.raises(ConfigError, match=rf"rollout\.gateway.*{override.partition('=')[0]}"):
            check_code(load_config(None, [f"rollout.gateway.{override}"]), {})
    agents = {
        "examples.openai_agent:nothing": "has no nothing",
        "json:__doc__": "with a method run",
    }
    for agent, why in agents.items():
        with pytest.raises(ValueError, match=why):
            AgentWorkflow(no_reward, GCONFIG, None, agent=agent)
    AgentWorkflow(no_reward, GCONFIG, None, agent="examples.openai_agent:solve")
