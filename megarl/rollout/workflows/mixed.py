"""Gives each row of a mixture to the workflow of its part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.api.batch import Padded
from megarl.api.inference import InferenceEngine, RolloutWorkflow
from megarl.config.rollout import GenerationHyperparameters


class MixedWorkflow(RolloutWorkflow):
    """Runs an episode by the workflow of the row's part, each of which has its own reward.

    workflows: by the part's name, which the row has in `dataset`. gconfig: that of all of them.
    """

    def __init__(
        self, workflows: Mapping[str, RolloutWorkflow], gconfig: GenerationHyperparameters
    ) -> None:
        self.gconfig, self.workflows = gconfig, workflows

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Padded | None:
        """Returns what the part's workflow does."""
        return await self.workflows[data["dataset"]].arun_episode(engine, data)
