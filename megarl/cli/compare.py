"""Compares two evaluations prompt by prompt, for `megarl eval --compare A B`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

from megarl.config.earlier_run import differences
from megarl.config.errors import ConfigError, raise_if_any
from megarl.observability.run_log import read_lines
from megarl.trainer.scores import gains

RESULTS, SAMPLES = "results.json", "samples.jsonl"
Rewards = dict[tuple[str, int], list[float]]  # by prompt, and by which of equal prompts it is
_MALFORMED = (TypeError, AttributeError, OverflowError, RecursionError)  # what odd JSON raises


def compare(a: Path, b: Path) -> int:
    """Prints how much better than A the evaluation B is, on the prompts that both have, and returns
    0. Raises ConfigError where one is none, or they cannot be compared."""
    (first, before), (second, after) = _read(a), _read(b)
    apart = {key: f"{key}: {x} | {y}" for key, x, y in differences(first, second)}
    barred = [line for key, line in apart.items() if "n_samples" in key or ".reward." in key]
    raise_if_any(f"--compare {a} {b}: {line}: evaluate both alike" for line in barred)
    for line in apart.values():
        _say(f"not the same: {line}")
    for name, x in before.items():
        y = after.get(name, {})
        pairs = [[x[key], y[key]] for key in x if key in y]
        raise_if_any([f"--compare {a} {b}: {name}: no prompt in common"] * (not pairs))
        _say(f"{name}: {len(pairs)} prompts of both (A has {len(x)}, B {len(y)})")
        apart_by = [fmean(of_b) - fmean(of_a) for of_a, of_b in pairs]
        better, worse = sum(by > 0 for by in apart_by), sum(by < 0 for by in apart_by)
        _say(f"  {better} better, {worse} worse, {len(pairs) - better - worse} the same")
        for figure, (of_a, of_b, low, high) in gains(pairs, first["gconfig"]["n_samples"]).items():
            gain = f"{of_b - of_a:+.3f} [{low:+.3f}, {high:+.3f}]"
            _say(f"  {figure:9}{of_a:.3f} -> {of_b:.3f}, {gain}")
    return 0


def _say(line: str) -> None:
    """Prints a line of text that others may have written, without its control characters."""
    print("".join(c if c.isprintable() else repr(c)[1:-1] for c in line))


def _read(place: Path) -> tuple[dict[str, Any], dict[str, Rewards]]:
    """Returns how an evaluation was made, and its rewards by data set and prompt. Raises
    ConfigError."""
    folder = place.parent if place.name == RESULTS else place
    rewards: dict[str, dict[str, dict[int, list[float]]]] = {}
    try:
        for name in (RESULTS, SAMPLES):
            if (folder / name).exists() and not (folder / name).is_file():
                raise ValueError(f"{name} is no file")  # a pipe would be waited for
        record = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
        for line in read_lines(folder / SAMPLES):
            of_key = rewards.setdefault(line["dataset"], {}).setdefault(line["key"], {})
            of_key.setdefault(line["prompt_number"], []).append(float(line["reward"]))
            if not math.isfinite(line["reward"]):
                raise ValueError(f"{SAMPLES} has a reward of {line['reward']}")
        if any(of["accuracy"] is None or n not in rewards for n, of in record["results"].items()):
            raise ValueError(f"{SAMPLES} lacks answers, or too many failed")
        if type(record["gconfig"]["n_samples"]) is not int or type(record["datasets"]) is not dict:
            raise ValueError(f"{RESULTS} lacks gconfig.n_samples or datasets")
        made = {key: record[key] for key in ("datasets", "gconfig", "seed")}
        # equal prompts are told apart by their order
        return made, {
            name: {(key, i): r for key, of in keys.items() for i, r in enumerate(of.values())}
            for name, keys in rewards.items()
        }
    except (OSError, ValueError, LookupError, *_MALFORMED) as e:
        why = f"no evaluation that can be compared by prompts ({type(e).__name__}: {e})"
        raise ConfigError(f"--compare {place}: {why}; run megarl eval again") from e
