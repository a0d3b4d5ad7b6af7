"""Compares two evaluations prompt by prompt, for `megarl eval --compare A B`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from megarl.config.earlier_run import differences
from megarl.config.errors import ConfigError, raise_if_any
from megarl.observability.intervals import Estimate, correlation, difference_ci, score_ci
from megarl.observability.run_log import read_lines
from megarl.trainer.scores import pass_at_k, steps_of_k
from megarl.utils.importing import in_one_line

RESULTS, SAMPLES = "results.json", "samples.jsonl"
Scores = Sequence[float]  # of the answers to a prompt


def compare(a: Path, b: Path) -> int:
    """Prints how much better than A the evaluation B is, on the prompts that both have, and returns
    0. Raises ConfigError where one is none, or they cannot be compared."""
    (first, before), (second, after) = _read(a), _read(b)
    apart = {key: f"{key}: {x} | {y}" for key, x, y in differences(first, second)}
    barred = [line for key, line in apart.items() if "n_samples" in key or ".reward." in key]
    raise_if_any(f"--compare {a} {b}: {line}: evaluate both alike" for line in barred)
    for line in apart.values():
        print(f"not the same: {line}")
    for name, x in before.items():
        y = after.get(name, {})
        pairs = [[x[key], y[key]] for key in x if key in y]
        raise_if_any([f"--compare {a} {b}: {name}: no prompt in common"] * (not pairs))
        print(f"{name}: {len(pairs)} prompts of both (A has {len(x)}, B {len(y)})")
        gains = [fmean(of_b) - fmean(of_a) for of_a, of_b in pairs]
        better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
        print(f"  {better} better, {worse} worse, {len(pairs) - better - worse} the same")
        print(*_figures(pairs, first["gconfig"]["n_samples"]), sep="\n")
    return 0


def _read(place: Path) -> tuple[dict[str, Any], dict[str, dict[str, list[float]]]]:
    """Returns how an evaluation was made, and its rewards by data set and prompt. Raises
    ConfigError."""
    folder = place.parent if place.name == RESULTS else place
    rewards: dict[str, dict[str, list[float]]] = {}
    try:
        record = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
        for line in read_lines(folder / SAMPLES):
            of_set = rewards.setdefault(line["dataset"], {})
            of_set.setdefault(line["key"], []).append(line["reward"])
        if any(of["accuracy"] is None or n not in rewards for n, of in record["results"].items()):
            raise ValueError(f"{SAMPLES} lacks answers, or too many failed")
        return {key: record[key] for key in ("datasets", "gconfig", "seed")}, rewards
    except (OSError, ValueError, LookupError) as e:
        why = f"no evaluation that can be compared by prompts ({in_one_line(e)})"
        raise ConfigError([f"--compare {place}: {why}; run megarl eval again"]) from e


def _figures(pairs: Sequence[Sequence[Scores]], n: int) -> Iterator[str]:
    """Yields a line for each figure of n answers to a prompt: A's, B's, and the difference with its
    interval, as a report has it of a run's gain."""
    right = [[[r >= 1 for r in of] for of in pair] for pair in pairs]
    scores: dict[str, Sequence[Sequence[Scores]]] = {"accuracy": right, "reward": pairs}
    for k in steps_of_k(n)[1:]:
        enough = [pair for pair in right if min(map(len, pair)) >= k]
        scores[f"pass@{k}"] = [[[pass_at_k(sum(of), len(of), k)] for of in pair] for pair in enough]
    for name, of_prompts in scores.items():
        if sides := list(zip(*of_prompts, strict=True)):
            x, y = map(_estimate, sides)
            low, high = difference_ci(x, y, correlation=correlation(*sides))
            gain = f"{y.value - x.value:+.3f} [{low:+.3f}, {high:+.3f}]"
            yield f"  {name:9}{x.value:.3f} -> {y.value:.3f}, {gain}"


def _estimate(prompts: Sequence[Scores]) -> Estimate:
    scores = [score for of in prompts for score in of]
    groups = [i for i, of in enumerate(prompts) for _ in of]
    return Estimate(fmean(scores), *score_ci(scores, groups=groups))
