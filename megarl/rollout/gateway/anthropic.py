"""Speaks Anthropic's Messages (https://docs.anthropic.com/en/api/messages)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megarl.rollout.gateway import openai_chat
from megarl.rollout.gateway.messages import (
    BadRequest,
    ChatRequest,
    Message,
    ToolCall,
    objects,
    strings,
    template_kwargs_of,
    text_of,
    tools_of,
    whole_number,
)
from megarl.rollout.gateway.session import Answer

failed = openai_chat.failed


def read(body: Mapping[str, Any], *, key: str) -> ChatRequest:
    """Returns the request of a body of POST /v1/messages. Raises BadRequest."""
    if (body.get("output_config") or {}).get("format") or body.get("output_format"):
        raise BadRequest(
            "output_config.format: answers are sampled without constraints, as the trainer "
            "computes their logprobs; ask for the format in the prompt"
        )
    openai_chat.refuse_constraints(body)
    messages: list[Message] = []
    if system := text_of(body.get("system"), "system"):
        messages.append(Message(role="system", content=system))
    for i, item in enumerate(objects(body.get("messages"), "messages")):
        messages += _read_message(item, f"messages[{i}]")
    choice = (body.get("tool_choice") or {}).get("type")
    return ChatRequest(
        messages=tuple(messages),
        tools=tools_of(body, choice, _read_tool),
        max_tokens=whole_number(body, "max_tokens"),
        stop=strings(body.get("stop_sequences"), "stop_sequences"),
        template_kwargs=template_kwargs_of(body),
        key=key,
    )


def _read_tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if "input_schema" not in tool:
        raise BadRequest(f"{where} has no input_schema; tools that a vendor runs are not supported")
    function = {"name": tool.get("name"), "description": tool.get("description", "")}
    return {"type": "function", "function": function | {"parameters": tool["input_schema"]}}


def _read_message(item: Mapping[str, Any], where: str) -> list[Message]:
    """Returns the messages that one of the body stands for: a user's may bring the answers of
    several tools."""
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system"):
        raise BadRequest(f"{where}.role={role!r}: use user or assistant")
    if not isinstance(content, list):
        return [Message(role=role, content=text_of(content, f"{where}.content"))]
    if role == "assistant":
        return [_read_answer(content, where)]
    messages, parts = [], []
    for k, block in enumerate(objects(content, f"{where}.content")):
        if block.get("type") != "tool_result":
            parts.append(block)
            continue
        text = text_of(block.get("content"), f"{where}.content[{k}]", images=True)
        call_id = str(block.get("tool_use_id", ""))
        messages.append(Message(role="tool", content=text, call_id=call_id))
    if parts or not messages:
        messages.append(Message(role=role, content=text_of(parts, f"{where}.content")))
    return messages


def _read_answer(content: Sequence[Any], where: str) -> Message:
    texts, thoughts, calls = [], [], []
    for block in objects(list(content), f"{where}.content"):
        kind = block.get("type")
        if kind == "tool_use":
            arguments = block.get("input", {})
            calls.append(ToolCall.read(block.get("id"), block.get("name"), arguments))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            texts.append(text_of([block], f"{where}.content"))
    return Message(
        role="assistant", content="".join(texts), reasoning="".join(thoughts), calls=tuple(calls)
    )


def write(body: Mapping[str, Any], answers: Sequence[Answer], model: str) -> dict[str, Any]:
    """Returns the body of the answer."""
    answer = answers[0]
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": _blocks(answer.message),
        "stop_reason": _stop_reason(answer),
        "stop_sequence": answer.stop,
        "usage": {
            "input_tokens": len(answer.prompt),
            "output_tokens": answer.response.output_len,
        },
    }


def events(
    body: Mapping[str, Any], answers: Sequence[Answer], model: str
) -> Iterator[tuple[str, Any]]:
    """Yields the events of a streamed answer, as (name, data)."""
    whole = write(body, answers, model)
    blocks, counts = whole.pop("content"), whole["usage"]
    ends = {"stop_reason": whole["stop_reason"], "stop_sequence": answers[0].stop}
    begun = whole | {"content": [], "stop_reason": None, "usage": counts | {"output_tokens": 0}}
    yield _event("message_start", message=begun)
    for i, block in enumerate(blocks):
        empty, delta = _streamed(block)
        yield _event("content_block_start", index=i, content_block=empty)
        yield _event("content_block_delta", index=i, delta=delta)
        yield _event("content_block_stop", index=i)
    yield _event("message_delta", delta=ends, usage=counts)
    yield _event("message_stop")


def error(message: str, status: int, code: str) -> dict[str, Any]:
    """Returns the body of a refusal."""
    kinds = {401: "authentication_error", 404: "not_found_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _event(kind: str, **fields: Any) -> tuple[str, Any]:
    return kind, {"type": kind} | fields


def _streamed(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a block before its content, and the content as one delta."""
    if block["type"] == "tool_use":
        text = json.dumps(block["input"])
        return block | {"input": {}}, {"type": "input_json_delta", "partial_json": text}
    kind = block["type"]
    return block | {kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}


def _blocks(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content or not message.calls:
        blocks.append({"type": "text", "text": message.content})
    for call in message.calls:
        values = call.values
        if not isinstance(values, dict):
            values = {"arguments": values}
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": values})
    return blocks


def _stop_reason(answer: Answer) -> str:
    if answer.cut:
        return "max_tokens"
    if answer.message.calls:
        return "tool_use"
    return "end_turn" if answer.stop is None else "stop_sequence"
