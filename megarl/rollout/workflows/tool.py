"""ToolWorkflow lets the policy call tools until it answers without a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Unpack

from megarl.api.batch import Padded
from megarl.api.inference import InferenceEngine
from megarl.config.rollout import GenerationHyperparameters
from megarl.rollout.chat import all_of
from megarl.rollout.closing import closing
from megarl.rollout.tools.calls import FORMATS, ToolCall, parse_calls
from megarl.rollout.tools.env import ToolFailure, ToolingEnv
from megarl.rollout.tools.executor import MAX_RESULT, answer_call
from megarl.rollout.tools.listed import ToolList, tool_problems
from megarl.rollout.tools.local import TOOL_TIMEOUT
from megarl.rollout.trajectory import Trajectory
from megarl.rollout.workflows.turns import Row, TurnOptions, TurnsWorkflow

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

    tokenizer: one whose chat template shows tools.
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
        if problem := next(self.check_options(tools=tools, call_format=call_format), None):
            raise ValueError(problem)
        if not self._chat.shows([_PROBE]):
            name = getattr(tokenizer, "name_or_path", "")
            raise ValueError(
                f"the chat template of tokenizer {name!r} shows no "
                "tools to the policy: a prompt is the same with and without them; set "
                "chat_template to one that writes `tools`, as the instruct model's does"
            )
        self._tools = ToolList(tools, timeout=tool_timeout)
        self._format, self._max_result = call_format, max_result

    @classmethod
    def check_options(
        cls, *, tools: Sequence[Any] = (), call_format: str = "hermes", **others: Any
    ) -> Iterator[str]:
        """Yields what is wrong with the options, before anything starts."""
        yield from tool_problems(tools)
        if call_format not in FORMATS:
            yield f"call_format={call_format!r}: use one of {sorted(FORMATS)}"

    async def arun_episode(self, engine: InferenceEngine, data: Row) -> Padded:
        """Returns a padded batch [n,S], n = gconfig.n_samples, by trajectory.to_batch."""
        envs = [self._tools.make(data) for _ in range(self.count(data))]
        unclosed: list[ToolingEnv] = list(envs)
        async with closing(unclosed):
            broken = await all_of(_initialized(env) for env in envs)
            tools = next((e.list_tools() for e, bad in zip(envs, broken) if bad is None), [])
            data = self._with_tools(data, tools)
            samples = self.begin(data)
            for sample, error in zip(samples, broken, strict=True):
                if error is not None:
                    self.failed(sample, "tool", error, data)
            await self.first_answers(engine, samples, data)
            going = [(s, e) for s, e in zip(samples, envs, strict=True) if s.failure is None]
            for _, env in going:  # each is closed at the end of its sample
                unclosed.remove(env)
            await all_of(self._use_tools(engine, sample, env, data) for sample, env in going)
        return await self.finish(samples, data)

    @staticmethod
    def _with_tools(data: Row, tools: list[dict[str, Any]]) -> Row:
        """Returns the row with its tools, to be rendered again: the prompt of the data set has none
        of them."""
        if not data.get("messages"):
            raise ValueError("a row for tools has messages, for the chat template; it has none")
        return {k: v for k, v in data.items() if k not in ("prompt", "prompt_ids")} | {
            "tools": tools
        }

    async def _use_tools(
        self, engine: InferenceEngine, sample: Trajectory, env: ToolingEnv, data: Row
    ) -> None:
        """Brings a sample to its last answer, and closes its tools."""
        async with closing([env]):
            while self.may_go_on(sample) and (calls := self.calls(sample, data)):
                try:
                    results = [await answer_call(env, c, self._max_result) for c in calls]
                except ToolFailure as e:
                    self.failed(sample, "tool", e, data)
                    return
                self.tell_all(sample, results, tools=data["tools"])
                if not self.has_room(sample):
                    return
                await self.generate(engine, [sample], data)

    def calls(self, sample: Trajectory, data: Row) -> list[ToolCall]:
        """Returns the calls of the last answer, read with its special tokens: in some formats they
        begin a call. A subclass may read a format of its own."""
        tokens = sample.answers[-1].output_tokens
        text = self.tokenizer.decode(tokens, skip_special_tokens=False)
        return parse_calls(text, self._format, data["tools"])


async def _initialized(env: ToolingEnv) -> ToolFailure | None:
    """Returns why the environment cannot be used, None where it can."""
    try:
        await env.ainitialize()
    except ToolFailure as e:
        return e
    return None
