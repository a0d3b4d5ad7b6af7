"""RLVR: n independent answers to one prompt, each scored by a verifiable reward."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megarl.api.batch import Padded
from megarl.api.inference import InferenceEngine, RolloutWorkflow
from megarl.api.records import ModelRequest, ModelResponse
from megarl.config.rollout import GenerationHyperparameters
from megarl.rollout.generation import stable_seed
from megarl.rollout.rewards import RewardPool

# what a reward gets as its own arguments, and what is the executor's
_NOT_FOR_REWARD = ("prompt", "completion", "prompt_ids", "completion_ids", "episode_id")


class RLVRWorkflow(RolloutWorkflow):
    """`reward_fn(prompt, completion, prompt_ids, completion_ids, **row) -> float` runs in
    `reward_pool`. Rows hold `prompt_ids` (and `prompt`), or `messages` for the chat template.
    """

    def __init__(
        self,
        reward_fn: Callable[..., float],
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        *,
        reward_pool: RewardPool,
    ) -> None:
        if gconfig.n_samples < 1:
            raise ValueError(f"gconfig.n_samples={gconfig.n_samples}: use at least 1")
        self._reward_fn, self._gconfig, self._tokenizer = reward_fn, gconfig, tokenizer
        self._pool = reward_pool

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Padded:
        """A padded batch [n,S], n = gconfig.n_samples; beside the contract's keys `truncated` [n]
        bool: the answer ended at max_new_tokens.
        """
        prompt, prompt_ids = self._prompt(data)
        requests = self._requests(prompt_ids, data, version=engine.get_version())
        responses = await engine.agenerate_many(requests)
        row = {k: v for k, v in data.items() if k not in _NOT_FOR_REWARD}
        rewards = await _all(
            self._pool.score(
                self._reward_fn,
                (prompt, self._decode(r.output_tokens), prompt_ids, r.output_tokens),
                row,
                row_id=data.get("row_id", "?"),
            )
            for r in responses
        )
        return pad_responses(responses) | {
            "rewards": torch.tensor(rewards, dtype=torch.float32),
            "truncated": torch.tensor([r.stop_reason == "length" for r in responses]),
        }

    def _prompt(self, data: dict[str, Any]) -> tuple[str, list[int]]:
        prompt, ids = data.get("prompt"), data.get("prompt_ids")
        if prompt is None:
            prompt = self._tokenizer.apply_chat_template(
                data["messages"], tokenize=False, add_generation_prompt=True
            )
        if ids is None:
            ids = self._tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return prompt, list(ids)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _requests(
        self, prompt_ids: list[int], data: dict[str, Any], *, version: int
    ) -> list[ModelRequest]:
        """Seeds are keyed by (gconfig.seed, version, row, episode, sample); the server adds the
        position. A row may come again under the same weights, so its id alone does not do.
        """
        row_id, base = data.get("row_id", tuple(prompt_ids)), self._gconfig.seed
        key = (base, version, row_id, data.get("episode_id", 0))
        return [
            ModelRequest(
                rid=uuid.uuid4().hex,
                input_ids=prompt_ids,
                gconfig=self._gconfig,
                seed=None if base is None else stable_seed(*key, sample),
            )
            for sample in range(self._gconfig.n_samples)
        ]


async def _all(coros: Any) -> list[Any]:
    """Like gather, but the first error waits for nothing: what is left is cancelled."""
    tasks = [asyncio.ensure_future(c) for c in coros]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def pad_responses(responses: Sequence[ModelResponse]) -> Padded:
    """input_ids, attention_mask, loss_mask, logprobs, versions, each [n,S], right-padded."""
    n, width = len(responses), max(r.input_len + r.output_len for r in responses)
    batch: Padded = {
        "input_ids": torch.zeros(n, width, dtype=torch.int64),
        "attention_mask": torch.zeros(n, width, dtype=torch.bool),
        "loss_mask": torch.zeros(n, width, dtype=torch.bool),
        "logprobs": torch.zeros(n, width, dtype=torch.float32),
        "versions": torch.full((n, width), -1, dtype=torch.int32),
    }
    for i, r in enumerate(responses):
        begin, end = r.input_len, r.input_len + r.output_len
        batch["input_ids"][i, :end] = torch.tensor(r.input_tokens + r.output_tokens)
        batch["attention_mask"][i, :end] = True
        batch["loss_mask"][i, begin:end] = True
        batch["logprobs"][i, begin:end] = torch.tensor(r.output_logprobs)
        batch["versions"][i, begin:end] = torch.tensor(r.output_versions, dtype=torch.int32)
    return batch
