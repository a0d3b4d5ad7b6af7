"""Coding agents at the gateway: bodies of the shapes that Claude Code, codex, opencode and
mini-swe-agent send, and what these clients do to the history that they repeat."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from megarl.rollout.episode import check_episode
from megarl.rollout.gateway.session import Session
from megarl.rollout.loop_thread import take_counts
from megarl.rollout.trajectory import to_batch
from tests.tiny_tokenizer import save_tokenizer
from tests.unit.test_gateway import TEMPLATE, StubEngine, check_exact, opened

# a template of the kind that refuses a system message anywhere but at the beginning
ONE_SYSTEM = (
    "{%- for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
) + TEMPLATE
PARSERS = {name: f"{__name__}:{name}" for name in ("edits", "patches", "searches")}


def edits(text: str, tools: Any) -> tuple[str, list[tuple[str, str]]]:
    """Reads a call of `Edit` out of every answer; its text ends with spaces."""
    values = {"file_path": "a.py", "old_string": "x", "new_string": f"{text[:5]}  "}
    return text[5:], [("Edit", json.dumps(values))]


def patches(text: str, tools: Any) -> tuple[str, list[tuple[str, str]]]:
    """Reads a call of codex's free-form tool out of every answer."""
    return "", [("apply_patch", json.dumps({"input": f"*** Begin\n{text}"}))]


def searches(text: str, tools: Any) -> tuple[str, list[tuple[str, str]]]:
    """Reads a call of a tool of a namespace out of every answer."""
    return "", [("files__search", json.dumps({"for": text}))]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(params=[TEMPLATE, ONE_SYSTEM], ids=["any system", "one system"])
def tokenizer(request: pytest.FixtureRequest, directory: Any) -> Any:
    found = save_tokenizer(directory)
    found.chat_template = request.param
    return found


