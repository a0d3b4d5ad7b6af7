"""An agent written for the OpenAI client, trained as it is.

    megarl launch --config configs/quickstart_grpo.yaml \\
        rollout.workflow=megarl.rollout.workflows.agent:AgentWorkflow \\
        rollout.workflow.options.agent=examples.openai_agent:solve

The agent asks for a sum. Where the answer is no number, it says so and asks once more, and the
second answer earns half.
"""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI


async def solve(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Returns the reward of one rollout. data: the row."""
    messages: list[Any] = list(data["messages"])
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for earns in (1.0, 0.5):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            text = (answer.choices[0].message.content or "").strip()
            if text.isdecimal():
                return earns * (text == data["answer"])
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "user", "content": "a number"})
    return 0.0
