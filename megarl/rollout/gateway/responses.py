"""Speaks OpenAI's responses (https://platform.openai.com/docs/api-reference/responses): a chat as
items, which the client sends again with every request."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megarl.rollout.gateway import openai_chat
from megarl.rollout.gateway.messages import (
    BadRequest,
    ChatRequest,
    Message,
    ToolCall,
    objects,
    template_kwargs_of,
    text_of,
    tools_of,
    whole_number,
)
from megarl.rollout.gateway.session import Answer

error = openai_chat.error

# the parameters of a custom tool: one text
_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


def read(body: Mapping[str, Any], *, key: str) -> ChatRequest:
    """Returns the request of a body of POST /v1/responses. Raises BadRequest."""
    if body.get("previous_response_id") or body.get("conversation"):
        raise BadRequest(
            "previous_response_id and conversation are not supported: send the items again"
        )
    wanted = (body.get("text") or {}).get("format") or {}
    openai_chat.refuse_constraints({**body, "response_format": wanted})
    messages: list[Message] = []
    if instructions := text_of(body.get("instructions"), "instructions"):
        messages.append(Message(role="system", content=instructions))
    items = body.get("input")
    if isinstance(items, str):
        messages.append(Message(role="user", content=items))
    else:
        for i, item in enumerate(objects(items, "input")):
            _add(messages, item, f"input[{i}]")
    return ChatRequest(
        messages=tuple(messages),
        tools=tools_of(
            {"tools": [tool.function for tool in _tools(body).values()]}, body.get("tool_choice")
        ),
        max_tokens=whole_number(body, "max_output_tokens"),
        template_kwargs=template_kwargs_of(body),
        key=key,
    )


class _Tool(NamedTuple):
    """Holds a tool of the client: the namespace that it is in, or "", its name there, whether it
    takes a text without a form, and OpenAI's function object that the policy is told."""

    namespace: str
    name: str
    free: bool
    function: dict[str, Any]


def _tools(body: Mapping[str, Any]) -> dict[str, _Tool]:
    """Returns the body's tools by the names that the policy knows. Raises BadRequest for tools
    that a vendor runs."""
    tools = {}
    for space, tool, where in _listed(objects(body.get("tools"), "tools")):
        kind, name = tool.get("type"), tool.get("name")
        if kind not in ("function", "custom"):
            raise BadRequest(
                f"{where}.type={kind!r}: functions, custom tools and namespaces of them are "
                "supported, tools that a vendor runs are not"
            )
        if not isinstance(name, str):
            raise BadRequest(f"{where} is no function with a name")
        fields = ("description", "parameters", "strict")
        function = {n: tool[n] for n in fields if tool.get(n) is not None}
        if kind == "custom":
            function["parameters"] = _TEXT
        whole = _whole_name(space, name)
        function = {"type": "function", "function": {"name": whole} | function}
        tools[whole] = _Tool(space, name, kind == "custom", function)
    return tools


def _listed(
    tools: Sequence[Mapping[str, Any]], space: str = "", where: str = "tools"
) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yields (namespace, tool, its place in the body)."""
    for i, tool in enumerate(tools):
        at = f"{where}[{i}]"
        if tool.get("type") == "namespace" and not space:
            yield from _listed(objects(tool.get("tools"), f"{at}.tools"), str(tool.get("name")), at)
        else:
            yield space, tool, at


def _whole_name(space: Any, name: Any) -> str:
    return f"{space}__{name}" if space else str(name)


def _add(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    """Adds an item: a message, or a part of the assistant's message before it."""
    kind = item.get("type", "message")
    if kind == "message":
        message = openai_chat.read_message(item, where)
        if message.role == "assistant":
            _extend(messages, content=message.content)
        else:
            messages.append(message)
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary")
        _extend(messages, reasoning=text_of(parts, f"{where}.content"))
    elif kind in ("function_call", "custom_tool_call"):
        free = kind == "custom_tool_call"
        arguments = {"input": item.get("input", "")} if free else item.get("arguments", "")
        name = _whole_name(item.get("namespace"), item.get("name"))
        _extend(messages, calls=(ToolCall.read(item.get("call_id"), name, arguments),))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        text = text_of(item.get("output"), f"{where}.output", images=True)
        messages.append(Message(role="tool", content=text, call_id=str(item.get("call_id", ""))))
    else:
        raise BadRequest(f"{where}.type={kind!r} is not supported")


