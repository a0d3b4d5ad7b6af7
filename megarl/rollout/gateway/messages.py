"""Defines the gateway's one form of a chat, into which every dialect is read, and what a request is
refused with."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

_THOUGHT = re.compile(r"^\s*(?:<think>)?.*?</think>", re.DOTALL)


class BadRequest(ValueError):
    """Refuses a request: `status` and `code` are what the client is told beside the message."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """Holds one call of a tool; `arguments` is JSON text, as the model or the client wrote it."""

    id: str
    name: str
    arguments: str

    @classmethod
    def read(cls, id: Any, name: Any, arguments: Any) -> ToolCall:
        """Returns a client's call, whose arguments are JSON text or what it stands for."""
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return cls(id=str(id or ""), name=str(name or ""), arguments=arguments)

    @property
    def values(self) -> Any:
        """Returns the decoded arguments; their text where they are no JSON."""
        try:
            return json.loads(self.arguments)
        except (ValueError, RecursionError):
            return self.arguments


@dataclass(frozen=True, kw_only=True)
class Message:
    """Holds one message of a chat. role: system | user | assistant | tool. reasoning: what a model
    thought before its `content`. call_id: of a tool's message, the call that it answers."""

    role: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Returns what means the same message where it is equal: all but what clients do not repeat
        as it was, which is thoughts, whitespace at the ends, how a call's arguments are spelled,
        ids of calls, names of tools."""
        content, reasoning = self.content, self.reasoning
        if self.role == "assistant":
            reasoning = ""
            if "</think>" in content:
                content = _THOUGHT.sub("", content, count=1).lstrip()
        calls = tuple((c.name, json.dumps(c.values, sort_keys=True)) for c in self.calls)
        name = "" if self.role == "tool" else self.name
        return (self.role, name, content.strip(), reasoning.strip(), calls)

    def for_template(self) -> dict[str, Any]:
        """Returns the message as chat templates take it: arguments of calls are objects."""
        calls = [
            {"type": "function", "id": c.id, "function": {"name": c.name, "arguments": c.values}}
            for c in self.calls
        ]
        further = {
            "reasoning_content": self.reasoning,
            "tool_calls": calls,
            "tool_call_id": self.call_id,
            "name": self.name,
        }
        return {"role": self.role, "content": self.content} | {
            k: v for k, v in further.items() if v
        }


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """Asks for `n` answers to a chat. tools: OpenAI's function objects. max_tokens: None leaves the
    bound to the session. stop: further stop strings. key: what the client calls the request, so
    that it can send it again ("" for none)."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    key: str = ""

    @cached_property
    def fingerprint(self) -> bytes:
        """Returns a digest of all that decides about the answers; equal ones ask for the same."""
        return digest(replace(self, key=""))


def digest(*values: object) -> bytes:
    """Returns 16 bytes that differ where the values' representations do."""
    return hashlib.blake2b(repr(values).encode(errors="replace"), digest_size=16).digest()


# -- reading


def text_of(content: Any, where: str) -> str:
    """Returns the text of a message's content: a string, None, or a list of parts of text. Raises
    BadRequest for other parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} is {type(content).__name__}; send text or a list of parts")
    texts = []
    for part in content:
        text: Any = part
        kind = type(part).__name__
        if isinstance(part, dict):
            text, kind = part.get("text", part.get("refusal")), str(part.get("type"))
        if not isinstance(text, str):
            raise BadRequest(f"{where} has a part of type {kind!r}; the policy reads text alone")
        texts.append(text)
    return "".join(texts)


def whole_number(body: Mapping[str, Any], *names: str, least: int = 1) -> int | None:
    """Returns the first of the fields `names` that is given; None where none is. Raises BadRequest
    unless it is a whole number >= `least`."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if type(value) is not int or value < least:
            raise BadRequest(f"{name}={value!r}: send a whole number of at least {least}")
        return value
    return None


def strings(value: Any, name: str) -> tuple[str, ...]:
    """Returns one string or a list of them as a tuple. Raises BadRequest for anything else."""
    listed = [value] if isinstance(value, str) else value or []
    if not isinstance(listed, list) or not all(isinstance(s, str) for s in listed):
        raise BadRequest(f"{name}={value!r}: send a string or a list of strings")
    return tuple(listed)


def tools_of(
    body: Mapping[str, Any],
    choice: Any,
    function: Callable[[Mapping[str, Any], str], Mapping[str, Any]] = lambda tool, where: tool,
) -> tuple[Mapping[str, Any], ...]:
    """Returns the request's tools as OpenAI's function objects; none where its `choice` is none.
    function: makes one of a tool of the body. Raises BadRequest for another choice than auto, and
    for a tool without a name."""
    if choice not in (None, "auto", "none"):
        raise BadRequest(
            f"tool_choice={choice!r}: the policy is free to call a tool or not; send auto or none"
        )
    tools = []
    for i, tool in enumerate([] if choice == "none" else objects(body.get("tools"), "tools")):
        tools.append(function(tool, f"tools[{i}]"))
        named = tools[-1].get("function")
        if not isinstance(named, dict) or not isinstance(named.get("name"), str):
            raise BadRequest(f"tools[{i}] is no function with a name")
    return tuple(tools)


def objects(value: Any, name: str) -> list[dict[str, Any]]:
    """Returns a list of JSON objects. Raises BadRequest for anything else."""
    listed = value or []
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise BadRequest(f"{name} must be a list of objects")
    return listed
