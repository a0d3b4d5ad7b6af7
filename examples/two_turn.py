"""A workflow of two turns with a tool between them.

    python -m megarl.launcher.local --config configs/quickstart_grpo.yaml \\
        rollout.workflow=examples.two_turn:TwoTurnWorkflow

The model answers. A tool looks at the answer; where it objects, its words are the user's second
message, and the model answers again, for half the reward.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megarl.api.batch import Padded
from megarl.api.inference import InferenceEngine, RolloutWorkflow
from megarl.api.records import ModelRequest, ModelResponse
from megarl.config.rollout import GenerationHyperparameters
from megarl.rollout import RewardPool

TOOL_TIMEOUT = 10.0  # seconds
SECOND_TRY = 0.5  # what the second answer is worth
MARK = "<<answer>>"  # stands for an answer in a rendered chat


# --8<-- [start:transcript]
@dataclass(kw_only=True)
class Transcript:
    """One sample, token by token: who wrote it, with which logprob, under which weights."""

    tokens: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def read(self, tokens: Sequence[int]) -> None:
        """Tokens the model only reads: prompts, tool output."""
        self._extend(tokens, False, [0.0] * len(tokens), [-1] * len(tokens))

    def wrote(self, r: ModelResponse) -> None:
        """Tokens the model wrote, as the server reports them."""
        self._extend(r.output_tokens, True, r.output_logprobs, r.output_versions)

    def _extend(
        self,
        tokens: Sequence[int],
        trained: bool,
        logprobs: Sequence[float],
        versions: Sequence[int],
    ) -> None:
        self.tokens += tokens
        self.trained += [trained] * len(tokens)
        self.logprobs += logprobs
        self.versions += versions


def pad(samples: Sequence[Transcript]) -> Padded:
    """The contract's batch [n,S], right-padded."""
    width = max(len(s.tokens) for s in samples)

    def column(rows: Sequence[Sequence[Any]], empty: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([[*row, *[empty] * (width - len(row))] for row in rows], dtype=dtype)

    return {
        "input_ids": column([s.tokens for s in samples], 0, torch.int64),
        "attention_mask": column([[True] * len(s.tokens) for s in samples], False, torch.bool),
        "loss_mask": column([s.trained for s in samples], False, torch.bool),
        "logprobs": column([s.logprobs for s in samples], 0.0, torch.float32),
        "versions": column([s.versions for s in samples], -1, torch.int32),
    }


# --8<-- [end:transcript]


# --8<-- [start:tool]
def look_at(answer: str, truth: str) -> str | None:
    """The tool: what it says about a wrong answer, None for a right one."""
    try:
        number = int(answer)
    except ValueError:
        return "a number"
    if number == int(truth):
        return None
    return "more" if number < int(truth) else "less"


# --8<-- [end:tool]


# --8<-- [start:workflow]
class TwoTurnWorkflow(RolloutWorkflow):
    def __init__(
        self,
        reward_fn: Callable[..., float],
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        *,
        reward_pool: RewardPool,
    ) -> None:
        self._reward_fn, self._pool = reward_fn, reward_pool
        self._gconfig, self._tokenizer = gconfig, tokenizer

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Padded:
        """A padded batch [n,S], n = gconfig.n_samples."""
        samples = [Transcript() for _ in range(self._gconfig.n_samples)]
        for sample in samples:
            sample.read(data["prompt_ids"])
        answers = await self._generate(engine, samples)
        worth = [1.0] * len(samples)

        said = await asyncio.gather(*(self._tool(a, data) for a in answers))
        wrong = [i for i, words in enumerate(said) if words is not None]
        for i in wrong:
            samples[i].read(self._second_prompt(data["messages"], said[i], samples[i]))
        again = await self._generate(engine, [samples[i] for i in wrong])
        for i, answer in zip(wrong, again, strict=True):
            answers[i], worth[i] = answer, SECOND_TRY

        rewards = await asyncio.gather(*(self._reward(a, data) for a in answers))
        earned = [r * w for r, w in zip(rewards, worth, strict=True)]
        return pad(samples) | {"rewards": torch.tensor(earned, dtype=torch.float32)}

    async def _generate(
        self, engine: InferenceEngine, samples: Sequence[Transcript]
    ) -> list[ModelResponse]:
        """One more answer to each sample."""
        if not samples:
            return []
        responses = await engine.agenerate_many(
            [
                ModelRequest(rid=uuid.uuid4().hex, input_ids=s.tokens, gconfig=self._gconfig)
                for s in samples
            ]
        )
        for sample, response in zip(samples, responses, strict=True):
            sample.wrote(response)
        return responses

    def _text(self, answer: ModelResponse) -> str:
        return self._tokenizer.decode(answer.output_tokens, skip_special_tokens=True)

    async def _tool(self, answer: ModelResponse, data: dict[str, Any]) -> str | None:
        """In a thread and with a bound: all episodes share this event loop."""
        async with asyncio.timeout(TOOL_TIMEOUT):
            return await asyncio.to_thread(look_at, self._text(answer), data["answer"])

    def _second_prompt(
        self, messages: Sequence[dict[str, str]], words: str | None, sample: Transcript
    ) -> list[int]:
        """The tokens between two answers, by the chat template. What the model wrote is never
        tokenized again: its logprobs belong to its own tokens.
        """
        chat = [
            *messages,
            {"role": "assistant", "content": MARK},
            {"role": "user", "content": words},
        ]
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        rest = self._tokenizer(text.partition(MARK)[2], add_special_tokens=False)["input_ids"]
        # the end of its turn stands there already, unless max_new_tokens cut the answer short
        return rest[1:] if rest[0] == sample.tokens[-1] else rest

    async def _reward(self, answer: ModelResponse, data: dict[str, Any]) -> float:
        row = dict(data)
        args = (row.pop("prompt"), self._text(answer), row.pop("prompt_ids"), answer.output_tokens)
        return await self._pool.score(self._reward_fn, args, row, row_id=data["row_id"])


# --8<-- [end:workflow]
