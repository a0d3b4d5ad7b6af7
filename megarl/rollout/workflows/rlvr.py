"""Defines RLVR: n independent answers to one prompt, each scored by a verifiable reward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Unpack

import torch

from megarl.api.batch import Padded
from megarl.api.inference import InferenceEngine, RolloutFailed
from megarl.config.rollout import GenerationHyperparameters
from megarl.rollout.chat import ChatOptions, ChatWorkflow
from megarl.rollout.trajectory import Trajectory, to_batch

BASELINE = "baseline"  # batch field [n]: the reward of the greedy answer to the row


class RLVRWorkflow(ChatWorkflow):
    """Has the policy write one answer to the prompt, and scores it.

    greedy_baseline: one more answer is written without sampling; nothing is trained on it, and its
    reward is the field `baseline` of the others (ReMax, arXiv 2310.10505). The other options: see
    ChatOptions.
    """

    def __init__(
        self,
        reward_fn: Callable[..., float],
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        *,
        greedy_baseline: bool = False,
        **common: Unpack[ChatOptions],
    ) -> None:
        super().__init__(reward_fn, gconfig, tokenizer, **common)
        self._greedy = gconfig.new(greedy=True) if greedy_baseline else None

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Padded:
        """Returns a padded batch [n,S], n = gconfig.n_samples, by trajectory.to_batch."""
        samples = self.begin(data)
        if self._greedy is None:
            await self.generate(engine, samples, data)
            return to_batch(samples, await self.score(samples, data))
        likeliest = Trajectory(index=len(samples), messages=data.get("messages", ()))
        likeliest.read(samples[0].tokens)
        every = [*samples, likeliest]
        await self.generate(engine, every, data, {likeliest.index: self._greedy})
        *rewards, baseline = await self.score(every, data)
        if math.isnan(baseline):
            raise RolloutFailed("reward", "the greedy answer, which the others are compared with")
        return to_batch(samples, rewards) | {BASELINE: torch.full((len(samples),), baseline)}
