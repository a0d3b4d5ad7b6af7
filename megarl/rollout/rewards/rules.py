"""Scores texts by rules: equality, patterns, length."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from megarl.rollout.rewards.results import bounded


def exact_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    answer: Any,
    ignore_case: bool = False,
    **row: Any,
) -> float:
    """Returns 1 if the completion is the answer, but for white space, else 0."""
    given, expected = (" ".join(str(text).split()) for text in (completion, answer))
    return float(given.casefold() == expected.casefold() if ignore_case else given == expected)


def _check_exact(*, answer: Any = None, **row: Any) -> None:
    if answer is None:
        raise ValueError("answer is null, which no completion is; leave the row out")


exact_reward.check_row = _check_exact  # type: ignore[attr-defined]


@bounded
def regex_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    pattern: str,
    answer: Any = None,
    **row: Any,
) -> float:
    """Returns 1 if the last match of `pattern` is the row's answer, but for white space around it,
    else 0. The pattern's first group is compared, or the whole match; in a row without an answer
    any match is right. Raises ValueError for a pattern that is none."""
    matches = list(_compiled(pattern).finditer(completion))
    match = matches[-1] if matches else None
    if match is None or answer is None:
        return float(match is not None)
    text = match[1] if match.re.groups else match[0]
    return float((text or "").strip() == str(answer).strip())


@bounded
def format_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    pattern: str = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*",
    **row: Any,
) -> float:
    """Returns 1 if the whole completion has the form of `pattern`, a dot being any character, else
    0. Raises ValueError for a pattern that is none."""
    return float(_compiled(pattern).fullmatch(completion) is not None)


def length_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    at_least: int = 0,
    at_most: int,
    **row: Any,
) -> float:
    """Returns 1 if the completion has from `at_least` to `at_most` tokens, else 0."""
    return float(at_least <= len(completion_ids) <= at_most)


def overlong_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    max_length: int,
    buffer: int,
    **row: Any,
) -> float:
    """Returns 0 for a completion of at most `max_length - buffer` tokens, -1 for one of
    `max_length`, and what lies between them for one in between (DAPO, arXiv 2503.14476). Raises
    ValueError for a buffer that does not fit."""
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer={buffer}: use from 1 to max_length={max_length} tokens")
    over = len(completion_ids) - (max_length - buffer)
    return -min(1.0, max(0.0, over / buffer))


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as e:
        raise ValueError(f"pattern {pattern!r}: {e}") from e
