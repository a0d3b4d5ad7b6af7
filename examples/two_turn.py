"""A workflow that has two turns, with a tool between them.

    megarl launch --config configs/quickstart_grpo.yaml \\
        rollout.workflow=examples.two_turn:TwoTurnWorkflow rollout.workflow.options.second_try=0.5

The model answers and a tool checks the answer. Where the tool objects, its words become the user's
second message, and the model answers again, for a part of the reward.
"""

from __future__ import annotations

import asyncio
from typing import Any

from megarl.api.batch import Padded
from megarl.api.inference import InferenceEngine
from megarl.rollout.chat import ChatWorkflow
from megarl.rollout.trajectory import to_batch

TOOL_TIMEOUT = 10.0  # seconds


def look_at(answer: str, truth: str) -> str | None:
    """Runs the tool: returns what it says about a wrong answer, None for a right one."""
    try:
        number = int(answer)
    except ValueError:
        return "a number"
    if number == int(truth):
        return None
    return "more" if number < int(truth) else "less"


class TwoTurnWorkflow(ChatWorkflow):
    def __init__(self, *args: Any, second_try: float = 0.5, **kwargs: Any) -> None:
        """second_try: the part of its reward that a second answer gets."""
        super().__init__(*args, **kwargs)
        self.second_try = second_try

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Padded:
        """Returns a padded batch [n,S], n = gconfig.n_samples."""
        samples = self.begin(data)
        answers = await self.generate(engine, samples, data)
        again = []
        for sample, answer in zip(samples, answers, strict=True):
            async with asyncio.timeout(TOOL_TIMEOUT):  # in a thread: episodes share one event loop
                words = await asyncio.to_thread(look_at, answer, data["answer"])
            if words is not None:
                self.tell(sample, words)
                again.append(sample)
        await self.generate(engine, again, data)
        rewards = await self.score(samples, data)
        return to_batch(
            samples,
            [
                r if len(s.answers) == 1 else self.second_try * r
                for r, s in zip(rewards, samples, strict=True)
            ],
        )
