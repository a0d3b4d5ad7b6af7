"""Scores by reasoning_gym's own scorers: a number in [0, 1], partial credit included."""

from __future__ import annotations

from functools import cache
from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer

score_answer_fn = cache(reasoning_gym.get_score_answer_fn)


def reasoning_gym_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    entry: dict[str, Any],
    **row: Any,
) -> float:
    """Scores what stands in the last <answer>...</answer>, else the whole stripped completion.

    `entry` is the library's item (question, answer, metadata), as the dataset row carries it.
    """
    found = extract_answer(completion)
    score = score_answer_fn(entry["metadata"]["source_dataset"])
    return float(score(completion.strip() if found is None else found, entry))
