"""ToolExecutor executes the calls in a text, for workflows that keep their own loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megarl.api.records import ModelResponse
from megarl.rollout import tally
from megarl.rollout.tools.calls import ToolCall, parse_calls
from megarl.rollout.tools.env import ToolFailure, ToolingEnv
from megarl.rollout.tools.local import LocalToolingEnv

MAX_RESULT = 8192  # characters


class ToolExecutor:
    """Has functions as tools, and answers what a model writes.

    call_format: how the model writes calls, one of tools.calls.FORMATS. max_result: characters of
    one result that the model sees.
    """

    def __init__(self, *, call_format: str = "hermes", max_result: int = MAX_RESULT) -> None:
        self.env = LocalToolingEnv()
        self._format, self._max_result = call_format, max_result

    def register_tool(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Adds a function, see LocalToolingEnv.register_tool."""
        return self.env.register_tool(func)

    def list_tools(self) -> list[dict[str, Any]]:
        """Returns the tools for the chat template."""
        return self.env.list_tools()

    async def aexecute_tool(self, answer: ModelResponse | str) -> list[dict[str, Any]]:
        """Executes the calls in an answer of a client with a tokenizer, or in a text with its
        special tokens, and returns the messages that answer them; ChatWorkflow.tell_all has a
        sample read them. Raises ToolFailure, and ValueError for an answer without its text."""
        text = answer if isinstance(answer, str) else answer.raw_completion
        if not isinstance(answer, str) and answer.output_tokens and not text:
            raise ValueError(
                "the answer has tokens and no text: give the client a tokenizer "
                "(RemoteSGLangEngine(config, tokenizer=...)), or decode output_tokens"
            )
        calls = parse_calls(text, self._format, self.list_tools())
        return [await answer_call(self.env, call, self._max_result) for call in calls]


async def answer_call(env: ToolingEnv, call: ToolCall, max_result: int) -> dict[str, Any]:
    """Returns the message that answers a call, its text cut to `max_result` characters. Raises
    ToolFailure."""
    tally.add({"tools/calls": 1, "tools/errors": 0})
    text = f"Error: {call.error}"
    try:
        if not call.error:
            text = await env.aexecute(call.name, call.arguments)
    except ToolFailure:
        tally.add({"tools/errors": 1})
        raise
    tally.add({"tools/errors": int(text.startswith("Error"))})
    if len(text) > max_result:
        text = f"{text[:max_result]}... ({len(text)} characters)"
    return {"role": "tool", "name": call.name, "content": text}
