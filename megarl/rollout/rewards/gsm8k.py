"""Maths answers: the last \\boxed{...}, else the last number, compared by math-verify."""

from __future__ import annotations

import re
from typing import Any

from math_verify import parse, verify

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?|-?\.\d+")


def gsm8k_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    answer: str,
    **row: Any,
) -> float:
    """1 if the completion's final answer equals `answer`, else 0."""
    found = final_answer(completion)
    if found is None:
        return 0.0
    # the pool bounds the time; math-verify's own timeouts need the main thread's signals
    gold = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    if not gold:
        raise ValueError(f"the dataset's answer {answer!r} cannot be parsed")
    return float(
        verify(gold, parse(f"\\boxed{{{found}}}", parsing_timeout=None), timeout_seconds=None)
    )


def final_answer(text: str) -> str | None:
    """What stands in the last \\boxed{...}; without one the last number; None without either."""
    start = text.rfind("\\boxed{")
    if start >= 0:
        return _braced(text[start + len("\\boxed{") :])
    numbers = _NUMBER.findall(text)
    return numbers[-1].rstrip(",").replace(",", "") if numbers else None


def _braced(text: str) -> str | None:
    """Up to the brace that closes the one before `text`; None if it was never closed."""
    depth = 1
    for i, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return text[:i].strip()
    return None
