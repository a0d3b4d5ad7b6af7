"""Speaks OpenAI's chat completions (https://platform.openai.com/docs/api-reference/chat), with the
token ids that SGLang and vLLM add for `return_token_ids`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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

_UNSUPPORTED = (  # the last four are constraints of SGLang's and vLLM's
    *("logit_bias", "functions", "audio", "prediction"),
    *("structured_outputs", "json_schema", "regex", "ebnf"),
)
_ROLES = {"developer": "system", "function": "tool"}


def read(body: Mapping[str, Any], *, key: str) -> ChatRequest:
    """Returns the request of a body of POST /v1/chat/completions. Raises BadRequest."""
    refuse_constraints(body)
    messages = enumerate(objects(body.get("messages"), "messages"))
    return ChatRequest(
        messages=tuple(read_message(m, f"messages[{i}]") for i, m in messages),
        tools=tools_of(body, body.get("tool_choice")),
        max_tokens=whole_number(body, "max_completion_tokens", "max_tokens"),
        stop=strings(body.get("stop"), "stop"),
        n=whole_number(body, "n") or 1,
        template_kwargs=template_kwargs_of(body),
        key=key,
    )


def refuse_constraints(body: Mapping[str, Any]) -> None:
    """Raises BadRequest for what would have the server sample from another distribution than the
    trainer computes."""
    wanted = body.get("response_format") or {}
    if wanted.get("type", "text") != "text":
        raise BadRequest(
            f"response_format={wanted.get('type')!r}: answers are sampled without constraints, as "
            "the trainer computes their logprobs; ask for the format in the prompt"
        )
    for name in body:
        if body[name] and (name in _UNSUPPORTED or name.startswith("guided_")):
            raise BadRequest(f"{name} is not supported")


def read_message(item: Mapping[str, Any], where: str) -> Message:
    """Returns one message of the body. Raises BadRequest where it is none."""
    role = item.get("role")
    role = _ROLES.get(str(role), role)
    if role not in ("system", "user", "assistant", "tool"):
        raise BadRequest(f"{where}.role={role!r}: use system, user, assistant or tool")
    calls = []
    for call in objects(item.get("tool_calls"), f"{where}.tool_calls"):
        function = call.get("function") or {}
        arguments = function.get("arguments", "")
        calls.append(ToolCall.read(call.get("id"), function.get("name"), arguments))
    thought = item.get("reasoning_content") or item.get("reasoning") or ""
    return Message(
        role=role,
        content=text_of(item.get("content"), f"{where}.content", images=role == "tool"),
        reasoning=text_of(thought, f"{where}.reasoning_content"),
        calls=tuple(calls),
        call_id=str(item.get("tool_call_id") or ""),
        name=str(item.get("name") or ""),
    )


def write(body: Mapping[str, Any], answers: Sequence[Answer], model: str) -> dict[str, Any]:
    """Returns the body of the answer."""
    choices = [
        {"index": i, "message": _message(answer.message), "finish_reason": _finish(answer)}
        | _further(body, answer)
        for i, answer in enumerate(answers)
    ]
    whole = _head(answers, model, "chat.completion")
    whole |= {"choices": choices, "usage": usage(answers)}
    if body.get("return_token_ids"):
        whole["prompt_token_ids"] = answers[0].prompt
    return whole


def events(
    body: Mapping[str, Any], answers: Sequence[Answer], model: str
) -> Iterator[tuple[str, Any]]:
    """Yields the events of a streamed answer, as (name, data); chunks have no name."""
    head = _head(answers, model, "chat.completion.chunk")
    for i, answer in enumerate(answers):
        delta = {k: v for k, v in _message(answer.message).items() if v is not None}
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": k} | call for k, call in enumerate(calls)]
        choice = {"index": i, "delta": delta, "finish_reason": None} | _further(body, answer)
        yield "", head | {"choices": [choice]}
        last = {"index": i, "delta": {}, "finish_reason": _finish(answer)}
        yield "", head | {"choices": [last]}
    if (body.get("stream_options") or {}).get("include_usage"):
        yield "", head | {"choices": [], "usage": usage(answers)}
    yield "", "[DONE]"


def usage(answers: Sequence[Answer]) -> dict[str, int]:
    """Returns the counts of tokens."""
    prompt, written = len(answers[0].prompt), sum(a.response.output_len for a in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
    }


def error(message: str, status: int, code: str) -> dict[str, Any]:
    """Returns the body of a refusal."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": code, "param": None}}


def failed(refusal: dict[str, Any]) -> tuple[str, Any]:
    """Returns the event that ends a stream with a refusal."""
    return "error", refusal


def _head(answers: Sequence[Answer], model: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answers[0].id}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def _message(message: Message) -> dict[str, Any]:
    content = message.content or (None if message.calls else "")
    fields: dict[str, Any] = {"role": "assistant", "content": content}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.calls:
        fields["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.calls
        ]
    return fields


def _finish(answer: Answer) -> str:
    if answer.cut:
        return "length"
    return "tool_calls" if answer.message.calls else "stop"


def _further(body: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
    """Returns what the request wants to know of an answer's tokens. Logprobs are by token id, the
    form that clients of token ids read."""
    ids, logprobs = answer.response.output_tokens, answer.response.output_logprobs
    further: dict[str, Any] = {"logprobs": None}
    if body.get("logprobs"):
        content: list[dict[str, Any]] = [
            {"token": f"token_id:{i}", "logprob": lp, "bytes": None, "top_logprobs": []}
            for i, lp in zip(ids, logprobs, strict=True)
        ]
        further["logprobs"] = {"content": content, "refusal": None}
    if body.get("return_token_ids"):
        further["token_ids"] = ids
    return further
