"""Scores by reasoning_gym's own scorers: a number in [0, 1], partial credit included."""

from __future__ import annotations

from functools import cache
from typing import Any

from megarl.rollout.rewards.results import bounded
from megarl.utils.extras import require

_LIBRARY = require("reasoning_gym", extra="reasoning-gym", user="reward=reasoning_gym")
score_answer_fn = cache(_LIBRARY.get_score_answer_fn)


@bounded
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

    `entry` is the library's item (question, answer, metadata), as the dataset row carries it. An
    answer that the scorer cannot read earns 0; raises what it raises where it cannot read the
    entry's own either.
    """
    answer = _LIBRARY.utils.extract_answer(completion)
    score = score_answer_fn(entry["metadata"]["source_dataset"])
    try:
        return float(score(completion.strip() if answer is None else answer, entry))
    except Exception:
        score(str(entry["answer"]), entry)
        return 0.0
