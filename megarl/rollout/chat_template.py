"""Turns chats into tokens by a model's chat template.

A history that the policy wrote itself is never rendered again: `after` returns only the tokens that
stand between its last answer and its next one.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2.exceptions import TemplateError

from megarl.rollout import tally

Messages = Sequence[Mapping[str, Any]]  # role, content and what else a chat template reads
Tools = Sequence[Mapping[str, Any]]  # OpenAI's function objects

# stands for an answer in a rendered chat, and for nothing that a chat may hold
_MARK = f"<<answer {uuid.uuid4().hex}>>"


class ChatTemplate:
    """Renders by the template of `tokenizer`, which gets `options` (enable_thinking, ...). All
    methods raise ValueError for messages that the template refuses."""

    def __init__(self, tokenizer: Any, options: Mapping[str, Any]) -> None:
        self._tokenizer, self._options = tokenizer, dict(options)

    def text(self, messages: Messages, tools: Tools = ()) -> str:
        """Returns a chat as text, up to the beginning of the next answer. The policy goes on with
        the last message where that is an assistant's."""
        goes_on = bool(messages) and messages[-1]["role"] == "assistant"
        return self._render(messages, tools, answer_follows=not goes_on, goes_on=goes_on)

    def after(
        self, history: Messages, told: Messages, tools: Tools = (), *, last_token: int | None
    ) -> list[int]:
        """Returns the ids between the answer that ends `history` and the next one, in which `told`
        is read. last_token: the answer's; the end of its turn stands there already, unless a bound
        cut the answer short."""
        ids = self.encode(self._between(history[:-1], history[-1], told, tools))
        return ids[1:] if ids and ids[0] == last_token else ids

    def shows(self, tools: Tools) -> bool:
        """Returns whether the template tells the policy of these tools."""
        chat = [{"role": "user", "content": "?"}]
        return self.text(chat, tools) != self.text(chat)

    def count_special(self, messages: Messages) -> None:
        """Counts the messages of others than the policy whose content has a special token: it is
        read as one, as if the template had written it."""
        special = _special(self._tokenizer)
        others = (str(m.get("content", "")) for m in messages if m["role"] != "assistant")
        tally.add({"special_in_content": sum(bool(special.search(text)) for text in others)})

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without special tokens around it."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _between(
        self, before: Messages, answer: Mapping[str, Any], told: Messages, tools: Tools
    ) -> str:
        marked = {"role": "assistant", "content": _MARK}
        try:
            return _after_mark(self._render([*before, marked, *told], tools))
        except ValueError:
            if not answer.get("tool_calls"):
                raise
        # a template that wants to see a call before a tool's answer: what follows on the call is
        # what the chat has beyond the chat that ends with it
        ends = _after_mark(self._render([*before, marked], tools, answer_follows=False))
        marked |= {"tool_calls": answer["tool_calls"]}
        without = _after_mark(self._render([*before, marked], tools, answer_follows=False))
        text = _after_mark(self._render([*before, marked, *told], tools))
        if not text.startswith(without):
            raise ValueError("the chat template writes a call in another way once it is answered")
        return (ends if without.endswith(ends) else "") + text[len(without) :]

    def _render(
        self,
        messages: Messages,
        tools: Tools,
        *,
        answer_follows: bool = True,
        goes_on: bool = False,
    ) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(m) for m in messages],
                tools=[dict(t) for t in tools] or None,
                tokenize=False,
                add_generation_prompt=answer_follows,
                continue_final_message=goes_on,
                **self._options,
            )
        except (TemplateError, TypeError, ValueError) as e:
            raise ValueError(f"the model's chat template refuses these messages: {e}") from e
        return text


@lru_cache(maxsize=4)
def _special(tokenizer: Any) -> re.Pattern[str]:
    """Returns what finds a special token of the tokenizer in a text."""
    added = tokenizer.added_tokens_decoder.values()
    found = {t.content for t in added if t.special} | set(tokenizer.all_special_tokens)
    return re.compile("|".join(map(re.escape, sorted(found))) or r"(?!)")


def _after_mark(text: str) -> str:
    _, mark, rest = text.rpartition(_MARK)
    if not mark:
        raise ValueError("the model's chat template leaves out an answer of the policy")
    return rest
