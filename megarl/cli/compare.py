"""Compares two evaluations prompt by prompt, for `megarl eval --compare A B`."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from megarl.config.earlier_run import differences
from megarl.config.errors import ConfigError, raise_if_any
from megarl.observability.run_log import read_lines
from megarl.trainer.scores import gains

RESULTS, SAMPLES = "results.json", "samples.jsonl"


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
        apart_by = [fmean(of_b) - fmean(of_a) for of_a, of_b in pairs]
        better, worse = sum(by > 0 for by in apart_by), sum(by < 0 for by in apart_by)
        print(f"  {better} better, {worse} worse, {len(pairs) - better - worse} the same")
        for figure, (of_a, of_b, low, high) in gains(pairs, first["gconfig"]["n_samples"]).items():
            gain = f"{of_b - of_a:+.3f} [{low:+.3f}, {high:+.3f}]"
            print(f"  {figure:9}{of_a:.3f} -> {of_b:.3f}, {gain}")
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
        why = f"no evaluation that can be compared by prompts ({type(e).__name__}: {e})"
        raise ConfigError([f"--compare {place}: {why}; run megarl eval again"]) from e
