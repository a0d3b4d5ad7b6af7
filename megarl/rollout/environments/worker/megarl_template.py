"""Defines a renderer for any chat template, in which a turn continues the tokens that were sampled:
only what comes after an answer is rendered, so an episode stays one sample."""

import uuid
from typing import Any

from pydantic import Field
from renderers.base import RenderedTokens, extract_message_tool_names
from renderers.configs import BaseRendererConfig, DefaultRendererConfig
from renderers.default import DefaultRenderer

# stands for an answer in a rendered chat, and for nothing that a chat may hold
MARK = f"<<answer {uuid.uuid4().hex}>>"
LINE = [{"role": "user", "content": "x"}, {"role": "assistant", "content": MARK}]


class TemplateConfig(BaseRendererConfig):
    """Configures the renderer. tool_parser, reasoning_parser: names of verifiers' parsers."""

    tool_parser: str | None = None
    reasoning_parser: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    _internal_fields = frozenset({"tool_parser", "reasoning_parser", "chat_template_kwargs"})


class TemplateRenderer(DefaultRenderer):
    """Renders by the tokenizer's template, like DefaultRenderer, except after an answer."""

    config_class = TemplateConfig

    def __init__(self, tokenizer, config=None):
        config = config or TemplateConfig()
        super().__init__(
            tokenizer,
            DefaultRendererConfig(
                tool_parser=config.tool_parser,
                reasoning_parser=config.reasoning_parser,
                **config.chat_template_kwargs,
            ),
        )

    def bridge_to_next_turn(
        self, previous_prompt_ids, previous_completion_ids, new_messages, *, tools=None, **_
    ):
        """Returns the earlier tokens and what the template puts after an answer, or None where it
        cannot be told; then all is rendered anew."""
        if not new_messages or any(m["role"] == "assistant" for m in new_messages):
            return None
        before = [*previous_prompt_ids, *previous_completion_ids]
        ids = self._after(new_messages, tools, before[-1], ask=True)
        if ids is None:
            return None
        indices: list[int] = []
        for i in range(len(new_messages)):
            part = self._after(new_messages[: i + 1], tools, before[-1], ask=False)
            if part is not None and ids[: len(part)] == part:
                indices += [i] * (len(part) - len(indices))
        return RenderedTokens(
            token_ids=before + ids,
            message_indices=[-1] * len(before) + indices + [-1] * (len(ids) - len(indices)),
            message_roles=[m["role"] for m in new_messages],
            message_tool_names=extract_message_tool_names(new_messages),
        )

    def _after(self, messages, tools, last_token, *, ask):
        """Returns the ids that the template puts after an answer, the end of its turn left out
        where that was sampled; None where it drops the answer or refuses the messages. ask: with
        the beginning of the next answer."""
        kwargs = dict(self.config.model_extra or {}) | ({"tools": tools} if tools else {})
        try:
            text = self._tokenizer.apply_chat_template(
                [*LINE, *messages], tokenize=False, add_generation_prompt=ask, **kwargs
            )
        except Exception:  # a template that wants a call before a tool's answer
            return None
        _, mark, tail = text.partition(MARK)
        if not mark:
            return None
        ids = self._tokenizer.encode(tail, add_special_tokens=False)
        return ids[1:] if ids and ids[0] == last_token else ids
