"""Applies a tokenizer's chat template: prompts for RL, conversations with a loss mask for SFT."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from jinja2 import TemplateError

Message = dict[str, Any]
TRAIN_ON = ("all", "last")
# the words with which a template marks what the assistant writes
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OPTIONS: dict[str, tuple[type, str]] = {
    "system": (str, "text"),
    "chat_template_kwargs": (dict, "keys and values"),
}


class Template:
    """Renders messages and makes tokens of them, with the options that every data set takes:
    system, chat_template_kwargs, train_on. Raises ValueError for a tokenizer without a template, an
    EOS token or a vocabulary, and for an option that is wrong.
    """

    def __init__(self, tokenizer: Any, options: dict[str, Any]) -> None:
        for name, (kind, words) in _OPTIONS.items():
            if options.get(name) is not None and not isinstance(options[name], kind):
                raise ValueError(f"options.{name}={options[name]!r}: not {words}")
        self._train_on = options.get("train_on", "all")
        if self._train_on not in TRAIN_ON:
            raise ValueError(f"options.train_on={self._train_on!r}: use one of {list(TRAIN_ON)}")
        self._name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"tokenizer {self._name} has no chat template; name a Jinja file that holds one in "
                "chat_template, or a directory whose tokenizer has one in tokenizer_path"
            )
        if tokenizer.eos_token_id is None:
            raise ValueError(f"tokenizer {self._name} has no EOS token: no answer could end")
        self._tokenizer, self._system = tokenizer, options.get("system")
        self._kwargs = options.get("chat_template_kwargs") or {}
        self.eos_token_id: int = tokenizer.eos_token_id
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        self._special = (tokenizer.eos_token, *(str(t) for t in added if t.special))
        self.encode("What is 1 + 1?")  # without a vocabulary only special tokens are left of text

    def told(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages below the option's system message, where they have none."""
        if not self._system or messages[0]["role"] == "system":
            return list(messages)
        return [{"role": "system", "content": self._system}, *messages]

    def render(
        self, messages: Sequence[Message], *, tools: Any = None, answer_follows: bool = True
    ) -> str:
        """Returns the text of the messages, with the beginning of an answer if one follows.
        Raises ValueError, with the template's own words, where it refuses them."""
        return self._apply(messages, tools, tokenize=False, add_generation_prompt=answer_follows)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of text that holds its special tokens. Raises ValueError where the
        tokenizer makes none of it."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if text.strip() and not ids:
            raise ValueError(
                f"tokenizer {self._name} makes no tokens of {text[:40]!r}: its directory lacks the "
                "vocabulary (tokenizer.json, vocab.json or tokenizer.model); copy it there, or set "
                "tokenizer_path"
            )
        return ids

    def conversation(
        self, messages: Sequence[Message], *, tools: Any = None, start: int = 0
    ) -> tuple[list[int], list[bool]]:
        """Returns the tokens of a conversation, and which of them the assistant wrote: its turns
        with the special token that ends each, or with train_on=last the last turn alone. Turns
        before messages[start] count as told, not as written. Where the
        template ends no turn with one, EOS follows the last turn, as generation has to end.

        A template that marks the assistant's text ({% generation %}) is taken at its word. With
        another one, a turn is what messages[:i+1] render to beyond messages[:i] and the beginning
        of an answer. Raises ValueError where these are not parts of the whole, which a template
        that drops earlier thoughts does, and for messages without an assistant's.
        """
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        told = sum(i < start for i in turns)
        if len(turns) == told:
            raise ValueError("the messages have no assistant's among them to train on")
        if _MARKED.search(self._tokenizer.chat_template):
            return self._marked(messages, tools, told)
        turns = turns[told:]
        turns = turns[-1:] if self._train_on == "last" else turns
        ids: list[int] = []
        mask: list[bool] = []
        for text, trained in self._pieces(messages, turns, tools):
            piece = self.encode(text) if text else []
            if trained and not self._ends(text):  # the last turn, of which nothing tells the end
                piece.append(self.eos_token_id)
            ids += piece
            mask += [trained] * len(piece)
        return ids, mask

    def _pieces(
        self, messages: Sequence[Message], turns: Sequence[int], tools: Any
    ) -> Iterator[tuple[str, bool]]:
        """Yields the conversation's text in parts, and whether the assistant wrote each. Tokens are
        made of each part alone, as in RL, where no token of an answer reaches into the prompt."""
        whole = self.render(messages, tools=tools, answer_follows=False)
        done = 0
        for i in turns:
            begin = self.render(messages[:i], tools=tools)
            end = self.render(messages[: i + 1], tools=tools, answer_follows=False)
            if not (end.startswith(begin) and whole.startswith(end)):
                raise ValueError(
                    f"the chat template of tokenizer {self._name} renders message {i} otherwise "
                    "once others follow, or after the beginning of an answer; set options.train_on="
                    "last, or mark the assistant's text in the template with {% generation %}"
                )
            answer = end[len(begin) :].rstrip()
            if not self._ends(answer) and i != len(messages) - 1:
                raise ValueError(
                    f"the chat template of tokenizer {self._name} ends message {i} with no special "
                    "token, so nobody could tell that the turn is over; set options.train_on=last"
                )
            yield whole[done : len(begin)], False
            yield answer, True
            done = len(begin) + len(answer)
        if self._ends(whole[:done]):
            yield whole[done:], False

    def _ends(self, text: str) -> bool:
        """Returns whether `text` ends with a special token."""
        return text.endswith(self._special)

    def _marked(
        self, messages: Sequence[Message], tools: Any, told: int
    ) -> tuple[list[int], list[bool]]:
        """Returns tokens and mask by the template's marks, without the first `told` turns."""
        found = self._apply(
            messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        mask = [bool(m) for m in found["assistant_masks"]]
        if not any(mask):
            raise ValueError(
                f"the chat template of tokenizer {self._name} marks no token of the assistant's; "
                "put its text between {% generation %} and {% endgeneration %}"
            )
        for _ in range(told):
            begin = mask.index(True)
            end = mask.index(False, begin)
            mask[begin:end] = [False] * (end - begin)
        if self._train_on == "last":
            end = max(i for i, m in enumerate(mask) if m) + 1
            begin = next((i for i in range(end - 1, -1, -1) if not mask[i]), -1) + 1
            mask = [begin <= i < end for i in range(len(mask))]
        return list(found["input_ids"]), mask

    def _apply(self, messages: Sequence[Message], tools: Any, **how: Any) -> Any:
        kwargs = self._kwargs if tools is None else self._kwargs | {"tools": tools}
        try:
            return self._tokenizer.apply_chat_template(list(messages), **how, **kwargs)
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as e:
            roles = ", ".join(m["role"] for m in messages)
            raise ValueError(
                f"the chat template of tokenizer {self._name} fails on messages of {roles} with "
                f"chat_template_kwargs={self._kwargs} ({type(e).__name__}: {e}); change the "
                "dataset's options system and chat_template_kwargs, or take another tokenizer_path"
            ) from e
