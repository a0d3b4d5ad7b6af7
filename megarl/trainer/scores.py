"""Computes the figures of what a model answered: accuracy, reward, pass@k and maj@n, each with its
interval over prompts. No torch: processes that read answers import this."""

from __future__ import annotations

import logging
import math
import multiprocessing as mp
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from megarl.observability.intervals import (
    Estimate,
    bootstrap_ci,
    correlation,
    difference_ci,
    proportion_ci,
    score_ci,
)
from megarl.observability.logging import get_logger
from megarl.rollout.rewards.results import bounded, end_process_when_late
from megarl.utils.child import end_with_parent

log = get_logger(__name__)

# figures of every evaluation, NaN where there is no answer
HEADLINE = ("accuracy", "accuracy_lo", "accuracy_hi", "reward", "reward_lo", "reward_hi")
_CHUNK = 32  # answers that a process reads at a time


def figures(
    prompts: Sequence[int],
    rewards: Sequence[float],
    answers: Sequence[str],
    *,
    failed: int,
    max_failed: float,
    seed: int,
    name: str,
) -> dict[str, float]:
    """Returns the figures of what was answered to a data set, by the prompt and the reward of each
    sample: samples (their number), accuracy, some_credit, reward, and where prompts have several
    samples pass@<k> and, of their final `answers` (empty: not read), maj@<n>, with intervals as
    <figure>_lo and <figure>_hi.

    failed: how many answers failed, and are in no figure but `failed`, their share. Above
    `max_failed` the others are NaN, with a warning that names the data set: which answers are left
    was then chosen by what fails, and a failure is no wrong answer."""
    share = failed / (len(rewards) + failed) if failed else 0.0
    measured = dict.fromkeys(HEADLINE, math.nan)
    if rewards:
        measured |= _of_one(prompts, rewards, seed)
        measured |= _of_several(prompts, rewards, answers, seed)
    if share > max_failed:
        log.warning(
            "%s: %d of %d answers failed, a larger part than evaluator.max_failed=%g: its figures "
            "are NaN; mend what fails (the warnings above name rows), or raise the bound",
            *(name, failed, len(rewards) + failed, max_failed),
        )
        measured = dict.fromkeys(measured, math.nan)
    return {"samples": float(len(rewards)), "failed": share} | measured


def _of_one(prompts: Sequence[int], rewards: Sequence[float], seed: int) -> dict[str, float]:
    """Returns the figures of answers taken one by one."""
    right = [r >= 1 for r in rewards]
    low, high = proportion_ci(right, groups=prompts)
    reward_low, reward_high = score_ci(rewards, seed, groups=prompts)
    return {
        "accuracy": sum(right) / len(right),
        "accuracy_lo": low,
        "accuracy_hi": high,
        "some_credit": sum(r > 0 for r in rewards) / len(rewards),
        "reward": sum(rewards) / len(rewards),
        "reward_lo": reward_low,
        "reward_hi": reward_high,
    }


def _of_several(
    prompts: Sequence[int], rewards: Sequence[float], answers: Sequence[str], seed: int
) -> dict[str, float]:
    """Returns the figures of prompts with several answers: the mean of pass@<k> over those that
    have k answers, and of maj@<n> over all, as n is the most that one has. A prompt some of whose
    answers failed counts with those it has. {} where all have one."""
    most = max(Counter(prompts).values())
    if most == 1:
        return {}
    by_prompt: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        by_prompt.setdefault(prompt, []).append(i)
    values = {}
    for k in steps_of_k(most):
        enough = [[rewards[i] for i in group] for group in by_prompt.values() if len(group) >= k]
        values[f"pass@{k}"] = [pass_at_k(sum(r >= 1 for r in of), len(of), k) for of in enough]
    if answers:
        values[f"maj@{most}"] = [
            majority_reward([answers[i] for i in group], [rewards[i] for i in group])
            for group in by_prompt.values()
        ]
    return {
        name + end: value
        for name, of_prompts in values.items()
        for end, value in _with_interval(of_prompts, most, seed).items()
    }


