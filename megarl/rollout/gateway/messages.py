"""Defines the gateway's one form of a chat, into which every dialect is read, that of a request of
token ids, and what a request is refused with; makes prompts of messages, and reads the policy's
answers as messages: thoughts and calls of tools apart from the text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from megarl.api.chat_template import ChatTemplate, decoded
from megarl.rollout.loop_thread import add_counts
from megarl.rollout.tools.calls import FORMATS, parse_calls
from megarl.utils.importing import is_import_path, load_object

if TYPE_CHECKING:  # a start reads GatewayConfig without torch
    from megarl.api.records import ModelResponse

_IMAGES = ("image", "image_url", "input_image")  # types of parts, one of each dialect
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
        """Returns the decoded arguments, {} for a call without arguments; their text where they are
        no JSON."""
        values = decoded(self.arguments)
        return {} if values is None else values


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
    bound to the session. stop: further stop strings. template_kwargs: further options of the chat
    template. key: what the client calls the request, so that it can send it again ("" for none)."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""

    @cached_property
    def told(self) -> bytes:
        """Returns a digest of the tools and the template's options, in which a chat goes on."""
        return digest(self.tools, self.template_kwargs)

    @cached_property
    def fingerprint(self) -> bytes:
        """Returns a digest of all that decides about the answers; equal ones ask for the same."""
        return digest(replace(self, key=""))


def too_long(length: str, context_length: int) -> BadRequest:
    """Returns what a prompt is refused with that a context has no room for. Clients look for the
    words of both vendors: one then shortens its history, another stops trying."""
    return BadRequest(
        f"prompt is too long: {length}. This model's maximum context length is {context_length} "
        "tokens",
        code="context_length_exceeded",
    )


def digest(*values: object) -> bytes:
    """Returns 16 bytes that differ where the values' representations do."""
    return hashlib.blake2b(repr(values).encode(errors="replace"), digest_size=16).digest()


# -- reading


def text_of(content: Any, where: str, *, images: bool = False) -> str:
    """Returns the text of a message's content: a string, None, or a list of parts of text. With
    `images` an image is a line of text that says so, and is counted. Raises BadRequest for other
    parts."""
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
            if images and kind in _IMAGES:
                add_counts({"images_unseen": 1})
                text = "[image]\n"
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


def template_kwargs_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the body's chat_template_kwargs, as SGLang and vLLM take them. Raises BadRequest
    unless they are an object."""
    kwargs = body.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise BadRequest(f"chat_template_kwargs={kwargs!r}: send an object")
    return kwargs


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


# -- token ids in, token ids and logprobs out (vLLM's generate API, which verifiers' clients use)


@dataclass(kw_only=True)
class TokenRequest:
    """Holds a request for one answer to token ids, of POST /inference/v1/generate.

    session: id of the session, for workers of environments, whose key is for all of them. trace:
    names the conversation among those of the session. max_tokens and stop_token_ids bound the
    session's parameters. routes_from: first position whose routes the answer has.
    """

    token_ids: list[int]
    session: str
    trace: str
    max_tokens: int | None
    stop_token_ids: tuple[int, ...]
    routes_from: int = 0

    @classmethod
    def read(cls, body: Mapping[str, Any], *, trace: str) -> TokenRequest:
        """Returns the request of a body. Sampling parameters other than max_tokens and
        stop_token_ids are the session's, whatever the body says. Raises BadRequest."""
        params = body.get("sampling_params")
        if not isinstance(params, dict):
            raise BadRequest("sampling_params is missing: send an object, it may be empty")
        stops = _ids(params.get("stop_token_ids") or [], "stop_token_ids", empty=True)
        return cls(
            token_ids=_ids(body.get("token_ids"), "token_ids"),
            session=str(params.get("session") or ""),
            trace=trace,
            routes_from=whole_number(params, "routed_experts_prompt_start", least=0) or 0,
            max_tokens=whole_number(params, "max_tokens"),
            stop_token_ids=tuple(stops),
        )

    def answer(self, answer_id: str, response: ModelResponse) -> dict[str, Any]:
        """Returns the body of the answer. Each logprob names its token, as clients check it."""
        pairs = zip(response.output_tokens, response.output_logprobs, strict=True)
        content = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in pairs]
        choice = {
            "index": 0,
            "token_ids": list(response.output_tokens),
            "logprobs": {"content": content},
            "finish_reason": "length" if response.stop_reason == "length" else "stop",
        }
        if not self.session and (routes := _routes(response, self.routes_from)) is not None:
            choice["routed_experts"] = routes  # our own workers have no use for them
        return {"request_id": answer_id, "choices": [choice]}


