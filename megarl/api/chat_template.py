"""Turns chats into tokens by a model's chat template.

A history that the policy wrote itself is never rendered again: `after` returns only the tokens that
stand between its last answer and its next one. This file imports nothing of megarl: the workers of
environments load it in an interpreter that has no megarl.
"""

from __future__ import annotations

import inspect
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2.exceptions import TemplateError

Messages = Sequence[Mapping[str, Any]]  # role, content and what else a chat template reads
Tools = Sequence[Mapping[str, Any]]  # OpenAI's function objects

# stands for an answer in a rendered chat, and for nothing that a chat may hold
_MARK = f"<<answer {uuid.uuid4().hex}>>"


def decoded(value: Any) -> Any:
    """Returns the value of a JSON text, as chat templates take arguments and tools. An empty text
    is None. A text that is not JSON, and any other value, are returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        return value


def utf8(text: str) -> str:
    """Returns the text with U+FFFD for each half of a surrogate pair. Tokenizers, JSON and HTTP
    refuse such a half, which file names and tools may have."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class ChatTemplate:
    """Renders by the template of `tokenizer`, which gets `options` (enable_thinking, ...). All
    methods raise ValueError for messages that the template refuses."""

    fix = "change the messages, or chat_template_kwargs"  # of messages that the template refuses

    def __init__(self, tokenizer: Any, options: Mapping[str, Any]) -> None:
        self.tokenizer, self._options = tokenizer, dict(options)
        self.name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__

    def with_options(self, options: Mapping[str, Any]) -> ChatTemplate:
        """Returns the template with further options. Raises ValueError for an option that has the
        name of a parameter of apply_chat_template."""
        taken = inspect.signature(self.tokenizer.apply_chat_template).parameters.keys()
        if wrong := sorted(taken & options.keys()):
            raise ValueError(f"chat_template_kwargs.{wrong[0]}: not an option of a chat template")
        return ChatTemplate(self.tokenizer, self._options | dict(options)) if options else self

    def text(self, messages: Messages, tools: Tools = ()) -> str:
        """Returns a chat as text, up to the beginning of the next answer. The policy goes on with
        the last message where that is an assistant's."""
        if messages and messages[-1]["role"] == "assistant":
            how = {"add_generation_prompt": False, "continue_final_message": True}
            return str(self.apply(messages, tools, tokenize=False, **how))
        return self.render(messages, tools)

    def render(self, messages: Messages, tools: Tools = (), *, answer_follows: bool = True) -> str:
        """Returns the text of whole messages, with the beginning of an answer if one follows."""
        how = {"tokenize": False, "add_generation_prompt": answer_follows}
        return str(self.apply(messages, tools, **how))

    def apply(self, messages: Messages, tools: Tools, **how: Any) -> Any:
        """Returns what the tokenizer's apply_chat_template does. Raises ValueError, with the
        template's own words, where it fails."""
        how = self._options | how
        try:
            if tools:
                how["tools"] = [dict(t) for t in tools]
            return self.tokenizer.apply_chat_template([dict(m) for m in messages], **how)
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            RuntimeError,
        ) as e:
            roles = ", ".join(str(m.get("role")) for m in messages)
            raise ValueError(
                f"the chat template of tokenizer {self.name} fails on messages of {roles} with "
                f"chat_template_kwargs={self._options} ({type(e).__name__}: {e}); {self.fix}"
            ) from e

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text that holds its special tokens. Raises ValueError where the
        tokenizer makes none of it."""
        ids: list[int] = self.tokenizer(utf8(text), add_special_tokens=False)["input_ids"]
        if text.strip() and not ids:
            raise ValueError(
                f"tokenizer {self.name} makes no tokens of {text[:40]!r}: its directory lacks the "
                "vocabulary (tokenizer.json, vocab.json or tokenizer.model); copy it there, or set "
                "tokenizer_path"
            )
        return ids

    def after(
        self,
        history: Messages,
        news: Messages,
        tools: Tools = (),
        *,
        last_token: int | None,
        answer_follows: bool = True,
    ) -> list[int]:
        """Returns the ids behind the answer that ends `history`, in which `news` is read, up to the
        next answer if one follows. last_token: the answer's; the end of its turn stands there
        already, unless a bound cut the answer short."""
        ids = self.encode(self._behind(history[:-1], history[-1], news, tools, answer_follows))
        return ids[1:] if ids and ids[0] == last_token else ids

    def shows(self, tools: Tools) -> bool:
        """Returns whether the template tells the policy of these tools."""
        chat = [{"role": "user", "content": "?"}]
        return self.text(chat, tools) != self.text(chat)

    def special_in(self, messages: Messages) -> int:
        """Returns the number of messages of others than the policy whose content has a special
        token: it is read as one, as if the template had written it."""
        special = _special(self.tokenizer)
        others = (str(m.get("content", "")) for m in messages if m["role"] != "assistant")
        return sum(bool(special.search(text)) for text in others)

    def _behind(
        self,
        before: Messages,
        answer: Mapping[str, Any],
        news: Messages,
        tools: Tools,
        follows: bool,
    ) -> str:
        marked = {"role": "assistant", "content": _MARK}
        try:
            return _after_mark(self.render([*before, marked, *news], tools, answer_follows=follows))
        except ValueError:
            if not answer.get("tool_calls"):
                raise
        # a template that wants to see a call before a tool's answer: what follows on the call is
        # what the chat has beyond the chat that ends with it
        ends = _after_mark(self.render([*before, marked], tools, answer_follows=False))
        marked |= {"tool_calls": answer["tool_calls"]}
        without = _after_mark(self.render([*before, marked], tools, answer_follows=False))
        text = _after_mark(self.render([*before, marked, *news], tools, answer_follows=follows))
        if not text.startswith(without):
            raise ValueError("the chat template writes a call in another way once it is answered")
        return (ends if without.endswith(ends) else "") + text[len(without) :]


@lru_cache(maxsize=4)
def _special(tokenizer: Any) -> re.Pattern[str]:
    """Returns what finds a special token of the tokenizer in a text."""
    added = tokenizer.added_tokens_decoder.values()
    tokens = {t.content for t in added if t.special} | set(tokenizer.all_special_tokens)
    return re.compile("|".join(map(re.escape, sorted(tokens))) or r"(?!)")


def _after_mark(text: str) -> str:
    _, mark, rest = text.rpartition(_MARK)
    if not mark:
        raise ValueError("the model's chat template leaves out an answer of the policy")
    return rest
