"""Rewards an answer that names the city, and one that names nothing else a little more."""

from __future__ import annotations

from typing import Any


def names_the_city(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    answer: str,
    short: float = 0.2,
    **row: Any,
) -> float:
    """Returns 0 for an answer without the city; else 1 - short, and 1 if it is the city alone."""
    if answer.lower() not in completion.lower():
        return 0.0
    return 1.0 if completion.strip(" .").lower() == answer.lower() else 1.0 - short
