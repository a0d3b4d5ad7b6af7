"""Defines RLVR: n independent answers to one prompt, each scored by a verifiable reward."""

from __future__ import annotations

from typing import Any

from megarl.api.batch import Padded
from megarl.api.inference import InferenceEngine
from megarl.rollout.chat import ChatWorkflow
from megarl.rollout.trajectory import to_batch


class RLVRWorkflow(ChatWorkflow):
    """Has the policy write one answer to the prompt, and scores it."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Padded:
        """Returns a padded batch [n,S], n = gconfig.n_samples, by trajectory.to_batch."""
        samples = self.begin(data)
        await self.generate(engine, samples, data)
        return to_batch(samples, await self.score(samples, data))
