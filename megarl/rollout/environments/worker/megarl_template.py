"""Defines a renderer for any chat template, in which a turn continues the tokens that were sampled:
only what comes after an answer is rendered, so an episode stays one sample."""

import importlib.util
from pathlib import Path
from typing import Any

from pydantic import Field
from renderers.base import RenderedTokens, extract_message_tool_names
from renderers.configs import BaseRendererConfig, DefaultRendererConfig
from renderers.default import DefaultRenderer

# megarl is not in this interpreter; this file of its imports nothing of it
SPEC = importlib.util.spec_from_file_location(
    "megarl_chat_template", Path(__file__).parents[3] / "api" / "chat_template.py"
)
assert SPEC and SPEC.loader
SHARED = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(SHARED)
CHAT = [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]


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
        self._template = SHARED.ChatTemplate(tokenizer, self.config.model_extra or {})

    def bridge_to_next_turn(
        self, previous_prompt_ids, previous_completion_ids, new_messages, *, tools=None, **_
    ):
        """Returns the earlier tokens and what the template puts after an answer, or None where it
        cannot be told; then all is rendered anew."""
        if not new_messages or any(m["role"] == "assistant" for m in new_messages):
            return None
        before = [*previous_prompt_ids, *previous_completion_ids]
        ids = self._after(new_messages, tools, before[-1])
        if ids is None:
            return None
        indices: list[int] = []
        for i in range(len(new_messages)):
            part = self._after(new_messages[: i + 1], tools, before[-1], answer_follows=False)
            if part is not None and ids[: len(part)] == part:
                indices += [i] * (len(part) - len(indices))
        return RenderedTokens(
            token_ids=before + ids,
            message_indices=[-1] * len(before) + indices + [-1] * (len(ids) - len(indices)),
            message_roles=[m["role"] for m in new_messages],
            message_tool_names=extract_message_tool_names(new_messages),
        )

    def _after(self, messages, tools, last_token, **how):
        """Returns the ids behind an answer; None where the template drops the answer or refuses
        the messages, as one that wants a call before a tool's answer does."""
        try:
            return self._template.after(CHAT, messages, tools or (), last_token=last_token, **how)
        except Exception:
            return None
