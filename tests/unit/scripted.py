"""An engine that writes what a test says, and a tokenizer with tools in its chat template."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from megarl.api.records import ModelRequest, ModelResponse
from megarl.rollout.loop_thread import closing
from megarl.rollout.tools.tooling import ToolingEnv
from tests.tiny_tokenizer import save_tokenizer

# as Qwen's: tools in front, earlier thoughts removed, results that follow one another in one turn
TEMPLATE = """\
{%- if tools %}<bos>tools: {% for t in tools %}{{ t | tojson }}{% endfor %}<eos>{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<bos>user: {% endif %}
{{- '[' + m.content + ']' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<eos>{% endif %}
{%- else %}<bos>{{ m.role }}: {{ m.content.split('</think>')[-1] }}<eos>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<bos>assistant: {% endif %}"""


def tool_tokenizer(path: Path) -> Any:
    path.mkdir(exist_ok=True)
    tokenizer = save_tokenizer(path)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@asynccontextmanager
async def opened(env: ToolingEnv) -> AsyncIterator[ToolingEnv]:
    """Initializes tools, and closes them as a workflow does."""
    async with closing([env]):
        await env.ainitialize()
        yield env


class ScriptedEngine:
    """Answers the k-th request of sample i with what `write(i, k, text of the prompt)` says, token
    by token (`cut` of them if that is fewer), each with logprob -1/8 and version 3."""

    def __init__(self, tokenizer: Any, write: Callable[[int, int, str], str]) -> None:
        self.tokenizer, self.write = tokenizer, write
        self.prompts: list[tuple[int, str]] = []  # by request: how many in it, the first's text
        self._turns: dict[tuple[int, ...], tuple[int, int]] = {}
        self._begun = 0

    def get_version(self) -> int:
        return 3

    async def agenerate_many(self, reqs: Sequence[ModelRequest]) -> list[ModelResponse]:
        await asyncio.sleep(0)
        self.prompts.append((len(reqs), self.tokenizer.decode(reqs[0].input_ids)))
        return [self._answer(req) for req in reqs]

    def _answer(self, req: ModelRequest) -> ModelResponse:
        ids = tuple(req.input_ids)
        # a later turn begins with the tokens of an earlier one, its answer included
        known = max((p for p in self._turns if ids[: len(p)] == p), key=len, default=None)
        if known is None:
            sample, turn = self._begun, 0
            self._begun += 1
        else:
            sample, turn = self._turns.pop(known)
        text = self.write(sample, turn, self.tokenizer.decode(ids))
        tokens = self.tokenizer(text + "<eos>", add_special_tokens=False)["input_ids"]
        most = req.gconfig.max_new_tokens
        out = tokens[:most]
        self._turns[(*ids, *out)] = (sample, turn + 1)
        return ModelResponse(
            input_tokens=list(ids),
            output_tokens=out,
            output_logprobs=[-0.125] * len(out),
            output_versions=[3] * len(out),
            stop_reason="stop" if len(tokens) <= most else "length",
        )


def run_episode(workflow: Any, engine: Any, row: dict[str, Any]) -> Any:
    coroutine: Coroutine[Any, Any, Any] = workflow.arun_episode(engine, row)
    return asyncio.run(coroutine)


def trained_text(tokenizer: Any, batch: dict[str, Any], i: int) -> str:
    return str(tokenizer.decode(batch["input_ids"][i][batch["loss_mask"][i]]))


def whole_text(tokenizer: Any, batch: dict[str, Any], i: int) -> str:
    return str(tokenizer.decode(batch["input_ids"][i][batch["attention_mask"][i]]))
