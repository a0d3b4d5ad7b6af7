"""Defines the gateway's one form of a chat, into which every dialect is read, and when two messages
count as the same."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megarl.rollout.gateway.errors import BadRequest

_THOUGHT = re.compile(r"^\s*(?:<think>)?.*?</think>", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """Holds one call of a tool; `arguments` is JSON text, as the model or the client wrote it."""

    id: str
    name: str
    arguments: str

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

    def for_template(self) -> dict[str, Any]:
        """Returns the message as chat templates take it: arguments of calls are objects."""
        found: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.calls:
            found["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.name, "arguments": call.values},
                }
                for call in self.calls
            ]
        if self.call_id:
            found["tool_call_id"] = self.call_id
        if self.name:
            found["name"] = self.name
        return found


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
    def asked(self) -> bytes:
        """Returns a digest of all that decides about the answers; equal ones ask for the same."""
        return digest(replace(self, key=""))


def digest(*values: object) -> bytes:
    """Returns 16 bytes that differ where the values' representations do."""
    return hashlib.blake2b(repr(values).encode(errors="replace"), digest_size=16).digest()


# -- when two messages are the same

# a message without the differences that do not count; equal keys mean the same message
Key = tuple[str, str, str, tuple[tuple[str, str], ...]]


def keys_of(messages: Sequence[Message]) -> tuple[Key, ...]:
    """Returns the key of each message, without what clients do not repeat as it was: thoughts,
    whitespace at the ends, how a call's arguments are spelled, ids of calls, names of tools."""
    return tuple(_key(message) for message in messages)


def _key(message: Message) -> Key:
    content, reasoning = message.content, message.reasoning
    if message.role == "assistant":
        reasoning = ""
        if "</think>" in content:
            content = _THOUGHT.sub("", content, count=1).lstrip()
    calls = tuple((c.name, json.dumps(c.values, sort_keys=True)) for c in message.calls)
    name = "" if message.role == "tool" else message.name
    return (f"{message.role} {name}", content.strip(), reasoning.strip(), calls)


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


def as_arguments(value: Any) -> str:
    """Returns a call's arguments as JSON text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


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


def named_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Returns OpenAI's function objects as a tuple. Raises BadRequest for one without a name."""
    for i, tool in enumerate(tools):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"tools[{i}] is no function with a name")
    return tuple(tools)


def objects(value: Any, name: str) -> list[dict[str, Any]]:
    """Returns a list of JSON objects. Raises BadRequest for anything else."""
    listed = value or []
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise BadRequest(f"{name} must be a list of objects")
    return listed
