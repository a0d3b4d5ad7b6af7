"""A reward with partial credit: an answer nearer to the sum gets more.

    megarl launch --config configs/quickstart_grpo.yaml \\
        train_dataset.reward=examples.close_reward:close_reward
"""

from __future__ import annotations

from typing import Any


def close_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    answer: str,
    **row: Any,
) -> float:
    """Returns 1 for the right number, down to 0 for one that is off by as much as the answer."""
    try:
        number = int(completion)
    except ValueError:
        return 0.0  # an answer without a number is the model's fault, not an error
    off, scale = abs(number - int(answer)), max(1, abs(int(answer)))
    return 1.0 - off / scale if off < scale else 0.0