async def post(session: Session, url: str, body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with httpx.AsyncClient(timeout=20) as client:
        return await client.post(session.anthropic_url + url, json=body, headers=headers)


def run(tokenizer: Any, test: Callable[[Session, StubEngine], Any], **config: Any) -> None:
    async def inner() -> None:
        async with opened(tokenizer, **config) as (session, engine, _):
            await test(session, engine)

    asyncio.run(inner())


def claude(*messages: dict[str, Any], **further: Any) -> dict[str, Any]:
    """A body of Claude Code: the system in blocks, and a message of the system behind the user's
    first."""
    blocks = [{"type": "text", "text": "a header"}, {"type": "text", "text": "be a coder"}]
    blocks[1]["cache_control"] = {"type": "ephemeral"}
    edit = {"name": "Edit", "description": "Edits.", "input_schema": {"type": "object"}}
    first = {"role": "user", "content": [{"type": "text", "text": "mend it"}]}
    second = {"role": "system", "content": "today is Monday"}
    body = {"model": "claude", "max_tokens": 64000, "system": blocks, "tools": [edit]}
    body |= {"thinking": {"type": "adaptive"}, "metadata": {"user_id": "u"}}
    return body | {"messages": [first, second, *messages]} | further


def test_claude_code_is_one_row_though_it_edits_its_calls(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        history: list[Any] = []
        for _ in range(3):
            answer = await post(session, "/v1/messages?beta=true", claude(*history))
            assert answer.status_code == 200, answer.text
            content = [b for b in answer.json()["content"] if b["type"] != "thinking"]
            (call,) = (b for b in content if b["type"] == "tool_use")
            asked = call["input"]  # what the client makes of it before it sends it again
            call["input"] = asked | {"replace_all": False}
            call["input"]["new_string"] = asked["new_string"].rstrip()
            result = {"type": "tool_result", "tool_use_id": call["id"], "content": "done"}
            history += [{"role": "assistant", "content": content}]
            history += [{"role": "user", "content": [result]}]
        check_exact(session, engine, rows=1)

    run(tokenizer, test, call_format=PARSERS["edits"])


def test_opencode_is_one_row_though_it_renames_calls_of_unknown_tools(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        tool = {"type": "function", "function": {"name": "bash", "parameters": {}}}
        messages: list[Any] = [{"role": "system", "content": "be a coder"}]
        messages.append({"role": "user", "content": "mend it"})
        for _ in range(3):
            body = {"messages": messages, "tools": [tool], "tool_choice": "auto"}
            said = (await post(session, "/v1/chat/completions", body)).json()
            message = said["choices"][0]["message"]
            (call,) = message["tool_calls"]
            call["function"] = {"name": "invalid", "arguments": '{"tool": "Edit"}'}
            messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "no"}]
        check_exact(session, engine, rows=1)
        assert "invalid" not in "".join(tokenizer.decode(r.input_ids) for r in engine.asked)

    run(tokenizer, test, call_format=PARSERS["edits"])


def test_a_call_under_another_id_is_the_clients_own(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        tool = {"type": "function", "function": {"name": "Edit", "parameters": {}}}
        first = {"messages": [{"role": "user", "content": "go"}], "tools": [tool]}
        said = (await post(session, "/v1/chat/completions", first)).json()
        message = said["choices"][0]["message"]
        (call,) = message["tool_calls"]
        call["id"], call["function"]["arguments"] = "mine", "{}"
        seen = {"role": "tool", "tool_call_id": "mine", "content": "seen"}
        longer = first | {"messages": [*first["messages"], message, seen]}
        assert (await post(session, "/v1/chat/completions", longer)).is_success
        check_exact(session, engine, rows=2)

    run(tokenizer, test, call_format=PARSERS["edits"])


def codex(*items: dict[str, Any], **further: Any) -> dict[str, Any]:
    """A body of codex: two developers' messages and two of the user, functions, a namespace of
    them, and a custom tool."""

    def says(role: str, text: str) -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

    function = {"type": "function", "name": "search", "parameters": {"type": "object"}}
    tools = [
        {"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object"}},
        {"type": "namespace", "name": "files", "description": "Files.", "tools": [function]},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
    ]
    first = [says("developer", "be a coder"), says("developer", "be brief")]
    first += [says("user", "this is the machine"), says("user", "mend it")]
    body = {"model": "policy", "instructions": "you are codex", "tools": tools, "store": False}
    body |= {"include": ["reasoning.encrypted_content"], "prompt_cache_key": "k"}
    return body | {"input": [*first, *items]} | further


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    lines = answer.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


@pytest.mark.parametrize(
    ("parser", "kind", "named"),
    [
        ("searches", "function_call", {"namespace": "files", "name": "search"}),
        ("patches", "custom_tool_call", {"name": "apply_patch"}),
    ],
)
def test_codex_is_one_row_with_its_own_tools(
    tokenizer: Any, parser: str, kind: str, named: dict[str, str]
) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        items: list[Any] = []
        for _ in range(3):
            events = events_of(await post(session, "/v1/responses", codex(*items, stream=True)))
            assert [e["sequence_number"] for e in events] == list(range(len(events)))
            assert events[-1]["type"] == "response.completed"
            output = events[-1]["response"]["output"]
            (call,) = (item for item in output if item["type"] == kind)
            assert call.items() >= named.items()
            if kind == "custom_tool_call":
                assert call["input"].startswith("*** Begin\n")
                deltas = [e for e in events if e["type"] == f"response.{kind}_input.delta"]
                assert [e["delta"] for e in deltas] == [call["input"]]
            items += output
            result = {"call_id": call["call_id"], "output": "done", "type": f"{kind}_output"}
            items.append(result)
        check_exact(session, engine, rows=1)
        if tokenizer.chat_template == TEMPLATE:
            read = tokenizer.decode(engine.asked[0].input_ids)
            assert "files__search" in read and "apply_patch" in read

    run(tokenizer, test, call_format=PARSERS[parser])


def test_system_messages_are_folded_where_the_template_refuses_them(directory: Any) -> None:
    tokenizer = save_tokenizer(directory)
    tokenizer.chat_template = ONE_SYSTEM
    messages = [
        {"role": "system", "content": "one"},
        {"role": "system", "content": "two"},
        {"role": "user", "content": "go"},
        {"role": "system", "content": "late"},
        {"role": "user", "content": "on"},
    ]

    async def test(session: Session, engine: StubEngine) -> None:
        assert (await post(session, "/v1/chat/completions", {"messages": messages})).is_success
        folded = [
            {"role": "system", "content": "one\n\ntwo"},
            {"role": "user", "content": "go\n\n<system>\nlate\n</system>\n\non"},
        ]
        expected = tokenizer.apply_chat_template(folded, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(engine.asked[0].input_ids) == expected
        # what is refused for another reason is refused in the template's words
        tokenizer.chat_template = "{{ raise_exception('no ' ~ messages[0].role) }}"
        refused = await post(session, "/v1/chat/completions", {"messages": messages})
        assert refused.status_code == 400 and "no system" in refused.text

    run(tokenizer, test)


IMAGE = "aGVsbG8="
RESULTS = [
    (
        "/v1/messages",
        [
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "content": [
                            {"type": "text", "text": "a picture"},
                            {"type": "image", "source": {"type": "base64", "data": IMAGE}},
                        ],
                    }
                ],
            }
        ],
    ),
    (
        "/v1/chat/completions",
        [
            {
                "role": "tool",
                "tool_call_id": "c",
                "content": [
                    {"type": "text", "text": "a picture"},
                    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}},
                ],
            }
        ],
    ),
]


