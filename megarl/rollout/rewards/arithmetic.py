"""Rewards an exact match: the whole answer, and nothing else."""

from __future__ import annotations

from typing import Any


def arithmetic_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    answer: str,
    **row: Any,
) -> float:
    """Returns 1 if the completion, but for surrounding white space, is the answer; else 0."""
    return float(completion.strip() == str(answer).strip())