def _ids(value: Any, name: str, *, empty: bool = False) -> list[int]:
    good = isinstance(value, list) and all(type(t) is int and 0 <= t < 1 << 31 for t in value)
    if not good or not (value or empty):
        raise BadRequest(f"{name} must be a list of token ids, whole numbers from 0")
    return list(value)


def _routes(response: ModelResponse, start: int) -> dict[str, Any] | None:
    """Returns the experts that routers chose [rows,L,k] from position `start`; None where some are
    not known. Clients look for `data` as the first field."""
    if response.routed_experts is None or response.routes_from > start:
        return None
    import torch  # here: a start reads GatewayConfig without it

    routes = response.routed_experts[start - response.routes_from :]
    if (routes < 0).any():
        return None
    dtype = torch.uint8 if int(routes.max()) < 256 else torch.uint16
    data = base64.b64encode(routes.to(dtype).numpy().tobytes()).decode()
    name = str(dtype).removeprefix("torch.")
    return {"data": data, "shape": list(routes.shape), "dtype": name, "start": start}


# -- the policy's side

# (an answer's text, the tools of the request) -> what is no call, and (name, arguments as JSON
# text) of each call
Tools = Sequence[Mapping[str, Any]]
Messages = Sequence[Mapping[str, Any]]  # as chat templates take them
CallParser = Callable[[str, Tools], tuple[str, list[tuple[str, str]]]]

# what a format's first call begins with
_BEGINS = {"llama3": "<|python_tag|>", "deepseek": "<｜tool▁calls▁begin｜>"}


