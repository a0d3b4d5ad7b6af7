"""The reward of a rehearsal. A model with random weights answers nothing rightly; so that samples
differ and gradients are not zero, answers are judged by something they all have."""

from __future__ import annotations

from typing import Any


def even_share(
    prompt: Any, completion: str, prompt_ids: Any, completion_ids: Any, **row: Any
) -> float:
    """Returns the share of even token ids in the answer, from 0 to 1."""
    return sum(token % 2 == 0 for token in completion_ids) / max(1, len(completion_ids))
