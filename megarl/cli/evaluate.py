"""Evaluates a model on data sets: how often one answer is right, one of k, and most of n.

    megarl eval MODEL [--datasets A,B] [--config X.yaml] [--n N] [--out DIR] [key=value ...]

    MODEL         a Hugging Face directory, such as a run's final model
    --datasets    gsm8k, arithmetic, reasoning_gym or a function's import path; without it, the
                  configuration's valid_dataset and valid_datasets
    --config      a recipe: its validation sets, eval_gconfig, server and rollout are used
    --n           answers to each prompt (1); with more than one they are sampled
    --out         where results.json, samples.jsonl and server logs go; an evaluation is never
                  overwritten (default: eval/<name of MODEL>, or the first of -2, -3, ... behind it)

Keys change the configuration, like valid_dataset.size=200, server.type=sglang, server.tp=8,
eval_gconfig.max_new_tokens=2048. Servers are started on this machine, or are those of
rollout.addresses, which must serve MODEL.

A reward of 1 or more is right. accuracy is the share of right answers, pass@k the chance that one
of k is right (unbiased, from n), maj@n the reward of the answer that most of n give. Intervals are
of 95 %, over prompts. samples.jsonl has every answer with its reward, results.json the figures and
what was asked. Answers are sampled by `seed`, or by eval_gconfig.seed where that is set.

failed is the share of answers whose environment, reward, tool or server failed, also when asked
again, or that took too long; the others are in the figures. Above evaluator.max_failed there are no
figures, and the status is 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megarl.config.command_line import CommandLine, help_or_command_line
from megarl.config.dataset import DatasetConfig
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.config.recipes import GRPOConfig, held_out_sets
from megarl.config.secrets import keep_written, public_tree
from megarl.models.hf_config import read_hf_config
from megarl.utils.staging import write_whole

RESULTS = "results.json"
USAGE = "megarl eval MODEL [--datasets A,B] [key=value ...]"


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluates the model that `argv` names and returns 0, or 1 where too many answers failed.
    Raises ConfigError for a wrong command line or configuration."""
    options = ("datasets", "config", "n", "out")
    command = help_or_command_line(argv, __doc__ or "", options=options)
    if command is None:
        return 0
    if len(command.words) != 1:
        raise ConfigError([f"give one model directory: {USAGE}"])
    model = Path(command.words[0])
    cfg, datasets = _configuration(command, model)
    out = _place(command.options.get("out"), model)
    from megarl.trainer.evaluate_model import evaluate_model  # here, so that --help is instant

    results, samples = evaluate_model(cfg, str(model), datasets, logs=out)
    lines = (json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
    write_whole(out / "samples.jsonl", "".join(lines))
    figures = {name: _plain(found) for name, found in results.items()}
    record = {"model": str(model), "results": figures, **_asked(cfg, datasets)}
    write_whole(out / RESULTS, json.dumps(record, indent=2))
    Console().print(_table(results))
    print(f"{out / RESULTS}, {out / 'samples.jsonl'}")
    return int(any(found["failed"] > cfg.evaluator.max_failed for found in results.values()))


def _place(out: str | None, model: Path) -> Path:
    """Returns the directory of the results, `out` or one named after the model. Raises ConfigError
    for one that holds an evaluation."""
    if out is None:
        first = Path("eval", model.resolve().name)
        places = chain([first], (first.with_name(f"{first.name}-{i}") for i in count(2)))
        return next(p for p in places if not (p / RESULTS).exists())
    if (Path(out) / RESULTS).exists():
        raise ConfigError([f"--out {out}: holds an evaluation; name another directory"])
    return Path(out)


def _asked(cfg: GRPOConfig, datasets: dict[str, DatasetConfig]) -> dict[str, Any]:
    """Returns what results.json says of an evaluation beside its figures."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "datasets": {name: _public(cfg, data) for name, data in datasets.items()},
        "gconfig": public_tree(cfg)["eval_gconfig"],
        "seed": cfg.seed,
    }


def _public(cfg: GRPOConfig, data: DatasetConfig) -> dict[str, Any]:
    """Returns a data set of the evaluation as it was written, with secrets masked."""
    tree = public_tree(cfg)
    for name, held_out in cfg.valid_datasets.items():
        if held_out is data:
            return dict(tree["valid_datasets"][name])
    return {**tree["valid_dataset"], "type": data.type}


def _configuration(
    command: CommandLine, model: Path
) -> tuple[GRPOConfig, dict[str, DatasetConfig]]:
    """Returns the configuration and the data sets by name. Raises ConfigError."""
    source, overrides = command.options.get("config"), [f"actor.path={model}", *command.overrides]
    named = [name for name in command.options.get("datasets", "").split(",") if name]
    if source is None and not named:
        raise ConfigError([f"give --datasets or --config: {USAGE}"])
    n = command.options.get("n", "1")
    if not n.isdecimal() or not int(n):
        raise ConfigError([f"--n {n}: use a whole number of at least 1"])
    try:
        read_hf_config(model)
    except ValueError as e:
        raise ConfigError([str(e)]) from e
    first = [f"valid_dataset.type={named[0]}"] if named else []
    cfg = load_config(source, [*first, *overrides])
    sets = held_out_sets(cfg)
    if not isinstance(cfg, GRPOConfig) or not sets:
        raise ConfigError([f"{source}: evaluation needs an RL recipe with a valid_dataset"])
    sampled = cfg.eval_gconfig.new(n_samples=int(n))
    if int(n) > 1 and sampled.greedy:
        sampled = sampled.new(greedy=False, temperature=sampled.temperature or 1.0)
    if sampled.seed is None:
        sampled = sampled.new(seed=cfg.seed)
    sampling = replace(cfg, eval_gconfig=sampled)
    keep_written(cfg, sampling)
    cfg = sampling
    if not named:
        return cfg, {name or data.type: data for name, data in sets.items()}
    return cfg, {name: replace(sets[""], type=name) for name in named}


def _plain(found: dict[str, float]) -> dict[str, float | None]:
    """Returns figures as JSON has them: null for one that says nothing."""
    return {name: None if math.isnan(value) else value for name, value in found.items()}


def _table(results: dict[str, dict[str, float]]) -> Table:
    """Returns a row for each figure, with its interval, and a column for each data set."""
    table = Table("", *results)
    for name in dict.fromkeys(name for found in results.values() for name in found):
        if not name.endswith(("_lo", "_hi")):
            table.add_row(name, *(_shown(found, name) for found in results.values()))
    return table


def _shown(found: dict[str, float], name: str) -> str:
    if math.isnan(found.get(name, math.nan)):
        return "-"
    if f"{name}_lo" not in found:
        return f"{found[name]:g}"
    return f"{found[name]:.3f}  [{found[f'{name}_lo']:.3f}, {found[f'{name}_hi']:.3f}]"