@dataclass(kw_only=True)
class GatewayConfig:
    """Configures the gateway by `rollout.gateway`: where it listens, and when a chat goes on from
    recorded tokens.

    host, port: where it listens; port 0 takes a free one.
    advertise: host name in the URLs that agents get; empty is `host`, or this machine's name where
        the gateway listens on every address.
    reuse: a chat that goes on after an answer of the policy keeps the policy's own tokens.
    rewards: whether rewards can be sent with a session's key: always, never, or auto, which means
        only if neither a reward function nor the workflow nor the agent's class scores.
    call_format: how the policy writes calls of tools: a name of tools.calls, or the path of a
        function (docs/agents.md).
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    advertise: str = ""
    reuse: bool = True
    rewards: Literal["auto", "always", "never"] = "auto"
    call_format: str = "hermes"
    GONE: ClassVar = {
        "max_n": "leave it out: a request has at most 8 answers",
        "max_answers": "leave it out: a session has at most 1024 answers",
        "context_length": "leave it out: the servers are asked for theirs",
        "match": "leave it out: spaces, thoughts and ids of calls never count",
    }

    def __post_init__(self) -> None:
        call_parser(self.call_format)


def call_parser(name: str) -> CallParser:
    """Returns the parser of a format of tools.calls, or that of an import path. Raises ValueError
    for another name."""
    if is_import_path(name):
        parser: CallParser = load_object(name, what="call_format")
        return parser
    if name not in FORMATS:
        raise ValueError(
            f"call_format={name!r}: use pkg.module:function, or one of " + ", ".join(FORMATS)
        )
    return partial(_by_format, name)


def _by_format(format: str, text: str, tools: Tools) -> tuple[str, list[tuple[str, str]]]:
    """Returns the text before the first call, and the calls; all of the text where one of them
    cannot be read, so that the agent sees it."""
    calls = parse_calls(text, format, [dict(t) for t in tools])
    if not calls or any(call.error for call in calls):
        return text, []
    before, begins, _ = text.partition(_BEGINS.get(format, "<tool_call>"))
    named = [(c.name, json.dumps(c.arguments, ensure_ascii=False)) for c in calls]
    return before.strip() if begins else "", named


class Renderer:
    """Renders chats by the template of `tokenizer`, which gets template_kwargs (enable_thinking,
    ...)."""

    def __init__(
        self, tokenizer: Any, parser: CallParser, template_kwargs: Mapping[str, Any]
    ) -> None:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError("a session needs a tokenizer with a chat template: give the model's")
        self.tokenizer, self._parser = tokenizer, parser
        self._template = ChatTemplate(tokenizer, template_kwargs)

    def check_length(self, messages: Sequence[Message], context_length: int) -> None:
        """Raises BadRequest where the messages have so many characters that no tokens of this
        vocabulary bring them into the context. Answers do not count: templates drop thoughts."""
        length = sum(len(m.content) for m in messages if m.role != "assistant")
        if length <= context_length:  # a token has one character at least
            return
        _, longest = _vocabulary(self.tokenizer)
        if length > context_length * longest:
            raise too_long(f"{length} characters", context_length)

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raises BadRequest for an id that is none of the vocabulary's."""
        size, _ = _vocabulary(self.tokenizer)
        if ids and max(ids) >= size:
            raise BadRequest(f"token_ids has {max(ids)}: the vocabulary has {size} tokens")

    def whole(self, request: ChatRequest) -> list[int]:
        """Returns the ids of a chat from its beginning; see ChatTemplate.text. Raises BadRequest
        for messages that the template refuses."""

        def render(chat: Messages) -> list[int]:
            template = self._template.with_options(request.template_kwargs)
            return template.encode(template.text(chat, request.tools))

        return self._rendered(render, request.messages)

    def after(self, history: Sequence[Message], request: ChatRequest, last_token: int) -> list[int]:
        """Returns the ids in which the request's messages after `history` are read; see
        ChatTemplate.after. Raises BadRequest."""

        def render(before: Messages, chat: Messages) -> list[int]:
            template = self._template.with_options(request.template_kwargs)
            return template.after(before, chat, request.tools, last_token=last_token)

        return self._rendered(render, history, request.messages[len(history) :])

    def _rendered(self, render: Callable[..., list[int]], *parts: Sequence[Message]) -> list[int]:
        """Returns what `render` makes of a chat's parts, of which the last is read now; of folded
        ones where the template refuses them. Raises BadRequest with the template's words: it is
        given nothing but the request."""
        chats = [[m.for_template() for m in part] for part in parts]
        add_counts({"special_in_content": self._template.special_in(chats[-1])})
        try:
            return render(*chats)
        except Exception as e:
            refused = BadRequest(str(e) or type(e).__name__)
            folded = [_folded(part, begins=i == 0) for i, part in enumerate(parts)]
            if folded == [list(part) for part in parts]:
                raise refused from e
        try:
            return render(*([m.for_template() for m in part] for part in folded))
        except Exception as e:
            raise refused from e

    def answer(self, response: ModelResponse, request: ChatRequest) -> tuple[Message, str | None]:
        """Returns the policy's answer as a message, up to the request's stop string that ended it,
        and this string, or None. With the request's fingerprint ids of calls are the same in every
        run, and of another call in a session never. Raises RuntimeError where the parser of calls
        fails."""
        tools, tokens = request.tools, response.output_tokens
        if tokens and tokens[-1] in self.tokenizer.all_special_ids:
            tokens = tokens[:-1]
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=not tools)
        ends = [(text.find(s), s) for s in request.stop if s and s in text]
        begin, stop = min(ends, default=(len(text), None))
        reasoning, content = _split_reasoning(text[:begin])
        if not tools:
            return Message(role="assistant", content=content, reasoning=reasoning), stop
        try:
            rest, parsed = self._parser(content, tools)
            calls = tuple(
                ToolCall(
                    id=f"call_{digest(request.fingerprint, tokens, i).hex()[:16]}",
                    name=name,
                    arguments=arguments,
                )
                for i, (name, arguments) in enumerate(parsed)
            )
        except Exception as e:
            raise RuntimeError(
                f"the parser of rollout.gateway.call_format fails at {content[:200]!r}: "
                f"{type(e).__name__}: {e}; of what it cannot read it returns the text and no calls"
            ) from e
        return Message(role="assistant", content=rest, reasoning=reasoning, calls=calls), stop


def _split_reasoning(text: str) -> tuple[str, str]:
    """Returns what stands before </think>, where that is, and what comes after it."""
    thought, end, content = text.partition("</think>")
    if not end:
        return "", text
    return thought.strip().removeprefix("<think>").strip(), content.lstrip("\n")


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Any) -> tuple[int, int]:
    """Returns the number of a tokenizer's ids, and the length of its longest token."""
    tokens: dict[str, int] = tokenizer.get_vocab()
    return max(tokens.values()) + 1, max(map(len, tokens))


def _folded(messages: Sequence[Message], *, begins: bool) -> list[Message]:
    """Returns messages for a template that knows one system message, at the beginning of a chat:
    those that stand there are one, the user tells later ones, and messages of the user that
    follow one another are one."""
    found: list[Message] = []
    for m in messages:
        if m.role == "system" and not (begins and all(f.role == "system" for f in found)):
            m = Message(role="user", content=f"<system>\n{m.content}\n</system>")
        if found and m.role == found[-1].role and m.role in ("system", "user"):
            first = found.pop()
            m = replace(first, content=f"{first.content}\n\n{m.content}")
        found.append(m)
    return found
