"""Makes the quickstart's sums with answers of long-tailed lengths.

The demonstrations begin with filler before the result, "37+45" -> "...82": mostly a few dots, in
one of ten many commas. So the model learns to write filler of a random length, too, which is cut
off before the result is compared: lengths have a long tail, and no length earns more than another.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from megarl.config.dataset import DatasetConfig
from megarl.data.arithmetic import arithmetic
from megarl.data.problem import Problem

LONG = 0.1  # share of demonstrations with much filler
FEW, MANY = 2, 40  # mean lengths of filler, in characters, which are tokens
MOST = 112


def sums(
    cfg: DatasetConfig, *, seed: int, level: int = 2, demos: int = 1, careless: float = 0.0
) -> list[Problem]:
    """Makes sums of numbers of `level` digits, as the data set "arithmetic" does."""
    rng = random.Random(seed)
    return [
        replace(p, response=_filler(rng) + (p.response or p.answer))
        for p in arithmetic(cfg, seed=seed, level=level, demos=demos, careless=careless)
    ]


def result_is_right(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    answer: str,
    **row: Any,
) -> float:
    """Returns 1 if the answer, and nothing else, stands behind the filler, else 0."""
    return float(completion.lstrip(".,") == answer)


def _filler(rng: random.Random) -> str:
    sign, mean = (",", MANY) if rng.random() < LONG else (".", FEW)
    return sign * min(MOST, int(rng.expovariate(1 / mean)))
