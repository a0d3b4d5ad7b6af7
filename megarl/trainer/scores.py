"""Computes what several answers to a prompt say about a model: pass@k and maj@k. No torch."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from megarl.observability.intervals import bootstrap_ci, proportion_ci
from megarl.observability.logging import get_logger

log = get_logger(__name__)

# figures of every evaluation, NaN where there is no answer
HEADLINE = ("accuracy", "accuracy_lo", "accuracy_hi", "reward", "reward_lo", "reward_hi")
_BOXED = re.compile(r"\\boxed\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")


def pass_at_k(right: int, n: int, k: int) -> float:
    """Returns an unbiased estimate of the chance that one of k answers is right, from `right` of n:
    1 - C(n - right, k) / C(n, k), equation 1 of M. Chen et al. (2021, arXiv 2107.03374). Raises
    ValueError unless 1 <= k <= n and 0 <= right <= n."""
    if not 1 <= k <= n or not 0 <= right <= n:
        raise ValueError(f"pass@{k} of {n} answers, {right} of them right: k must be from 1 to n")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def steps_of_k(n: int) -> list[int]:
    """Returns the k for which pass@k is shown of n answers: powers of 2 up to n, and n."""
    return sorted({*(2**i for i in range(n.bit_length())), n})


def majority_reward(answers: Sequence[str], rewards: Sequence[float]) -> float:
    """Returns maj@n of one prompt: the reward of the answer that most of n samples give. Where
    several are given equally often it is the mean of theirs, as one would be picked at random.

    answers: the samples' final answers, see final_answer. Answers that are written alike and have
    other rewards, which a reward of the whole text may give, count with their mean."""
    counts = Counter(answers)
    most = max(counts.values())
    found = []
    for answer, count in counts.items():
        if count == most:
            mine = [r for a, r in zip(answers, rewards, strict=True) if a == answer]
            found.append(sum(mine) / len(mine))
    return sum(found) / len(found)


def of_several(
    prompts: Sequence[int], rewards: Sequence[float], answers: Sequence[str], *, n: int
) -> dict[str, list[float]]:
    """Returns maj@<n> of every prompt, and pass@<k> of those that have k answers, of the n that
    were asked for. prompts: that of each answer. A prompt some of whose answers failed, and left
    the batch, counts with those it has."""
    groups: dict[int, list[tuple[str, float]]] = {}
    for prompt, reward, answer in zip(prompts, rewards, answers, strict=True):
        groups.setdefault(prompt, []).append((answer, reward))
    found = {}
    for k in steps_of_k(n):
        enough = [g for g in groups.values() if len(g) >= k]
        if not enough:
            break
        found[f"pass@{k}"] = [pass_at_k(sum(r >= 1 for _, r in g), len(g), k) for g in enough]
    found[f"maj@{n}"] = [
        majority_reward([a for a, _ in g], [r for _, r in g]) for g in groups.values()
    ]
    return found


def with_interval(values: Sequence[float], n: int, seed: int) -> dict[str, float]:
    """Returns the mean of one number of each prompt, of n answers, under "", its interval under
    "_lo", "_hi"."""
    low, high = bootstrap_ci(values, seed=seed)
    if all(0 <= value <= 1 for value in values):  # shares, and those of rewards of 0 and 1
        prompts = [i for i in range(len(values)) for _ in range(n)]
        low, high = proportion_ci([v for v in values for _ in range(n)], groups=prompts)
    return {"": sum(values) / len(values), "_lo": low, "_hi": high}


def beside_failures(
    figures: dict[str, float], *, samples: int, failed: int, bound: float, name: str
) -> dict[str, float]:
    """Returns the figures of `samples` answers, with that number and `failed`, the share of all
    answers asked for that failed. Above `bound` (evaluator.max_failed) the others are NaN, with a
    warning: which answers are left was then chosen by what fails, and a failure is no wrong answer.
    name: of what was evaluated."""
    share = failed / (samples + failed) if failed else 0.0
    if share > bound:
        log.warning(
            "%s: %d of %d answers failed, a larger part than evaluator.max_failed=%g: its figures "
            "are NaN; mend what fails (the warnings above name rows), or raise the bound",
            *(name, failed, samples + failed, bound),
        )
        figures = dict.fromkeys(figures, math.nan)
    nothing = dict.fromkeys(HEADLINE, math.nan)
    return {"samples": float(samples), "failed": share} | nothing | figures


def final_answer(text: str) -> str:
    """Returns how a completion's answer is written: what stands in its last \\boxed{...}, else
    behind its last ####, else its last number, else all of it, without space around it."""
    if boxed := _BOXED.findall(text):
        return boxed[-1].strip()
    _, mark, after = text.rpartition("####")
    if mark:
        return after.strip()
    if numbers := _NUMBER.findall(text):
        return numbers[-1].replace(",", "")
    return text.strip()
