"""Reads the policy's answers as messages, and makes prompts of messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from megarl.api.records import ModelResponse
from megarl.rollout.chat_template import ChatTemplate
from megarl.rollout.gateway.calls import CallParser
from megarl.rollout.gateway.errors import BadRequest
from megarl.rollout.gateway.messages import Message, ToolCall


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
            told = [m.for_template() for m in messages]
            self._template.count_special(told)
            text = self._template.text(told, tools)
            return self._template.encode(text)

    def after(
        self,
        history: Sequence[Message],
        rest: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        last_token: int,
    ) -> list[int]:
        """Returns the ids in which `rest` is read; see ChatTemplate.after. Raises BadRequest."""
        before, told = [m.for_template() for m in history], [m.for_template() for m in rest]
        with _refused():
            self._template.count_special(told)
            return self._template.after(before, told, tools, last_token=last_token)

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
