"""ToolWorkflow lets the policy call tools until it answers without a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

from megarl.config.rollout import GenerationHyperparameters
from megarl.rollout.tools.calls import FORMATS, ToolCall, parse_calls
from megarl.rollout.tools.tooling import (
    MAX_RESULT,
    TOOL_TIMEOUT,
    ToolFailure,
    ToolingEnv,
    ToolList,
    answer_call,
)
from megarl.rollout.trajectory import Trajectory
from megarl.rollout.workflows.multi_turn import (
    Message,
    Partner,
    Row,
    TurnOptions,
    TurnsWorkflow,
)

_PROBE = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probes.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}


class ToolWorkflow(TurnsWorkflow):
    """Shows the policy the tools by the chat template, executes its calls, and shows it the
    results; the last answer, which calls no tool, is scored. A sample whose tool broke is not valid
    ("tool").

    tokenizer: one whose chat template shows tools; None to check the options alone.
    tools: as ToolList takes them: functions, environments, MCP servers.
    call_format: how the model writes calls, one of tools.calls.FORMATS.
    tool_timeout: seconds for one call. max_result: characters of one result that the policy sees.
    """

    usual_turns = 8

    def __init__(
        self,
        reward_fn: Callable[..., float],
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        *,
        tools: Sequence[Any],
        call_format: str = "hermes",
        tool_timeout: float = TOOL_TIMEOUT,
        max_result: int = MAX_RESULT,
        **common: Unpack[TurnOptions],
    ) -> None:
        super().__init__(reward_fn, gconfig, tokenizer, **common)
        self._tools = ToolList(tools, timeout=tool_timeout)
        if call_format not in FORMATS:
            raise ValueError(f"call_format={call_format!r}: use one of {sorted(FORMATS)}")
        if tokenizer is not None and not self._chat.shows([_PROBE]):
            raise ValueError(
                f"the chat template of tokenizer {self._chat.name!r} shows no "
                "tools to the policy: a prompt is the same with and without them; set "
                "chat_template to one that writes `tools`, as the instruct model's does"
            )
        self._format, self.max_result = call_format, max_result

    def static_prompt(self, row: Row) -> Row:
        """Returns a row whose prompt shows the tools that are functions."""
        if not (tools := self._tools.schemas):
            return row
        shown = {k: v for k, v in row.items() if k not in ("prompt", "prompt_ids")}
        prompt, ids = self._prompt(shown | {"tools": tools})
        return shown | {"tools": tools, "prompt": prompt, "prompt_ids": ids}

    def partner(self, row: Row) -> Partner:
        """Returns the tools of one sample."""
        return _ToolPartner(self, self._tools.make(row))

    def calls(self, sample: Trajectory, data: Row) -> list[ToolCall]:
        """Returns the calls of the last answer, read with its special tokens: in some formats they
        begin a call. A subclass may read a format of its own."""
        tokens = sample.answers[-1].output_tokens
        text = self.tokenizer.decode(tokens, skip_special_tokens=False)
        return parse_calls(text, self._format, data.get("tools") or ())


class _ToolPartner(Partner):
    """Answers the calls of a sample."""

    kind = "tool"
    breaks = (ToolFailure,)

    def __init__(self, flow: ToolWorkflow, env: ToolingEnv) -> None:
        self._flow, self._env = flow, env

    async def first_message(self, flow: TurnsWorkflow, row: Row) -> str | None:
        await self._env.ainitialize()
        self.tools = self._env.list_tools()
        return None

    async def next_messages(
        self, flow: TurnsWorkflow, sample: Trajectory, row: Row
    ) -> Sequence[Message]:
        calls = self._flow.calls(sample, row) if flow.may_go_on(sample) else ()
        return [await answer_call(self._env, c, self._flow.max_result) for c in calls]

    async def aclose(self) -> None:
        await self._env.aclose()
