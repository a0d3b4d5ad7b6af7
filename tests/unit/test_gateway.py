"""The gateway with real clients and a stub in place of the servers: what is recorded is exactly
what was sampled, one line for a linear history, whatever the client does to the messages."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from megarl.api.records import ModelRequest, ModelResponse
from megarl.config.gateway import GatewayConfig
from megarl.config.rollout import GenerationHyperparameters
from megarl.rollout.gateway.gateway import Gateway
from megarl.rollout.gateway.session import Session
from megarl.rollout.trajectory import to_batch
from tests.tiny_tokenizer import save_tokenizer

GCONFIG = GenerationHyperparameters(max_new_tokens=24, temperature=0.7)
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


def calls_look(text: str) -> tuple[str, list[tuple[str, str]]]:
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
        self.fails = 0
        self.gate: asyncio.Event | None = None

    def get_version(self) -> int:
        return 3

    async def agenerate_many(self, reqs: Sequence[ModelRequest]) -> list[ModelResponse]:
        self.asked += reqs
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
    tokenizer: Any, **config: Any
) -> AsyncIterator[tuple[Session, StubEngine, Gateway]]:
    engine = StubEngine(tokenizer)
    gateway = Gateway(engine, GatewayConfig(**config))  # type: ignore[arg-type]

    async def context() -> int | None:
        return None

    await gateway.start(context)
    try:
        with gateway.session(GCONFIG, tokenizer, index=2) as session:
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
                model="any", messages=messages, tools=[LOOK], temperature=2.0  # type: ignore[list-item]
            )
            said = answer.choices[0].message
            assert answer.choices[0].finish_reason == "tool_calls" and said.tool_calls
            messages.append({k: v for k, v in said.model_dump().items() if k in ("role", "content")})
            call = said.tool_calls[0]
            function = {"name": "look", "arguments": rewritten(call.function.arguments)}  # type: ignore[union-attr]
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
                model="any", messages=messages, tools=[LOOK], stream=True  # type: ignore[list-item]
            ):
                delta = chunk.choices[0].delta
                content += delta.content or ""
                calls += [c.model_dump() for c in delta.tool_calls or []]
                ends.append(chunk.choices[0].finish_reason)
            assert ends[-1] == "tool_calls"
            messages.append({"role": "assistant", "content": content, "tool_calls": calls})
            messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": "seen"})


async def responses_agent(session: Session) -> None:
    tool = {"type": "function"} | LOOK["function"]  # type: ignore[operator]
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
        base_url=session.base_url, api_key=session.api_key  # the OpenAI URL does, too
    ) as client:
        messages: list[Any] = [{"role": "user", "content": "go"}]
        for _ in range(4):
            async with client.messages.stream(
                model="any", max_tokens=64, messages=messages, tools=[tool]
            ) as stream:
                answer = await stream.get_final_message()
            messages.append({"role": "assistant", "content": [b.model_dump() for b in answer.content]})
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
PARSER = f"{Path(__file__).resolve()}:calls_look"


@pytest.mark.parametrize("agent", AGENTS)
def test_a_linear_history_is_one_row_of_what_was_sampled(
    tokenizer: Any, agent: Callable[[Session], Any]
) -> None:
    async def run() -> None:
        async with opened(tokenizer, tool_format=PARSER) as (session, engine, _):
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
        async with opened(tokenizer, tool_format=PARSER, reuse=False) as (session, engine, _):
            await agent(session)
            check_exact(session, engine, rows=4)

    asyncio.run(run())
