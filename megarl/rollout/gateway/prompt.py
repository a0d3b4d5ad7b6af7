"""Turns chats into tokens by the model's chat template, and answers into messages.

A history that the policy wrote itself is never rendered again: `after` returns only the tokens that
stand between its last answer and its next one.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from megarl.api.records import ModelResponse
from megarl.rollout.gateway.calls import CallParser
from megarl.rollout.gateway.errors import BadRequest
from megarl.rollout.gateway.messages import Message, ToolCall

# stands for an answer in a rendered chat, and for nothing that a chat may hold
_MARK = f"<<answer {uuid.uuid4().hex}>>"


class Renderer:
    """Renders chats by the template of `tokenizer`, which gets template_kwargs (enable_thinking,
    ...)."""

    def __init__(
        self, tokenizer: Any, parser: CallParser, template_kwargs: Mapping[str, Any]
    ) -> None:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError("a session needs a tokenizer with a chat template: give the model's")
        self.tokenizer, self._parser = tokenizer, parser
        self._kwargs = dict(template_kwargs)

    def whole(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the ids of a chat from its beginning. The policy goes on with the last message
        where that is an assistant's."""
        goes_on = bool(messages) and messages[-1].role == "assistant"
        text = self._template(messages, tools, continue_final_message=goes_on)
        return self._encode(text)

    def after(
        self,
        history: Sequence[Message],
        rest: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        last_token: int | None,
    ) -> list[int]:
        """Returns the ids between the answer that ends `history` and the next one, in which `rest`
        is read. last_token: the answer's; the end of its turn is not repeated."""
        ids = self._encode(self._tail(history, rest, tools))
        return ids[1:] if ids and ids[0] == last_token else ids

    def _tail(
        self,
        history: Sequence[Message],
        rest: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
    ) -> str:
        marked = Message(role="assistant", content=_MARK)
        calls = history[-1].calls
        try:
            text = self._template([*history[:-1], marked, *rest], tools)
            return _after_mark(text)
        except BadRequest:
            if not calls:
                raise
        # a template that wants a call before a tool's answer: what a call adds is the text by which
        # the chat with it, and without `rest`, differs
        marked = Message(role="assistant", content=_MARK, calls=calls)
        without = _after_mark(self._template([*history[:-1], marked], tools, ask=False))
        text = _after_mark(self._template([*history[:-1], marked, *rest], tools))
        plain = Message(role="assistant", content=_MARK)
        end = _after_mark(self._template([*history[:-1], plain], tools, ask=False))
        if not text.startswith(without):
            raise BadRequest("the chat template renders a call in another way once it is answered")
        return (end if without.endswith(end) else "") + text[len(without) :]

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
        content, found = self._parser(content, tools)
        calls = tuple(
            ToolCall(id=f"call_{calls_so_far + i}", name=name, arguments=arguments)
            for i, (name, arguments) in enumerate(found)
        )
        return Message(role="assistant", content=content, reasoning=reasoning, calls=calls)

    def _template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        continue_final_message: bool = False,
        ask: bool = True,
    ) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                [m.for_template() for m in messages],
                tools=[dict(t) for t in tools] or None,
                tokenize=False,
                add_generation_prompt=ask and not continue_final_message,
                continue_final_message=continue_final_message,
                **self._kwargs,
            )
        except (TemplateError, ValueError, TypeError) as e:
            raise BadRequest(f"the model's chat template refuses these messages: {e}") from e
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _split_reasoning(text: str) -> tuple[str, str]:
    """Returns what stands before </think>, where that is, and what comes after it."""
    thought, end, content = text.partition("</think>")
    if not end:
        return "", text
    return thought.strip().removeprefix("<think>").strip(), content.lstrip("\n")


def _after_mark(text: str) -> str:
    _, mark, tail = text.partition(_MARK)
    if not mark:
        raise BadRequest("the model's chat template drops an answer of the policy")
    return tail
