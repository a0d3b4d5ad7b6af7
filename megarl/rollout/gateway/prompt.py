"""Makes prompts of messages, and reads the policy's answers as messages: thoughts and calls of
tools apart from the text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from megarl.api.chat_template import ChatTemplate
from megarl.rollout.gateway.messages import BadRequest, Message, ToolCall
from megarl.rollout.loop_thread import add_counts
from megarl.rollout.tools.calls import FORMATS, parse_calls
from megarl.utils.importing import is_import_path, load_object

if TYPE_CHECKING:  # a start reads GatewayConfig without torch
    from megarl.api.records import ModelResponse

# (an answer's text, the tools of the request) -> what is no call, and (name, arguments as JSON
# text) of each call
Tools = Sequence[Mapping[str, Any]]
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
    rewards: whether agents may send rewards to the gateway; auto: where their workflow has no
        reward function.
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
            raise BadRequest(
                f"the messages have {length} characters, which leave no room in a context of "
                f"{context_length} tokens",
                code="context_length_exceeded",
            )

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raises BadRequest for an id that is none of the vocabulary's."""
        size, _ = _vocabulary(self.tokenizer)
        if ids and max(ids) >= size:
            raise BadRequest(f"token_ids has {max(ids)}: the vocabulary has {size} tokens")

    def whole(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the ids of a chat from its beginning; see ChatTemplate.text. Raises BadRequest
        for messages that the template refuses."""
        with _refused():
            chat = [m.for_template() for m in messages]
            add_counts({"special_in_content": self._template.special_in(chat)})
            return self._template.encode(self._template.text(chat, tools))

    def after(
        self,
        history: Sequence[Message],
        rest: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        last_token: int,
    ) -> list[int]:
        """Returns the ids in which `rest` is read; see ChatTemplate.after. Raises BadRequest."""
        before, chat = [m.for_template() for m in history], [m.for_template() for m in rest]
        with _refused():
            add_counts({"special_in_content": self._template.special_in(chat)})
            return self._template.after(before, chat, tools, last_token=last_token)

    def answer(
        self, response: ModelResponse, tools: Sequence[Mapping[str, Any]], *, calls_so_far: int
    ) -> Message:
        """Returns the policy's answer as a message. calls_so_far: number of the chat's calls, from
        which a new one gets its id."""
        tokens = response.output_tokens
        if tokens and tokens[-1] in self.tokenizer.all_special_ids:
            tokens = tokens[:-1]
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=not tools)
        reasoning, content = _split_reasoning(text)
        if not tools:
            return Message(role="assistant", content=content, reasoning=reasoning)
        content, parsed = self._parser(content, tools)
        calls = tuple(
            ToolCall(id=f"call_{calls_so_far + i}", name=name, arguments=arguments)
            for i, (name, arguments) in enumerate(parsed)
        )
        return Message(role="assistant", content=content, reasoning=reasoning, calls=calls)


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


@contextmanager
def _refused() -> Iterator[None]:
    """Turns what a template raises into a BadRequest: it is given nothing but the request."""
    try:
        yield
    except Exception as e:
        raise BadRequest(str(e) or type(e).__name__) from e