@pytest.mark.parametrize(("path", "messages"), RESULTS)
def test_an_image_of_a_tool_is_a_line_of_text(tokenizer: Any, path: str, messages: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        take_counts()
        body = {"max_tokens": 8, "messages": [{"role": "user", "content": "go"}, *messages]}
        assert (await post(session, path, body)).is_success
        read = tokenizer.decode(engine.asked[0].input_ids)
        assert "a picture[image]" in read and IMAGE not in read
        assert take_counts()["images_unseen"] == 1

    run(tokenizer, test)


def test_anthropics_forms_of_answers_are_refused_by_name(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        wanted = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
        answer = await post(session, "/v1/messages", claude(output_config=wanted))
        assert answer.status_code == 400
        assert "output_config.format" in answer.json()["error"]["message"]
        assert (
            await post(session, "/v1/messages", claude(output_config={"effort": "low"}))
        ).is_success

    run(tokenizer, test, call_format=PARSERS["edits"])


def test_tokens_are_counted_as_they_are_read(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        body = {k: v for k, v in claude().items() if k != "max_tokens"}
        counted = await post(session, "/v1/messages/count_tokens", body)
        assert engine.asked == []
        assert (await post(session, "/v1/messages", claude())).is_success
        assert counted.json() == {"input_tokens": len(engine.asked[0].input_ids)}
        async with httpx.AsyncClient(timeout=20) as client:
            assert (await client.head(session.anthropic_url)).status_code == 200

    run(tokenizer, test, call_format=PARSERS["edits"])


def test_a_full_context_is_told_in_the_words_that_clients_know(tokenizer: Any) -> None:
    """Claude Code shortens its history at `prompt is too long`; litellm, under mini-swe-agent,
    stops at the other words in any case of letters."""

    async def refusals(session: Session) -> list[str]:
        long = {"role": "user", "content": "x" * 400}
        longer = {"role": "user", "content": "x" * 1_000_000}
        bodies = [{"max_tokens": 8, "messages": [m]} for m in (long, longer)]
        answers = [
            await post(session, path, body)
            for path in ("/v1/messages", "/v1/chat/completions")
            for body in bodies
        ]
        assert {answer.status_code for answer in answers} == {400}
        return [answer.json()["error"]["message"] for answer in answers]

    async def inner() -> None:
        async with opened(tokenizer, context_length=300) as (session, _, _):
            for message in await refusals(session):
                assert message.startswith("prompt is too long: ")
                assert "this model's maximum context length is 300 tokens" in message.lower()

    asyncio.run(inner())


@pytest.mark.parametrize(
    ("path", "ends"),
    [
        ("/v1/responses", "response.failed"),
        ("/v1/messages", "error"),
        ("/v1/chat/completions", "error"),
    ],
)
def test_a_stream_that_has_begun_ends_with_the_refusal(
    tokenizer: Any, path: str, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.rollout.gateway.gateway.KEEP_ALIVE", 0.05)

    async def test(session: Session, engine: StubEngine) -> None:
        engine.gate, engine.fails = asyncio.Event(), 1
        body = {"messages": [{"role": "user", "content": "go"}], "input": "go", "stream": True}
        headers = {"Authorization": f"Bearer {session.api_key}"}
        url = session.anthropic_url + path
        lines = []
        async with (
            httpx.AsyncClient(timeout=20, headers=headers) as client,
            client.stream("POST", url, json=body | {"max_tokens": 8}) as answer,
        ):
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                engine.gate.set()  # the first line is a sign of life
                lines.append(line)
        assert lines[0] == ": the policy is writing" and f"event: {ends}" in lines
        last = [json.loads(line[6:]) for line in lines if line.startswith("data: ")][-1]
        said = last["response"] if ends == "response.failed" else last
        assert "no server is left" in said["error"]["message"]

    run(tokenizer, test)


# -- sub-agents, and agents that compact their history


def check_one_rollout(session: Session, engine: StubEngine, *, rows: int) -> None:
    """Every sampled token is in one row, and all rows are of one rollout with one reward."""
    check_exact(session, engine, rows=rows)
    batch = to_batch([session.trajectory])
    check_episode(batch, version=3)
    assert batch["rollout_ids"].tolist() == [0] * rows and batch["rewards"].tolist() == [1.0] * rows


def turn_of(said: dict[str, Any], result: str) -> list[dict[str, Any]]:
    """What Claude Code adds to a chat: the answer, and what its call has brought."""
    content = [b for b in said["content"] if b["type"] != "thinking"]
    (call,) = (b for b in content if b["type"] == "tool_use")
    told = {"type": "tool_result", "tool_use_id": call["id"], "content": result}
    return [{"role": "assistant", "content": content}, {"role": "user", "content": [told]}]


async def ask_claude(session: Session, body: dict[str, Any]) -> dict[str, Any]:
    answer = await post(session, "/v1/messages?beta=true", body)
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


async def sub_agent(session: Session, task: str, turns: int) -> str:
    """A conversation of another system prompt, other tools and a smaller model's name."""
    tool = {"name": "Grep", "description": "Searches.", "input_schema": {"type": "object"}}
    body = {"model": "claude-haiku", "max_tokens": 32000, "tools": [tool], "system": "you search"}
    messages: list[Any] = [{"role": "user", "content": task}]
    for k in range(turns):
        said = await ask_claude(session, body | {"messages": messages})
        messages += turn_of(said, f"line {k}")
        await asyncio.sleep(0)  # the others' turn
    return f"{said['id']}: done"


@pytest.mark.parametrize("same", [False, True], ids=["other tasks", "the same task"])
def test_sub_agents_at_once_are_rows_of_their_agents_rollout(tokenizer: Any, same: bool) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        history: list[Any] = []
        tasks = ["find it"] * 3 if same else ["find a", "find b", "find c"]
        for _ in range(2):
            said = await ask_claude(session, claude(*history))
            many = (sub_agent(session, task, turns) for turns, task in enumerate(tasks, 1))
            found = await asyncio.gather(*many)
            history += turn_of(said, "\n".join(found))
        await ask_claude(session, claude(*history))
        # twice three sub-agents, each of a row, and a row of the agent
        check_one_rollout(session, engine, rows=7)

    run(tokenizer, test, call_format=PARSERS["edits"])


def test_an_agent_and_its_sub_agent_may_take_turns(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        async def agent() -> None:
            history: list[Any] = []
            for k in range(4):
                history += turn_of(await ask_claude(session, claude(*history)), f"result {k}")

        await asyncio.gather(agent(), sub_agent(session, "find it", 4), agent())
        check_one_rollout(session, engine, rows=3)

    run(tokenizer, test, call_format=PARSERS["edits"])


def test_sub_agents_that_are_told_the_same_are_trained_once_each(tokenizer: Any) -> None:
    """Their chats are equal, so that nobody can tell whose the next request is."""

    async def test(session: Session, engine: StubEngine) -> None:
        engine.letters = engine.letters[:1]
        await asyncio.gather(*(sub_agent(session, "find it", 3) for _ in range(3)))
        session.trajectory.score(1.0)
        batch = to_batch([session.trajectory])
        sampled = sum(len(wrote.output_tokens) for wrote in engine.wrote)
        assert len(engine.wrote) == 9 and int(batch["loss_mask"].sum()) == sampled
        logprobs = sorted(batch["logprobs"][batch["loss_mask"]].tolist())
        of_engine = [x for wrote in engine.wrote for x in wrote.output_logprobs]
        assert logprobs == sorted(batch["logprobs"].new_tensor(of_engine).tolist())

    run(tokenizer, test, call_format=PARSERS["edits"])


def test_claude_code_compacts_its_chat_when_the_context_is_full(tokenizer: Any) -> None:
    """The request that does not fit is refused. The chat without its last turn, and an instruction
    in place of that, brings the summary, with which another chat begins: two more rows."""
    room, most = 700, 64

    async def test(session: Session, engine: StubEngine) -> None:
        history: list[Any] = []
        compactions = 0
        while compactions < 2:
            answer = await post(session, "/v1/messages", claude(*history))
            if answer.status_code == 400:
                assert "prompt is too long" in answer.text
                (result,) = history[-3]["content"]
                ask = {"type": "text", "text": "Summarize."}
                told = {"role": "user", "content": [result, ask]}
                said = await ask_claude(session, claude(*history[:-3], told))
                text = "".join(b.get("text", "") for b in said["content"])
                history = [{"role": "user", "content": f"Up to here: {text}"}]
                compactions += 1
                continue
            history += turn_of(answer.json(), "a line of the file " * 4)
        await ask_claude(session, claude(*history))
        check_one_rollout(session, engine, rows=1 + 2 * compactions)
        for request in engine.asked:
            assert len(request.input_ids) + request.gconfig.max_new_tokens <= room
            assert request.gconfig.max_new_tokens <= most

    run(tokenizer, test, call_format=PARSERS["edits"], context_length=room)


def test_codex_compacts_by_a_request_without_tools(tokenizer: Any) -> None:
    async def test(session: Session, engine: StubEngine) -> None:
        items: list[Any] = []
        ask = {"type": "message", "role": "user", "content": "Write a summary."}
        for k in range(3):
            for _ in range(2):
                said = (await post(session, "/v1/responses", codex(*items))).json()
                (call,) = (i for i in said["output"] if i["type"] == "function_call")
                result = {"call_id": call["call_id"], "output": "done"}
                items += [*said["output"], result | {"type": "function_call_output"}]
            said = (await post(session, "/v1/responses", codex(*items, ask, tools=[]))).json()
            (text,) = (i["content"][0]["text"] for i in said["output"] if i["type"] == "message")
            items = [{"type": "message", "role": "user", "content": f"So far: {text} {k}"}]
        assert (await post(session, "/v1/responses", codex(*items))).is_success
        # three chats of two turns, three summaries, and the chat at the end
        check_one_rollout(session, engine, rows=7)

    run(tokenizer, test, call_format=PARSERS["searches"])