def _with_interval(values: Sequence[float], n: int, seed: int) -> dict[str, float]:
    """Returns the mean of one number of each prompt, of n answers, under "", its interval under
    "_lo", "_hi"."""
    low, high = bootstrap_ci(values, seed=seed)
    if all(0 <= value <= 1 for value in values):  # shares, and those of rewards of 0 and 1
        prompts = [i for i in range(len(values)) for _ in range(n)]
        low, high = proportion_ci([v for v in values for _ in range(n)], groups=prompts)
    return {"": sum(values) / len(values), "_lo": low, "_hi": high}


def gains(
    pairs: Sequence[Sequence[Sequence[float]]], n: int
) -> dict[str, tuple[float, float, float, float]]:
    """Returns accuracy, reward and pass@<k> of two evaluations with n answers to a prompt: the
    first's, the second's, and the interval of their difference, as a report has it of a run's gain.
    pairs: for each prompt the rewards of the first's answers, and of the second's."""
    right = [[[float(r >= 1) for r in of] for of in pair] for pair in pairs]
    scores = {"accuracy": right, "reward": pairs}
    for k in steps_of_k(n)[1:]:
        enough = [pair for pair in right if min(map(len, pair)) >= k]
        scores[f"pass@{k}"] = [
            [[pass_at_k(int(sum(of)), len(of), k)] for of in pair] for pair in enough
        ]
    found = {}
    for name, of_prompts in scores.items():
        if sides := list(zip(*of_prompts, strict=True)):
            x, y = map(_estimate, sides)
            low, high = difference_ci(x, y, correlation=correlation(*sides))
            found[name] = (x.value, y.value, low, high)
    return found


def _estimate(prompts: Sequence[Sequence[float]]) -> Estimate:
    scores = [score for of in prompts for score in of]
    groups = [i for i, of in enumerate(prompts) for _ in of]
    return Estimate(sum(scores) / len(scores), *score_ci(scores, groups=groups))


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

    answers: the samples' final answers, see final_answers. Answers that are read alike and have
    other rewards, which a reward of the whole text may give, count with their mean."""
    counts = Counter(answers)
    most = max(counts.values())
    means = []
    for answer in (a for a, count in counts.items() if count == most):
        alike = [r for a, r in zip(answers, rewards, strict=True) if a == answer]
        means.append(sum(alike) / len(alike))
    return sum(means) / len(means)


def final_answers(completions: Sequence[str]) -> list[str]:
    """Returns the final answer of each completion, as the reward gsm8k reads it: 0.5 and
    \\boxed{\\frac{1}{2}} are one answer. What it reads nothing in is its own answer, but for space
    around it. Processes of their own read them: what a policy wrote may end one. Then there is a
    warning, and [] is returned."""
    workers = min(os.cpu_count() or 1, -(-len(completions) // _CHUNK))
    try:
        with ProcessPoolExecutor(workers, mp.get_context("spawn"), initializer=_reader) as pool:
            return list(pool.map(_final_answer, completions, chunksize=_CHUNK))
    except BrokenProcessPool as e:
        log.warning("maj@n is left out: the final answers could not be read: %s", e)
        return []


def _reader() -> None:
    end_with_parent()
    end_process_when_late()
    logging.disable(logging.WARNING)  # math-verify's, that the bound on its work is not its own


def _final_answer(completion: str) -> str:
    answer: Any = bounded(_value)(completion)  # a float where it takes too much work
    return answer if isinstance(answer, str) else completion.strip()


def _value(completion: str) -> Any:
    from sympy import nsimplify  # here: not every evaluation reads answers

    from megarl.rollout.rewards.gsm8k import final_answer

    try:
        value = final_answer(completion)
        if value is not None:
            return str(nsimplify(value.doit(), rational=True))
    except Exception:  # sympy's may be any
        pass
    return completion.strip()