def _extend(
    messages: list[Message],
    *,
    content: str = "",
    reasoning: str = "",
    calls: tuple[ToolCall, ...] = (),
) -> None:
    """Adds a part of an answer: items that follow each other are one answer."""
    if not messages or messages[-1].role != "assistant":
        messages.append(Message(role="assistant"))
    last = messages[-1]
    messages[-1] = replace(
        last,
        content=last.content + content,
        reasoning=last.reasoning + reasoning,
        calls=last.calls + calls,
    )


def write(body: Mapping[str, Any], answers: Sequence[Answer], model: str) -> dict[str, Any]:
    """Returns the body of the answer."""
    answer = answers[0]
    counts = openai_chat.usage(answers)
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "status": "incomplete" if answer.cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if answer.cut else None,
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "output": _items(answer, _tools(body)),
        "parallel_tool_calls": True,
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools") or [],
        "temperature": None,
        "top_p": None,
        "usage": {
            "input_tokens": counts["prompt_tokens"],
            "output_tokens": counts["completion_tokens"],
            "total_tokens": counts["total_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def events(
    body: Mapping[str, Any], answers: Sequence[Answer], model: str
) -> Iterator[tuple[str, Any]]:
    """Yields the events of a streamed answer, as (name, data)."""
    whole = write(body, answers, model)
    numbered = enumerate(_events(whole))
    for number, (kind, fields) in numbered:
        yield kind, {"type": kind, "sequence_number": number} | fields


def _events(whole: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = whole | {"status": "in_progress", "output": [], "usage": None}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for i, item in enumerate(whole["output"]):
        where = {"item_id": item["id"], "output_index": i}
        yield "response.output_item.added", {"output_index": i, "item": item | _empty(item)}
        if item["type"] == "message":
            part = item["content"][0]
            at = where | {"content_index": 0}
            yield "response.content_part.added", at | {"part": part | {"text": ""}}
            yield "response.output_text.delta", at | {"delta": part["text"], "logprobs": []}
            yield "response.output_text.done", at | {"text": part["text"], "logprobs": []}
            yield "response.content_part.done", at | {"part": part}
        elif item["type"] == "custom_tool_call":
            yield "response.custom_tool_call_input.delta", where | {"delta": item["input"]}
            yield "response.custom_tool_call_input.done", where | {"input": item["input"]}
        elif item["type"] == "function_call":
            arguments = item["arguments"]
            yield "response.function_call_arguments.delta", where | {"delta": arguments}
            done = {"arguments": arguments, "name": item["name"]}
            yield "response.function_call_arguments.done", where | done
        yield "response.output_item.done", {"output_index": i, "item": item}
    ends = "response.incomplete" if whole["status"] == "incomplete" else "response.completed"
    yield ends, {"response": whole}


def _empty(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] == "function_call":
        return {"arguments": "", "status": "in_progress"}
    if item["type"] == "custom_tool_call":
        return {"input": ""}
    return {"content": [], "status": "in_progress"}


def failed(refusal: dict[str, Any]) -> tuple[str, Any]:
    """Returns the event that ends a stream with a refusal."""
    whole = {"object": "response", "status": "failed", "output": [], **refusal}
    event = {"type": "response.failed", "sequence_number": 0, "response": whole}
    return "response.failed", event


def _items(answer: Answer, tools: Mapping[str, _Tool]) -> list[dict[str, Any]]:
    message, status = answer.message, "incomplete" if answer.cut else "completed"
    items: list[dict[str, Any]] = []
    if message.reasoning:
        parts = [{"type": "reasoning_text", "text": message.reasoning}]
        items.append(
            {"id": f"rs_{answer.id}", "type": "reasoning", "summary": [], "content": parts}
        )
    if message.content or not message.calls:
        text = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        head = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant"}
        items.append(head | {"status": status, "content": [text]})
    for k, call in enumerate(message.calls):
        tool = tools.get(call.name, _Tool("", call.name, False, {}))
        item = {"id": f"fc_{answer.id}_{k}", "call_id": call.id, "name": tool.name}
        if tool.namespace:
            item["namespace"] = tool.namespace
        if tool.free:
            item |= {"type": "custom_tool_call", "input": _text(call)}
        else:
            item |= {"type": "function_call", "arguments": call.arguments, "status": status}
        items.append(item)
    return items


def _text(call: ToolCall) -> str:
    """Returns the text that a custom tool is called with."""
    values = call.values
    text = values.get("input") if isinstance(values, dict) else None
    return text if isinstance(text, str) else call.arguments
